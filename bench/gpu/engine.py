"""Checks of one device by what a worker does on it, without another worker: forks, the start of a
process, a killed one's memory, calls that wait, equal backwards, waits of the host, errors."""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import oobleck.worker
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, Recompute, TrainingSpec
from oobleck.core.orders import Finding
from oobleck.core.units import format_bytes
from oobleck.host.detection import Detection
from oobleck.host.system.process import completed, with_parent
from oobleck.worker.doctor import tokens
from oobleck.worker.runtime.device import has_queue
from oobleck.worker.runtime.errors import for_want_of_memory, whose_fault
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner

#: Number of workers forked at once, as for a node with so many.
_FORKS = 4
_DRIVER = "/dev/nvidia"
#: Time until the memory of a killed process is free: the target; and the limit, after which an
#: agent reports the host as sick.
_FREE_S, FREED_S = 5.0, 30.0
_KILLED_S = 1.0
_MICROBATCHES = 2
#: Largest difference of two gradients, relative to the largest number, that another order of sums
#: in bfloat16 explains.
_ROUNDING = 0.02
#: Bytes that no device has.
_TOO_MUCH = 1 << 60
_ROWS = 8
#: Ways of CUDA to load its kernels.
LOADING = ("LAZY", "EAGER")
#: Processes started in each way; the first one may find the driver asleep, and files not cached.
_STARTS = 2
_START_S = 40.0


