"""What a worker does once more rather than fail the job or its node, and what it does not."""

import pytest
import torch

from oobleck.worker.recovery.forgiven import Forgiven
from oobleck.worker.runtime.errors import NodeError, TransportError, Unmapped
from oobleck.worker.state.progress import TrainingProgress
from support.director import worker_named

SHORT = torch.OutOfMemoryError("CUDA out of memory\nof 80 GiB")


def after(step: int, *, begun: bool = True) -> tuple[Forgiven, TrainingProgress]:
    """Of a worker that has committed `step`, told of it, and begun the next one."""
    progress = TrainingProgress(committed=step, begun=step + begun)
    forgiven = Forgiven(worker_named("a"), progress)
    forgiven.recorded = step
    return forgiven, progress


def commit(forgiven: Forgiven, progress: TrainingProgress, step: int) -> None:
    progress.committed = progress.voted = forgiven.recorded = step
    progress.begun = step + 1


def test_a_step_is_done_once_more_and_not_twice() -> None:
    forgiven, progress = after(4)
    assert not forgiven.short_of_memory(RuntimeError("shapes differ"), training=True)
    assert progress.begun == 5
    assert forgiven.short_of_memory(SHORT, training=True)
    assert progress.begun == 4, "nothing of the step counts"
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory; twice in a row$"):
        forgiven.short_of_memory(SHORT, training=True)


def test_memory_that_others_hold_is_the_nodes_fault_and_not_the_jobs() -> None:
    held = 0
    progress = TrainingProgress(committed=4, begun=5)
    forgiven = Forgiven(worker_named("a"), progress, lambda: held)
    forgiven.recorded = 4
    held = 7 << 30
    assert forgiven.short_of_memory(SHORT, training=True), "they may be about to end"
    with pytest.raises(
        NodeError, match=r"twice in a row .* and 7.0 GiB of its GPU are neither torch's"
    ):
        forgiven.short_of_memory(SHORT, training=True)


@pytest.mark.parametrize("where", ["in the update", "before the record is told"])
def test_what_is_committed_is_not_done_again(where: str) -> None:
    forgiven, progress = after(4)
    progress.voted = 5
    if where == "before the record is told":
        progress.committed = 5
    assert not forgiven.short_of_memory(SHORT, training=True)
    forgiven.recorded = progress.committed = 5
    assert forgiven.short_of_memory(SHORT, training=True), "as in an evaluation"


def test_nor_is_an_update_on_the_way_into_a_generation() -> None:
    forgiven, progress = after(4, begun=False)
    progress.voted = 5
    assert not forgiven.short_of_memory(SHORT, training=False)


def test_a_job_that_is_short_again_and_again_fails() -> None:
    forgiven, progress = after(0)
    for step in (10, 30, 50):
        commit(forgiven, progress, step)
        assert forgiven.short_of_memory(SHORT, training=True)
    commit(forgiven, progress, 109)
    with pytest.raises(torch.OutOfMemoryError, match="4 times in 100 steps"):
        forgiven.short_of_memory(SHORT, training=True)
    commit(forgiven, progress, 110)
    assert forgiven.short_of_memory(SHORT, training=True)


def test_a_way_into_a_generation_is_tried_once_more_and_then_the_nodes_fault() -> None:
    forgiven, progress = after(4)
    assert forgiven.short_of_memory(SHORT, training=False)
    assert progress.begun == 5, "what is there of the step counts"
    with pytest.raises(NodeError, match=r"a/0 was out of memory .* twice in a row .CUDA out of m"):
        forgiven.short_of_memory(SHORT, training=False)


def test_memory_that_cannot_be_mapped_is_the_hosts_fault_where_nobody_has_ended() -> None:
    forgiven, _ = after(4)
    unmapped = Unmapped("NCCL: ncclUnhandledCudaError (peer access is not supported)")
    forgiven.check_mapped(unmapped, ())
    forgiven.check_mapped(unmapped, ("1", "2"))
    forgiven.check_mapped(TransportError("socket closed"), ("1", "2"))
    forgiven.check_mapped(unmapped, ("1", "3"))
    with pytest.raises(NodeError, match=r"peer access .* a does not let .* --ipc=host"):
        forgiven.check_mapped(unmapped, ("1", "3"))
