"""Checks of one device by what a worker does on it, with no other worker: whether a backward comes
out the same however it is made, where the host waits for the GPU, what becomes of its errors."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

import oobleck.worker
from oobleck.core.finding import Finding
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, Recompute, TrainingSpec
from oobleck.worker.runtime.errors import for_want_of_memory, whose_fault
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner

_MICROBATCHES = 2
#: Of the largest number of a layer's gradient: what rounding to bfloat16 leaves of a sum in another
#: order.
_ROUNDING = 0.02
#: No device has so much memory.
_TOO_MUCH = 1 << 60
_ROWS = 8


def job_of(place: torch.device, recompute: Recompute = "none") -> JobSpec:
    """Return the job that is tried: large enough for a GPU to use the kernels that a real model
    gets."""
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
            self._stage.forward(number, self._tokens(), rows, self._tokens(), split=split)
        for number in range(_MICROBATCHES):
            if split:
                self._stage.backward_input(number)
                self._stage.backward_weight(number)
            else:
                self._stage.backward(number)

    def _tokens(self) -> Tensor:
        model = self._job.model
        assert isinstance(model, ModelSpec), "it is built in"
        return torch.randint(model.vocabulary, (2, model.sequence_length), generator=self._draws)

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
        yield of_backwards(
            device,
            again=apart(expected, again.gradients()),
            split=apart(expected, split.gradients()),
            recomputed=apart(expected, recomputed.gradients()),
        )


def apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of two layers' gradients, in parts of the largest number; 0: all are
    the same to the bit."""
    found = [
        float((one - other).abs().max() / one.abs().max())
        for one, other in zip(some, others, strict=True)
        if not torch.equal(one, other)
    ]
    # max() would pass over what is not a number.
    return float("nan") if any(each != each for each in found) else max(found, default=0.0)


def of_backwards(device: str, *, again: float, split: float, recomputed: float) -> Finding:
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
    """Check that the host does not wait for the GPU within a micro-batch."""
    place = torch.device(devices[0])
    model = _Whole(place)
    model.train()  # what is done once is done
    said = None
    try:
        with _waiting_forbidden(place):
            model.train()
            model.train(split=True)
    except RuntimeError as error:
        said = error
    yield of_syncs(said, on_gpu=place.type == "cuda")


def _waiting_forbidden(place: torch.device) -> AbstractContextManager[None]:
    """Within, torch raises where the host would wait for a GPU."""
    return _on_gpu_forbidden() if place.type == "cuda" else nullcontext()


@contextmanager
def _on_gpu_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def of_syncs(error: BaseException | None, *, on_gpu: bool) -> Finding:
    """`error`: what torch raised where the host would have waited; None: it did not."""
    if error is not None:
        what = f"a micro-batch fails or waits for the GPU: {_said(error)}{_place(error)}"
        fix = "each wait leaves the GPU idle: tell the project where it is"
        return Finding(check="syncs", level="slow", what=what, fix=fix)
    what = "the host does not wait for the GPU within a micro-batch"
    if not on_gpu:
        what = "a micro-batch runs; whether the host waits in it can be asked of a GPU alone"
    return Finding(check="syncs", level="pass", what=what)


def _place(error: BaseException) -> str:
    """The last line of the project's own that was run."""
    root = Path(oobleck.worker.__path__[0]).resolve()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename).resolve()
        if file.is_relative_to(root) and not file.is_relative_to(root / "doctor"):
            return f" (worker/{file.relative_to(root)}:{frame.lineno})"
    return ""


def errors(devices: Sequence[str]) -> Iterator[Finding]:
    """Check how want of memory and a failed assertion of a kernel are classified. The latter spoils
    this process's GPU, and so comes last."""
    place = torch.device(devices[0])
    yield of_want_of_memory(raised_by(lambda: torch.empty(_TOO_MUCH, device=place)), _sum(place))
    if place.type == "cuda":
        table = torch.zeros(_ROWS, device=place)
        beyond = torch.full((1,), _ROWS, device=place)
        yield of_assert(raised_by(lambda: float(table[beyond])))


def raised_by(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what it is taken for is the question
        return error
    return None


def _sum(place: torch.device) -> float:
    return float(torch.ones(_ROWS, device=place).sum())


def of_want_of_memory(error: BaseException | None, computed: float) -> Finding:
    """`error`: of what asked for too much; `computed`: a sum of ones behind it."""
    if error is None or not for_want_of_memory(error) or computed != _ROWS:
        what = f"want of memory is not known as such: {_said(error)}"
        fix = "steps that lack memory would not be tried again: use a torch that was tested"
        return Finding(check="errors", level="fail", what=what, fix=fix)
    what = "want of memory is known as such, and the device goes on"
    return Finding(check="errors", level="pass", what=what)


def of_assert(error: BaseException | None) -> Finding:
    """`error`: of a kernel that was given an index beyond its table."""
    if isinstance(error, torch.AcceleratorError) and whose_fault(error) == "user":
        what = "a failed assertion of a kernel is taken for the job's fault"
        return Finding(check="errors", level="pass", what=what)
    what = f"a failed assertion of a kernel is not known as such: {_said(error)}"
    fix = "a wrong token of a job would cost its nodes: use a torch that was tested"
    return Finding(check="errors", level="fail", what=what, fix=fix)


def _said(error: BaseException | None) -> str:
    return "nothing" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
