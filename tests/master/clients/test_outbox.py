"""Who is told when what is on disk: all in turn, nobody twice in a round, a few at a time."""

from oobleck.core.ids import JobId
from oobleck.master.clients.outbox import OTHERS_S, Rounds

SESSIONS = range(120)
FIRST, SECOND = JobId("first-1"), JobId("second-2")


def told_in(rounds: Rounds, until: float) -> list[tuple[float, list[JobId], list[int]]]:
    """All that is told before `until`, each as soon as it is due."""
    told = []
    while (at := rounds.due_at) is not None and at < until:
        told.append((at, *rounds.take(at, SESSIONS)))
        assert rounds.take(at, SESSIONS) == ([], []), "the next few have their own time"
    return told


def test_a_round_comes_to_every_session_once() -> None:
    rounds = Rounds(OTHERS_S)
    rounds.note(FIRST)
    told = told_in(rounds, OTHERS_S)
    assert len(told) > 1
    assert [number for _, _, numbers in told for number in numbers] == list(SESSIONS)
    assert all(jobs == [FIRST] for _, jobs, _ in told)
    assert rounds.due_at is None


def test_a_job_that_comes_in_a_round_is_told_of_in_the_next_one() -> None:
    rounds = Rounds(OTHERS_S)
    rounds.note(FIRST)
    first = rounds.take(0.0, SESSIONS)
    rounds.note(SECOND)
    rest = told_in(rounds, OTHERS_S)
    assert first[0] == [FIRST]
    assert {tuple(jobs) for _, jobs, _ in rest} == {(FIRST,)}
    later = told_in(rounds, 2 * OTHERS_S)
    assert later[0][0] >= OTHERS_S
    assert [number for _, _, numbers in later for number in numbers] == list(SESSIONS)
    assert {tuple(jobs) for _, jobs, _ in later} == {(SECOND,)}
