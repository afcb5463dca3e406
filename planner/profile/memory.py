"""Bytes per number by precision, and the share of a device that training may use.

Shared by the estimate, the profiler and the master. Must not know models.
"""

from collections.abc import Iterable

from oobleck.core.job.spec import Precision, TrainingSpec

#: Bytes of a trained weight, a gradient or a moment.
STATE_ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 4, "fp8": 4, "fp64": 8}
#: Bytes of a number that a layer computes with: a weight, or an activation kept for the backward.
ACTIVATION_ITEM_BYTES: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp8": 2, "fp64": 8}

#: Divisor of the memory that is left free. Caching allocators hold 5 to 8% that no tensor of a
#: fitting size can use. While layer state moves, sends and receives need extra buffers.
MARGIN_SHARE = 10
#: Least memory left free on any device: a CUDA context with its libraries' workspaces, or a CPU
#: worker's libraries, threads and communication buffers before any model.
LEAST_MARGIN_BYTES = 256 << 20


#: Memory of a GPU that each worker takes before any model, where it was not measured: CUDA's
#: context, the code of kernels, workspaces of libraries, and a process's first communicator. An
#: H100's context alone takes some 500 MB.
GPU_CONTEXT_BYTES = 1 << 30
#: Part of it that a process takes only once it has computed and has a communicator. An estimate.
_FIRST_USES_BYTES = 256 << 20
#: NCCL's buffers for one peer and channel, one for each of its protocols (its defaults of
#: NCCL_LL_BUFFSIZE, NCCL_LL128_BUFFSIZE and NCCL_BUFFSIZE).
_BUFFERS_BYTES = (512 << 10) + 120 * 640 * 8 * 8 + (4 << 20)
#: Tables of a communicator, beside its buffers. An estimate.
_TABLES_BYTES = 4 << 20
#: Most multiprocessors of a GPU that an NCCL operation takes, which is also its number of channels.
#: Two are enough for a link: a message of 33 MB is to pass within a stage's forward of 17 ms (8
#: billion parameters on 8 H100s), and each channel carries some GB/s. Estimates.
#:
#: NCCL's own choice between two A100s, 24, took 544 MB there (NVIDIA/nccl#964; 24 channels of a
#: ring and a tree with the buffers above are 462 MB). Sums go over the network.
LINK_CTAS = 2
GROUP_CTAS = 8
#: Communicators of a worker of a usual plan: sums for the cuts of four kinds of pipelines, and
#: links to the stages before and after.
_USUAL_SUMS = 4
_USUAL_LINKS = 4


def sum_bytes() -> int:
    """Return the bytes of a GPU for one communicator of sums, whose channels each have a ring and a
    tree."""
    return _TABLES_BYTES + GROUP_CTAS * 2 * _BUFFERS_BYTES


def stage_bytes(workers: int) -> int:
    """Return the bytes of a GPU for the communicator of a stage that so many workers of a node
    share.

    In each channel a peer writes into buffers of its own. The neighbours in the channel's ring and
    tree have further ones: no exchange uses them, but NCCL connects them at once
    (`NCCL_RUNTIME_CONNECT=0`), as in all communicators of a process.
    """
    peers = workers - 1
    return _TABLES_BYTES + (peers + min(peers, 2)) * GROUP_CTAS * _BUFFERS_BYTES


def link_bytes(*, receives: bool, same_node: bool) -> int:
    """Return the bytes of the GPU at one end of a link.

    Within a node the sender writes into the receiver's buffers; over the network both ends have
    their own. Each channel also has a ring, in which both ends send and receive, and which no link
    uses (see `stage_bytes`).
    """
    messages = 1 if receives or not same_node else 0
    ring = 1 if same_node else 2
    return _TABLES_BYTES + LINK_CTAS * (messages + ring) * _BUFFERS_BYTES


def worker_context_bytes(measured: int) -> int:
    """Return the memory of a GPU that each worker takes before any model. `measured`: memory of a
    process that has computed little; 0: not measured. An implausibly high measurement, which other
    processes must have caused, is ignored."""
    believed = 0 < measured < 2 * GPU_CONTEXT_BYTES
    return measured + _FIRST_USES_BYTES if believed else GPU_CONTEXT_BYTES