def forks(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that workers can be forked: what they are forked from has one thread and no driver
    open, and each child computes soon."""
    import oobleck.worker.warm  # noqa: F401  # as the warm process does

    threads = len(os.listdir("/proc/self/task"))
    opened = [target for target in map(_target, Path("/proc/self/fd").iterdir()) if target]
    if threads > 1 or opened:
        what = f"the warm process has {threads} threads and {', '.join(opened) or 'no driver'} open"
        fix = "find the library that does that at its import (py-spy dump), and update it"
        yield Finding(check="forks", level="fail", what=what, fix=fix)
        return
    began = time.monotonic()
    children = [_forked(devices[number % len(devices)]) for number in range(_FORKS)]
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(failed):
        what, fix = f"forked workers end with {failed}", "look at what they print before this"
        yield Finding(check="forks", level="fail", what=what, fix=fix)
    else:
        yield judge_forks(time.monotonic() - began, on_gpu=devices[0] != "cpu")


def judge_forks(spent_s: float, *, on_gpu: bool) -> Finding:
    """Judge forks. `spent_s`: seconds until all of them have computed something."""
    what = f"{_FORKS} workers are forked at once and compute after {spent_s:.1f} s"
    grace_s = Detection().gpu_grace_s
    if on_gpu and spent_s > grace_s:
        what += f", where a loss waits {grace_s:g} s for a new process"
        fix = "each becomes a plan without it and a join; nvidia-smi -pm 1 keeps the driver ready"
        return Finding(check="forks", level="slow", what=what, fix=fix)
    return Finding(check="forks", level="pass", what=what)


def _target(descriptor: Path) -> str:
    """Return the file that a descriptor has open; empty if it is not the driver's."""
    try:
        target = os.readlink(descriptor)
    except OSError:  # closed meanwhile
        return ""
    return target if target.startswith(_DRIVER) else ""


def _forked(device: str) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        ones = torch.ones(64, 64, device=device)
        status = 0 if float((ones @ ones).sum()) == 64.0**3 else 2
    finally:
        os._exit(status)


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a process on a device."""

    context_s: float
    #: Further seconds until the first product.
    product_s: float
    #: Memory of the device that is taken beside torch's.
    beside_bytes: int


def start(device: str) -> Started:
    """Begin to use a device in this process, which has not used it before."""
    place = torch.device(device)
    began = time.perf_counter()
    # Small: a CPU without bf16 multiplies 2048 x 2048 for two minutes.
    ones = torch.ones(128, 128, device=place, dtype=torch.bfloat16)
    float(ones[0, 0])
    opened = time.perf_counter()
    float((ones @ ones)[0, 0])
    multiplied = time.perf_counter()
    beside = 0
    if has_queue(place):
        board = torch.get_device_module(place)
        free, total = board.mem_get_info(place)
        beside = total - free - board.memory_reserved(place)
    return Started(
        context_s=opened - began, product_s=multiplied - opened, beside_bytes=max(0, beside)
    )


def starting(devices: Sequence[str]) -> Iterator[Finding]:
    """Report what the start of a process on a device costs, by how CUDA loads its kernels. Nothing
    is judged: workers load as their agent says."""
    command = [*with_parent("bench.gpu"), "start", devices[0]]
    for loading in LOADING:
        environment = {**os.environ, "CUDA_MODULE_LOADING": loading}
        starts = []
        for _ in range(_STARTS):
            done = completed(command, _START_S, environment)
            if done.returncode:
                raise RuntimeError(done.stderr.decode(errors="replace").strip().rpartition("\n")[2])
            starts.append(msgspec.json.decode(done.stdout, type=Started))
        yield _told(loading, starts)


def _told(loading: str, starts: Sequence[Started]) -> Finding:
    best = min(starts, key=lambda each: each.context_s + each.product_s)
    what = (
        f"a process that loads kernels as {loading} has its context after {best.context_s:.2f} s "
        f"and its first product {best.product_s:.2f} s later; "
        f"{format_bytes(best.beside_bytes)} are taken beside torch's memory"
    )
    figures = {name: float(value) for name, value in msgspec.structs.asdict(best).items()}
    return Finding(check="starting", level="pass", what=what, figures=figures)


def killed(devices: Sequence[str]) -> Iterator[Finding]:
    """Measure how soon the memory of a killed process is free."""
    device = devices[0]
    code = (
        "import sys, torch; d = sys.argv[1]; n = int(torch.cuda.mem_get_info(d)[0] * 0.5); "
        "t = torch.empty(n, dtype=torch.uint8, device=d); print('taken', n, flush=True); "
        "sys.stdin.read()"
    )

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0]

    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", code, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    line = ""
    for line in holder.stdout:
        if line.startswith("taken "):
            break
    taken = int(line.split()[1]) if line.startswith("taken ") else 0
    held = free()
    holder.kill()
    freed_s = freed_after(free, held + taken // 2) if taken else None
    with suppress(subprocess.TimeoutExpired):  # a driver may hold it
        holder.wait(_KILLED_S)
    holder.stdin.close()
    holder.stdout.close()
    yield judge_killed(taken, freed_s, line.strip())


def freed_after(
    free: Callable[[], int],
    wanted: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Return the seconds until so many bytes are free; None: longer than `FREED_S`."""
    began = clock()
    while free() < wanted:
        if clock() - began > FREED_S:
            return None
        sleep(0.01)
    return clock() - began


def judge_killed(taken: int, freed_s: float | None, last_line: str) -> Finding:
    """Judge how soon memory comes back. `taken`: bytes; `last_line`: of its output."""
    if not taken:
        what = f"no process can hold memory: {last_line or 'it says nothing'}"
        fix = "end what else uses the GPU (nvidia-smi)"
        return Finding(check="killed", level="fail", what=what, fix=fix)
    if freed_s is None:
        what = (
            f"half of the {format_bytes(taken)} of a killed process are not free in {FREED_S:.0f} s"
        )
        fix = "see whether it ends (ps: state D), or others took them (nvidia-smi)"
        return Finding(check="killed", level="fail", what=what, fix=fix)
    what = f"memory of a killed process is free after {freed_s:.1f} s"
    if freed_s > _FREE_S:
        fix = "recoveries wait for that: update the driver"
        return Finding(check="killed", level="slow", what=what, fix=fix)
    return Finding(check="killed", level="pass", what=what)


def waits(devices: Sequence[str]) -> Iterator[Finding]:
    """Report which calls wait for another stream's kernel. None must be made while a receive waits
    for its peer. Nothing is judged: the transport is made for GPUs on which all of them wait."""
    device = torch.device(devices[0])
    torch.cuda.set_device(device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch does not say
    torch.empty(1 << 29, dtype=torch.uint8, device=device)  # what cudaFree gives back
    calls: dict[str, Callable[[], object]] = {
        "first use of a kernel": lambda: torch.special.zeta(
            torch.full((8,), 2.0, device=device), 1.5
        ),
        "cudaMalloc": lambda: torch.empty(1 << 28, dtype=torch.uint8, device=device),
        "cudaHostAlloc": lambda: torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True),
        "cudaFree": torch.cuda.empty_cache,
    }
    torch.cuda.synchronize()
    waiting = []
    for name, call in calls.items():
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second
        began = time.perf_counter()
        call()
        if time.perf_counter() - began > 0.2:
            waiting.append(name)
        torch.cuda.synchronize()
    what = f"while a kernel runs, these wait: {', '.join(waiting) or 'none of those tried'}"
    yield Finding(check="waits", level="pass", what=what)


def job_of(place: torch.device, recompute: Recompute = "none") -> JobSpec:
    """Return the job that is tried, large enough for a real model's kernels."""
    large = place.type == "cuda"
    return JobSpec(
        name="doctor",
        model=ModelSpec(
            layers=2,
            hidden=1024 if large else 32,
            heads=8 if large else 2,
            sequence_length=1024 if large else 16,
            dropout=0.1,
        ),
        data=DataSpec(text=("unused",)),
        training=TrainingSpec(
            steps=1,
            global_batch=2 * _MICROBATCHES,
            microbatch=2,
            precision="bf16",
            recompute=recompute,
        ),
    )


class _Whole:
    """A whole model on one device."""

    def __init__(self, place: torch.device, recompute: Recompute = "none") -> None:
        self._job = job = job_of(place, recompute)
        self.state = ModelState(job, place)
        self.layers = range(job.model.layer_count)
        for layer in self.layers:
            self.state.initialise(layer)
        self._stage = StageRunner(self.state, self.layers, job, place)
        self._draws = torch.Generator().manual_seed(0)

    def train(self, *, split: bool = False) -> None:
        """Forward and backward of some micro-batches."""
        for number in range(_MICROBATCHES):
            rows = RowKeys(seed=0, step=1, positions=(2 * number, 2 * number + 1))
            x, targets = (tokens(self._job, self._draws) for _ in range(2))
            self._stage.forward(number, x, rows, targets, split=split)
        for number in range(_MICROBATCHES):
            if split:
                self._stage.backward_input(number)
                self._stage.backward_weight(number)
            else:
                self._stage.backward(number)

    def gradients(self) -> list[Tensor]:
        return [self.state.layers[layer].gradient for layer in self.layers]


def backwards(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that a plain backward has the same gradients as one in two parts, and as one of layers
    that are computed again."""
    for device in devices:
        place = torch.device(device)
        once, again, split = _Whole(place), _Whole(place), _Whole(place)
        recomputed = _Whole(place, "layer")
        for one in (once, again, recomputed):
            one.train()
        split.train(split=True)
        expected = once.gradients()
        yield judge_backwards(
            device,
            again=apart(expected, again.gradients()),
            split=apart(expected, split.gradients()),
            recomputed=apart(expected, recomputed.gradients()),
        )


def apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference of two layers' gradients, in parts of the largest number; 0 if
    all are the same to the bit."""
    found = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(some, others, strict=True)
        if not torch.equal(one, other)
    ]
    # max() ignores NaN.
    return float("nan") if any(each != each for each in found) else max(found, default=0.0)


def judge_backwards(device: str, *, again: float, split: float, recomputed: float) -> Finding:
    """Judge how far the gradients of each backward are from a plain one's; `again`: of a second
    plain one."""
    others = {"in two parts": split, "of layers that are computed again": recomputed}
    wrong = {way: far for way, far in others.items() if not far <= _ROUNDING}
    if wrong or not again <= _ROUNDING:
        way, far = next(iter(wrong.items()), ("that is made twice", again))
        what = f"{device}: gradients of a backward {way} differ by {far:.1g} of the largest"
        fix = "do not train on it: look at the check memory, and at the versions of torch and CUDA"
        return Finding(check="backwards", level="fail", what=what, fix=fix)
    if again:
        what = (
            f"{device}: a backward gives other bits each time ({again:.1g} of the largest number); "
            "one in two parts and one of layers that are computed again give no others than that"
        )
        return Finding(check="backwards", level="pass", what=what)
    if split or recomputed:
        way = "in two parts" if split else "of layers that are computed again"
        what = f"{device}: a backward {way} gives other bits ({max(split, recomputed):.1g})"
        fix = "a loss changes training in its rounding there; tell the project"
        return Finding(check="backwards", level="warn", what=what, fix=fix)
    what = (
        f"{device}: a backward in two parts and one of layers that are computed again are that of "
        "the whole, to the bit"
    )
    return Finding(check="backwards", level="pass", what=what)


def syncs(devices: Sequence[str]) -> Iterator[Finding]:
    """Check that the host never waits for the GPU within a micro-batch."""
    place = torch.device(devices[0])
    model = _Whole(place)
    model.train()  # what is done once is done
    raised = None
    try:
        with _waiting_forbidden(place):
            model.train()
            model.train(split=True)
    except RuntimeError as error:
        raised = error
    yield judge_syncs(raised, on_gpu=place.type == "cuda")


def _waiting_forbidden(place: torch.device) -> AbstractContextManager[None]:
    """Have torch raise if the host would wait for a GPU."""
    return _on_gpu_forbidden() if place.type == "cuda" else nullcontext()


@contextmanager
def _on_gpu_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def judge_syncs(error: BaseException | None, *, on_gpu: bool) -> Finding:
    """Judge a micro-batch. `error`: torch's, where the host would have waited."""
    if error is not None:
        what = f"a micro-batch fails or waits for the GPU: {_text(error)}{_place(error)}"
        fix = "each wait leaves the GPU idle: tell the project where it is"
        return Finding(check="syncs", level="slow", what=what, fix=fix)
    what = "the host does not wait for the GPU within a micro-batch"
    if not on_gpu:
        what = "a micro-batch runs; whether the host waits in it can be asked of a GPU alone"
    return Finding(check="syncs", level="pass", what=what)


def _place(error: BaseException) -> str:
    """Return the last line of the worker's own code that was run."""
    root = Path(oobleck.worker.__path__[0]).resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(root):
            return f" (worker/{file.relative_to(root)}:{frame.lineno})"
    return ""


def errors(devices: Sequence[str]) -> Iterator[Finding]:
    """Check how want of memory and a failed assertion of a kernel are classified. The latter spoils
    this process's GPU, and so comes last."""
    place = torch.device(devices[0])
    yield judge_want_of_memory(raised_by(lambda: torch.empty(_TOO_MUCH, device=place)), _sum(place))
    if place.type == "cuda":
        table = torch.zeros(_ROWS, device=place)
        beyond = torch.full((1,), _ROWS, device=place)
        yield judge_assert(raised_by(lambda: float(table[beyond])))


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what it is taken for is the question
        return error
    return None


def _sum(place: torch.device) -> float:
    return float(torch.ones(_ROWS, device=place).sum())


def judge_want_of_memory(error: BaseException | None, computed: float) -> Finding:
    """Judge an allocation of too much. `error`: its; `computed`: a sum of ones after it."""
    if error is None or not for_want_of_memory(error) or computed != _ROWS:
        what = f"want of memory is not known as such: {_text(error)}"
        fix = "steps that lack memory would not be tried again: use a torch that was tested"
        return Finding(check="errors", level="fail", what=what, fix=fix)
    what = "want of memory is known as such, and the device goes on"
    return Finding(check="errors", level="pass", what=what)


def judge_assert(error: BaseException | None) -> Finding:
    """Judge the error of a kernel that was given an index beyond its table."""
    if isinstance(error, torch.AcceleratorError) and whose_fault(error) == "user":
        what = "a failed assertion of a kernel is taken for the job's fault"
        return Finding(check="errors", level="pass", what=what)
    what = f"a failed assertion of a kernel is not known as such: {_text(error)}"
    fix = "a wrong token of a job would cost its nodes: use a torch that was tested"
    return Finding(check="errors", level="fail", what=what, fix=fix)


def _text(error: BaseException | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
