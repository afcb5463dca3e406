"""How far a worker is, as others are told."""

from oobleck.worker.state.progress import TrainingProgress


def test_a_worker_has_recorded_all_steps_since_it_last_came_to_others() -> None:
    begun = TrainingProgress()
    begun.join(0, 0, 0, {}, 1)
    begun.committed = 7
    begun.join(7, 0, 0, {}, 2)
    assert begun.recorded_from == 0
    behind = TrainingProgress(committed=3)
    behind.join(7, 0, 0, {}, 2)
    assert behind.recorded_from == 7, "it has not committed what came between"
    behind.committed = 9
    behind.join(8, 0, 0, {}, 3)
    assert behind.recorded_from == 7
    behind.restart(5, 4, {}, recorded_from=0)
    assert (behind.committed, behind.recorded_from, behind.recorder) == (5, 0, 0)