def gpu_reserve_bytes(workers_per_node: int, context_bytes: int = GPU_CONTEXT_BYTES) -> int:
    """Return the bytes of each GPU that no plan may use. They are for CUDA, and for the
    communicators of a usual plan whose stages have all workers of a node. Plans with more
    communicators use the margin."""
    links = _USUAL_LINKS * link_bytes(receives=True, same_node=False)
    stage = stage_bytes(workers_per_node) if workers_per_node > 1 else 0
    return context_bytes + _USUAL_SUMS * sum_bytes() + stage + links


def allocator_share(gpu_bytes: int, beside_bytes: int) -> float:
    """Return the share of a GPU that torch's allocator may take, at least half.

    CUDA and communicators, of `beside_bytes`, need the rest: NCCL takes memory from the driver, and
    torch does not return any by itself.
    """
    return max((gpu_bytes - beside_bytes) / gpu_bytes, 0.5)


#: Least unexplained use of a GPU that is blamed on other processes; CUDA's own part is an estimate.
_STRANGERS_BYTES = 1 << 30


def strangers_bytes(used: int, reserved: int, beside_bytes: int) -> int:
    """Return the bytes that other processes hold on a GPU that should be one worker's alone; 0
    where in doubt. `used`: bytes of all processes; `reserved`: of torch's allocator;
    `beside_bytes`: of CUDA and communicators."""
    left = used - reserved - beside_bytes
    return left if left >= _STRANGERS_BYTES else 0


#: On a CPU, blocks from this size on are mapped from the kernel and returned one by one. Memory of
#: smaller blocks stays with the heap (`worker/runtime/memory.py`).
MAPPED_BYTES = 4 << 20
#: Bytes that the heap holds in holes, per byte of one layer's smaller blocks. Measured with glibc,
#: whose aligned blocks rarely fit where one of the same size was. In fp32 it was 13 to 20 MB where
#: a layer has 11 to 19, under bf16 4 to 18 where it has 15 to 26. Libraries keep some 10 MB more
#: from their first use.
HOLES_PER_BYTE = 1


#: Logits per piece of the loss, in float32.
LOSS_CHUNK = 1 << 24


def with_holes(working_bytes: int, kept_bytes: int) -> int:
    """Return `working_bytes` with the holes of the heap added, for a layer that keeps `kept_bytes`;
    both are in smaller blocks."""
    return working_bytes + (working_bytes + kept_bytes) * HOLES_PER_BYTE


def heap_and_mapped(blocks: Iterable[int]) -> tuple[int, int]:
    """Split the bytes of `blocks`, all in memory at once, into those in the heap and those
    mapped."""
    heap = mapped = 0
    for size in blocks:
        if size < MAPPED_BYTES:
            heap += size
        else:
            mapped += size
    return heap, mapped


def usable_bytes(physical_bytes: int) -> int:
    """Return how much of a device (or of a CPU worker's share of its host) state and activations
    may take.

    A tenth and at least 256 MiB stay free. A device of less than 512 MiB keeps half free, so that
    toy limits still leave something to plan with.
    """
    margin = max(physical_bytes // MARGIN_SHARE, LEAST_MARGIN_BYTES)
    return physical_bytes - min(margin, physical_bytes // 2)


def budget_bytes(limit_bytes: int | None, physical_bytes: int) -> int:
    """Return the memory that training may use: the job's own limit as given, or the device's memory
    less the margin.
    """
    return usable_bytes(physical_bytes) if limit_bytes is None else limit_bytes


def state_bytes(parameters: int, training: TrainingSpec) -> int:
    """Return the bytes of weights, gradients and the optimizer's moments of so many parameters."""
    return (2 + training.optimizer.moments) * parameters * STATE_ITEM_BYTES[training.precision]


def moved_bytes(parameters: int, training: TrainingSpec) -> int:
    """Return the bytes of state that are sent to another worker: all but the gradients."""
    return state_bytes(parameters, training) - parameters * STATE_ITEM_BYTES[training.precision]


def narrow_bytes(parameters: int, precision: Precision) -> int:
    """Return the bytes of the copy of the weights that a layer computes with, if its type
    differs.
    """
    narrow = ACTIVATION_ITEM_BYTES[precision]
    return parameters * narrow if narrow < STATE_ITEM_BYTES[precision] else 0
