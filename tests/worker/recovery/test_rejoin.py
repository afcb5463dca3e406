"""Where training goes on after a loss: every combination of states that can occur."""

import contextlib
import random
from dataclasses import replace

import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.routes import Shard
from oobleck.worker.recovery.rejoin import Held, RecoveryState, agree
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.step.vote import TrainingProgress

A, B, C, D = (WorkerId(NodeName(name), 0) for name in "abcd")


def recovery_state(
    committed: int,
    *,
    reduced: tuple[int, int] = (0, 0),
    voted: tuple[int, int] | None = None,
    layers: tuple[int, ...] = (0, 1),
    version: int | None = None,
    begun: int | None = None,
    reduced_layers: range | None = None,
    lineage: int = 0,
    skipped: int = 0,
    joined: int = 0,
) -> RecoveryState:
    """Of a model of three layers; `reduced` and `voted` are (step, generation)."""
    if reduced_layers is None:
        reduced_layers = range(min(layers), max(layers) + 1) if layers else range(0)
    voted = voted if voted is not None else (committed, 1 if committed else 0)
    held = committed if version is None else version
    return RecoveryState(
        lineage=lineage,
        committed=committed,
        reduced=reduced[0],
        reduced_generation=reduced[1],
        reduced_layers=tuple(reduced_layers),
        voted=voted[0],
        voted_generation=voted[1],
        begun=committed if begun is None else begun,
        skipped=skipped,
        joined=joined,
        layer_count=3,
        layers={layer: Held(held) for layer in layers},
        former={},
    )


def whole(*layers: int) -> frozenset[Shard]:
    return frozenset(Shard(layer) for layer in layers)


FRESH = recovery_state(0, layers=())


def test_start_of_a_job() -> None:
    agreement = agree({A: FRESH, B: FRESH})
    assert agreement.step == 0
    assert agreement.held == {A: frozenset(), B: frozenset()}


def test_nobody_has_committed_the_step_so_it_is_done_again() -> None:
    agreement = agree({A: recovery_state(4, reduced=(5, 1)), B: recovery_state(4)})
    assert agreement.step == 4
    assert agreement.roll_forward == frozenset()
    assert agreement.vote_holder is None
    assert agreement.held == {A: whole(0, 1), B: whole(0, 1)}


def test_one_has_committed_so_the_others_roll_forward() -> None:
    ahead = recovery_state(5, reduced=(5, 1), layers=(2,))
    behind = recovery_state(4, reduced=(5, 1))
    agreement = agree({A: behind, B: ahead})
    assert agreement.step == 5
    assert agreement.roll_forward == {A}
    assert agreement.vote_holder == B
    assert agreement.held == {A: whole(0, 1), B: whole(2)}


def test_who_took_over_a_copy_with_its_vote_lets_the_others_follow() -> None:
    # A has what it was fed by one that is gone since, and who alone had seen the vote on step 5.
    behind = recovery_state(4, reduced=(5, 1), layers=(0, 1, 2), joined=1)
    agreement = agree({A: recovery_state(5, layers=(2,), joined=1), B: behind, C: behind})
    assert (agreement.step, agreement.vote_holder, agreement.voted_generation) == (5, A, 1)
    assert agreement.roll_forward == {B, C}
    assert agreement.held == {A: whole(2), B: whole(0, 1, 2), C: whole(0, 1, 2)}


def test_layer_without_reduced_gradients_cannot_roll_forward() -> None:
    # In the first step of a generation A still keeps layer 2 from the one before, at step 4.
    ahead = recovery_state(5, reduced=(5, 1), layers=(2,))
    behind = recovery_state(4, reduced=(5, 1), layers=(0, 1, 2), reduced_layers=range(2))
    agreement = agree({A: behind, B: ahead})
    assert agreement.roll_forward == {A}
    assert agreement.held == {A: whole(0, 1), B: whole(2)}


def test_layer_without_reduced_gradients_counts_when_the_step_is_done_again() -> None:
    behind = recovery_state(4, reduced=(5, 1), layers=(0, 1, 2), reduced_layers=range(2))
    assert agree({A: behind}).held == {A: whole(0, 1, 2)}


