"""Bytes: what a number costs by precision, and how much of a device training may use.

The one place for both, shared by the estimate, the profiler and the master. Must not know models.
"""

from collections.abc import Iterable

from oobleck.planner.job.spec import Precision, TrainingSpec

#: Weights, gradients and moments are kept in the precision of the weights: bf16 is autocast,
#: which casts on the way into a layer and keeps 32-bit master weights.
STATE_ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 4, "fp64": 8}
#: Of a number that a layer keeps for its backward.
ACTIVATION_ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp64": 8}

#: One part in so many is left free: caching allocators hold 5 to 8% that no tensor of a fitting
#: size can use, and while layer state moves, sends and receives are buffered beside it.
MARGIN_SHARE = 10
#: Least that is left free, however small the device: a CUDA context with the workspaces of its
#: libraries, or a CPU worker's own libraries, threads and communication buffers, before any model.
LEAST_MARGIN_BYTES = 256 << 20


#: On a CPU, blocks from this size on are taken from the kernel and given back one by one; what
#: smaller ones once took stays with the heap (`worker/runtime/heap.py`).
MAPPED_BYTES = 4 << 20
#: For each byte of one layer's smaller blocks the heap holds so many more in holes. Measured with
#: glibc, whose aligned blocks rarely fit where one of the same size was: 13 to 20 MB where a layer
#: has 11 to 19 in fp32, 4 to 18 where it has 15 to 26 under bf16; what libraries keep from their
#: first use, some 10 MB, is beside that.
HOLES_PER_BYTE = 1


def with_holes(working_bytes: int, kept_bytes: int) -> int:
    """`working_bytes` in smaller blocks of a layer that keeps `kept_bytes` in such, and what the
    heap holds beside."""
    return working_bytes + (working_bytes + kept_bytes) * HOLES_PER_BYTE


def heap_and_mapped(blocks: Iterable[int]) -> tuple[int, int]:
    """How many bytes of `blocks`, all there at once, lie in the heap, and how many are mapped."""
    heap = mapped = 0
    for size in blocks:
        if size < MAPPED_BYTES:
            heap += size
        else:
            mapped += size
    return heap, mapped


def usable_bytes(physical_bytes: int) -> int:
    """What state and activations may take of a device (or of a CPU worker's share of its host).

    A tenth and at least 256 MiB stay free. Of less than 512 MiB half does, so that toy limits
    still leave something to plan with.
    """
    margin = max(physical_bytes // MARGIN_SHARE, LEAST_MARGIN_BYTES)
    return physical_bytes - min(margin, physical_bytes // 2)


def budget_bytes(limit_bytes: int | None, physical_bytes: int) -> int:
    """A limit that the job sets is what it says; of a device the margin goes off."""
    return usable_bytes(physical_bytes) if limit_bytes is None else limit_bytes


def state_bytes(parameters: int, training: TrainingSpec) -> int:
    """Weights, gradients and the optimizer's moments of so many parameters."""
    return (2 + training.optimizer.moments) * parameters * STATE_ITEM_BYTES[training.precision]