def test_seen_vote_counts_as_a_commit_before_it_is_applied() -> None:
    seen = recovery_state(4, reduced=(5, 1), voted=(5, 1))
    behind = recovery_state(4, reduced=(5, 1))
    agreement = agree({A: seen, B: behind})
    assert agreement.step == 5
    assert agreement.roll_forward == {A, B}
    assert agreement.vote_holder == A


def test_fresh_worker_holds_nothing_and_rolls_nothing_forward() -> None:
    agreement = agree({A: recovery_state(5, reduced=(5, 1)), B: FRESH})
    assert agreement.step == 5
    assert agreement.roll_forward == frozenset()
    assert agreement.held[B] == frozenset()


def test_gradients_of_an_older_attempt_at_the_step_do_not_count() -> None:
    # C was cut off with reduced gradients of step 5 in generation 1; the others did step 5 again
    # in generation 2. C's sums may differ in their last bits, so its layers are not used.
    done = recovery_state(5, reduced=(5, 2), voted=(5, 2))
    agreement = agree({A: done, C: recovery_state(4, reduced=(5, 1), voted=(4, 1))})
    assert agreement.roll_forward == frozenset()
    assert agreement.held[C] == frozenset()


def test_worker_left_far_behind_holds_nothing_of_worth() -> None:
    agreement = agree({A: recovery_state(9), B: recovery_state(3, reduced=(4, 1))})
    assert agreement.step == 9
    assert agreement.held[B] == frozenset()


def test_layers_kept_from_an_older_plan_are_worth_nothing_after_a_commit() -> None:
    agreement = agree({A: recovery_state(5, version=4)})
    assert agreement.held[A] == frozenset()


def test_one_step_voted_in_two_generations_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="generations"):
        agree(
            {
                A: recovery_state(5, voted=(5, 1), joined=2),
                B: recovery_state(5, voted=(5, 2), joined=2),
            }
        )


def test_a_step_that_others_have_begun_again_without_its_only_voter_is_done_again() -> None:
    # a alone saw the vote on step 6 and was cut off; b and c met without it, and it is back.
    ahead = recovery_state(6, voted=(6, 1), layers=(2,), begun=6, joined=1)
    begun = recovery_state(5, begun=6, joined=2)
    waiting = recovery_state(5, reduced=(6, 1), layers=(2,), begun=6, joined=2)
    agreement = agree({A: ahead, B: begun, C: waiting})
    assert (agreement.step, agreement.roll_forward) == (5, frozenset())
    assert agreement.held == {A: frozenset(), B: whole(0, 1), C: whole(2)}
    assert agreement.begun == {B, C}
    # A vote that was not applied is no loss: the layers are those of the step before.
    agreement = agree({A: recovery_state(5, voted=(6, 1), layers=(2,), joined=1), B: begun})
    assert (agreement.step, agreement.vote_holder) == (5, None)
    assert agreement.held == {A: whole(2), B: whole(0, 1)}


def test_a_full_copy_counts_where_those_who_went_on_without_it_have_lost_a_layer() -> None:
    # a alone saw the vote on step 6 and was cut off; b began it again with another one, who died.
    everything = (0, 1, 2)
    ahead = recovery_state(6, voted=(6, 1), layers=everything, begun=6, joined=1)
    begun = recovery_state(5, begun=6, joined=2)
    agreement = agree({A: ahead, B: begun})
    assert (agreement.step, agreement.begun) == (6, frozenset())
    assert agreement.held == {A: whole(*everything), B: frozenset()}
    # It may be spread over several, one of whom has the vote and has not applied it.
    agreement = agree(
        {
            A: recovery_state(6, voted=(6, 1), layers=(2,), joined=1),
            B: begun,
            C: recovery_state(5, reduced=(6, 1), voted=(5, 1), layers=(0, 1), joined=1),
        }
    )
    assert (agreement.step, agreement.roll_forward, agreement.vote_holder) == (6, {C}, A)
    assert agreement.held == {A: whole(2), B: frozenset(), C: whole(0, 1)}
    # Who has that vote and has not applied it may have met others since, and have left them again.
    left = recovery_state(5, reduced=(6, 1), voted=(6, 1), layers=(0, 1), joined=2)
    other = recovery_state(5, reduced=(6, 2), voted=(6, 2), joined=2)
    agreement = agree(
        {A: recovery_state(6, voted=(6, 1), layers=(2,), joined=1), B: other, C: left}
    )
    assert agreement.held == {A: whole(2), B: frozenset(), C: whole(0, 1)}
    # The others have voted on the step too.
    newer = recovery_state(6, voted=(6, 2), layers=(1, 2), joined=2)
    agreement = agree({A: ahead, B: newer})
    assert agreement.held == {A: whole(*everything), B: frozenset()}
    full = replace(newer, layers=dict.fromkeys(range(3), Held(6)))
    assert agree({A: ahead, B: newer, C: full}).held == {
        A: frozenset(),
        B: whole(1, 2),
        C: whole(*everything),
    }
    # Who has committed a newer step has outrun them for good.
    assert agree({A: ahead, B: recovery_state(7, joined=2)}).step == 7


def test_who_has_committed_by_another_vote_than_the_others_reduced_does_not_lead_them() -> None:
    # Nobody has the vote on step 6, so b cannot follow, and a is left out until b has lost a layer.
    ahead = recovery_state(6, voted=(5, 3), layers=(0, 1, 2), joined=3)
    behind = recovery_state(5, reduced=(6, 3), layers=(0, 1), joined=4)
    agreement = agree({A: ahead, B: behind})
    assert (agreement.step, agreement.roll_forward) == (6, frozenset())
    assert agreement.held == {A: whole(0, 1, 2), B: frozenset()}
    full = replace(behind, layers=dict.fromkeys(range(3), Held(5)))
    assert agree({A: ahead, B: behind, C: full}).step == 5


@pytest.mark.timeout(60)
def test_whatever_workers_tell_the_agreement_comes_to_an_end() -> None:
    rng = random.Random(1)
    drawn = 0
    for _ in range(5000):
        states = {}
        for worker in (A, B, C, D)[: rng.randint(1, 4)]:
            committed = rng.randint(0, 3)
            states[worker] = recovery_state(
                committed,
                reduced=(rng.choice([0, committed, committed + 1]), rng.randint(0, 3)),
                voted=(rng.randint(0, committed + 1), rng.randint(0, 3)),
                layers=tuple(layer for layer in range(3) if rng.random() < 0.8),
                joined=rng.randint(0, 3),
            )
        with contextlib.suppress(InvariantViolation):
            agree(states)
            drawn += 1
    assert drawn > 4000


def test_workers_that_tell_the_same_stand_for_each_other() -> None:
    """The agreement is that of states that are looked at one by one."""
    rng = random.Random(2)
    workers = [WorkerId(NodeName(name), 0) for name in "hgfedcba"]
    drawn = 0
    for _ in range(2000):
        some = []
        for _ in range(rng.randint(1, 4)):
            committed = rng.randint(2, 3)
            some.append(
                recovery_state(
                    committed,
                    reduced=(committed + rng.randint(0, 1), 1),
                    voted=(committed + rng.randint(0, 1), 1),
                    begun=committed + 1,
                    layers=tuple(layer for layer in range(3) if rng.random() < 0.8),
                    lineage=rng.choice([0, 0, 0, 1]),
                )
            )
        states = {worker: rng.choice(some) for worker in workers}
        with contextlib.suppress(InvariantViolation):
            one_by_one = agree({worker: replace(state) for worker, state in states.items()})
            assert agree(states) == one_by_one
            drawn += one_by_one.vote_holder is not None
    assert drawn > 500


def test_who_met_without_the_only_voter_follows_it_while_all_still_can() -> None:
    ahead = recovery_state(6, voted=(6, 1), layers=(2,), joined=1)
    agreement = agree({A: ahead, B: recovery_state(5, reduced=(6, 1), begun=6, joined=2)})
    assert (agreement.step, agreement.roll_forward, agreement.vote_holder) == (6, {B}, A)


def test_of_a_step_that_was_voted_on_again_the_newer_vote_counts() -> None:
    older, newer = (recovery_state(6, voted=(6, g), layers=(g,), joined=g) for g in (1, 2))
    agreement = agree({A: older, B: newer})
    assert (agreement.step, agreement.vote_holder) == (6, None)
    assert agreement.held == {A: frozenset(), B: whole(2)}


def test_who_agrees_on_the_step_before_forgets_the_vote() -> None:
    progress = TrainingProgress(committed=6, voted=6, voted_generation=Generation(1))
    progress.join(5, 0, 0, {}, 3)
    assert (progress.committed, progress.voted, progress.joined) == (5, 0, 3)


def test_who_has_begun_the_step_that_is_done_again_may_have_some_of_it() -> None:
    two = {A: recovery_state(4, begun=5), B: recovery_state(4, begun=4)}
    assert agree(two).begun == {A}
    assert agree({**two, C: recovery_state(5, begun=5)}).begun == frozenset()


def test_who_comes_learns_how_many_steps_in_a_row_were_skipped() -> None:
    # c was left out at step 3, and b has yet to apply step 5.
    behind = recovery_state(4, reduced=(5, 1), skipped=1)
    agreement = agree(
        {A: recovery_state(5, skipped=2), B: behind, C: recovery_state(3, skipped=3), D: FRESH}
    )
    assert agreement.skipped == 2
    assert agree({B: behind, D: FRESH}).skipped == 1
    for known, expected in (
        (TrainingProgress(committed=5, skipped=2), 2),
        (TrainingProgress(committed=3, skipped=3), 2),
        (TrainingProgress(), 2),
    ):
        known.join(agreement.step, agreement.lineage, agreement.skipped, {}, 2)
        assert (known.committed, known.skipped) == (5, expected)
    gone_back = TrainingProgress(committed=5, skipped=5)
    gone_back.join(5, 2, 0, {}, 2)
    assert gone_back.skipped == 0


def test_what_was_left_out_is_that_of_who_has_the_step_or_of_the_one_before() -> None:
    behind = replace(recovery_state(4, reduced=(5, 1)), missed={"0.a": 1})
    done = replace(recovery_state(5), missed={"0.a": 1, "0.b": 1})
    agreement = agree({A: behind, B: done, D: FRESH})
    assert (agreement.missed, agreement.missed_step) == (done.missed, 5)
    voted = replace(behind, voted=5, voted_generation=Generation(1))
    agreement = agree({A: FRESH, B: voted, C: behind})
    assert (agreement.step, agreement.missed, agreement.missed_step) == (5, behind.missed, 4)


def test_a_recovery_state_reads_back_whole() -> None:
    one = recovery_state(5, reduced=(6, 3), layers=(1,), skipped=2, joined=3)
    one = replace(one, missed={"0.a": 2})
    assert decode(RecoveryState, encode(one)) == one


def test_who_did_not_go_back_to_the_checkpoint_has_nothing_that_counts() -> None:
    # b was idle while a and c went back from step 9 to step 5 in generation 4, and did step 6.
    agreement = agree(
        {
            A: recovery_state(6, layers=(0, 1), lineage=4),
            B: recovery_state(9, layers=(0, 1, 2)),
            C: recovery_state(6, layers=(2,), lineage=4),
        }
    )
    assert (agreement.lineage, agreement.step) == (4, 6)
    assert agreement.held == {A: whole(0, 1), B: frozenset(), C: whole(2)}
    assert not agreement.roll_forward


def test_shares_count_as_they_are_and_those_of_before_the_last_plan_too() -> None:
    half, third = Held(5, 1, 2), Held(5, 0, 3)
    states = {
        A: replace(recovery_state(5), layers={0: half}, former={0: Held(5), 1: third}),
        B: recovery_state(5),
    }
    agreement = agree(states)
    assert agreement.held == {A: {Shard(0, 1, 2), Shard(0), Shard(1, 0, 3)}, B: whole(0, 1)}


def test_who_rolls_forward_has_gradients_of_its_newest_shares_alone() -> None:
    behind = replace(
        recovery_state(4, reduced=(5, 1)),
        layers={0: Held(4, 0, 2), 1: Held(4)},
        former={0: Held(4), 1: Held(4, 1, 2)},
    )
    agreement = agree({A: behind, B: recovery_state(5, reduced=(5, 1), layers=(2,))})
    assert agreement.held[A] == {Shard(0, 0, 2), Shard(1)}
