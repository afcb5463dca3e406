"""Measures what the layers of a job's model cost on this device: seconds, and bytes that are kept.

Each kind of layer (embedding, block, head) is run as a stage of its own through the code that
trains. Knows nothing of peers or plans, and leaves nothing behind that training could notice.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import torch
from torch import Tensor, nn

from oobleck.core.instructions import LayerPart
from oobleck.core.job.spec import JobSpec
from oobleck.core.profile import LayerProfile, Measurement
from oobleck.planner.profile.memory import heap_and_mapped, with_holes
from oobleck.worker.models.own import constant_bytes, constants
from oobleck.worker.models.tree import Tree, flatten, map_tensors
from oobleck.worker.profiling.footprint import peak_bytes
from oobleck.worker.profiling.made_up import samples, values
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.mailbox import AHEAD
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.step.wire import Packing, wire

#: Repeats of one kind of layer: until this time is over, and within these bounds.
BUDGET_S = 0.4
WARM_UP, LEAST, MOST = 1, 3, 40
#: Layers of a kind are run one after the other, so that each finds the caches as empty as in
#: training: small ones take up to a third less time where one alone is run again and again. As many
#: as the model has, as long as one round takes no longer than this,
ROUND_S = 0.5
#: and their state and activations no more than this: more than any cache holds.
ROUND_BYTES = 512 << 20

#: A worker that stands by computes each kind of layer for so long.
ALONE_S = 0.3

#: Called between repeats; raises when the measurement is no longer wanted.
Check = Callable[[], None]


@dataclass(slots=True)
class _Seconds:
    """Seconds that every repeat took, by what was measured."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    backward_input: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def measure_layers(
    job: JobSpec,
    device: torch.device,
    name: str,
    check: Check,
    *,
    sizes: Sequence[int] = (1,),
) -> Measurement:
    """Measure each kind of layer. `name`: of the device.

    `sizes`: the numbers of workers that may share a layer, from 1; each divides the micro-batch.
    Raises what `check` raises.
    """
    order = job.model.order
    return Measurement(
        kinds=tuple(
            _measure_shared(
                job,
                _alike(job, order, layer, device),
                device,
                check,
                sizes if job.model.may_share(layer) else (1,),
            )
            for layer in job.model.examples
        ),
        device=name,
        torch=str(torch.__version__),
    )


def measure_alone(job: JobSpec, device: torch.device, check: Check) -> tuple[float, ...]:
    """Return the times of a micro-batch's forward and backward in a layer of each kind. Raises what
    `check` raises."""
    return tuple(_alone_s(job, layer, device, check) for layer in job.model.examples)


def pass_once(
    job: JobSpec, layer: int, device: torch.device, given: tuple[Tree, Tree] | None = None
) -> Tensor:
    """Pass a micro-batch through one layer, as in a step and, where the job has any, in an
    evaluation. `given`: as `_Bench` takes it. Returns the layer's output as it travels, of the last
    one the loss."""
    bench = _Bench(job, [layer], device, job.training.microbatch, given)
    output = bench.pass_one()
    bench.update()
    if job.evaluation is not None:
        bench.evaluate()
    return output


def _alone_s(job: JobSpec, layer: int, device: torch.device, check: Check) -> float:
    """Return the mean seconds, since a worker with a quota has its processor in spells. The worker
    rests as long as it computes, as workers wait for others in training: else its quota would be
    used up sooner."""
    pulse.beat("measure", layer)
    bench = _Bench(job, [layer], device, job.training.microbatch)
    bench.pass_through()  # to warm up
    spent_s, passes = 0.0, 0
    while spent_s < ALONE_S:
        check()
        taken_s = bench.pass_through()
        spent_s, passes = spent_s + taken_s, passes + 1
        time.sleep(taken_s)
    return spent_s / passes


def _alike(job: JobSpec, order: Sequence[int], example: int, device: torch.device) -> list[int]:
    """Return the layers of a kind that are measured together."""
    alike = [layer for layer, kind in enumerate(order) if kind == order[example]]
    if len(alike) == 1:
        return alike
    bench = _Bench(job, [example], device, job.training.microbatch)
    state = bench.state.layers[example]
    block_bytes = state.storage.nbytes + state.gradient.nbytes + sum(bench.kept_blocks())
    bench.repeat()
    started = time.perf_counter()
    bench.repeat()
    block_s = time.perf_counter() - started
    return alike[: max(1, int(min(ROUND_S / block_s, ROUND_BYTES / block_bytes)))]


def _measure_shared(
    job: JobSpec, layers: list[int], device: torch.device, check: Check, sizes: Sequence[int]
) -> LayerProfile:
    """Return the layers' profile with the times of one worker's rows, for each number of
    workers."""
    alone, *shared = (_measure(job, layers, device, check, size) for size in sizes)
    times = {1: (alone.forward_s[1], alone.backward_s[1], alone.backward_input_s[1])}
    before = times[1]
    for size, found in zip(sizes[1:], shared, strict=True):
        # Each is measured with its own noise; fewer rows take no longer, and a part of the
        # backward no longer than the whole.
        forward_s = min(before[0], found.forward_s[1])
        backward_s = min(before[1], found.backward_s[1])
        input_s = min(backward_s, found.backward_input_s[1])
        times[size] = before = (forward_s, backward_s, input_s)
    return replace(
        alone,
        forward_s={size: forward_s for size, (forward_s, _, _) in times.items()},
        backward_s={size: backward_s for size, (_, backward_s, _) in times.items()},
        backward_input_s={size: input_s for size, (_, _, input_s) in times.items()},
        # One number after the other: a part of the state takes its part of the time.
        update_s={size: alone.update_s[1] / size for size in times},
    )


def _measure(
    job: JobSpec, layers: list[int], device: torch.device, check: Check, size: int
) -> LayerProfile:
    """Return the median over repeats of the layers, which are of one kind, taken in turn, with the
    rows that one of `size` workers has of a micro-batch."""
    bench = _Bench(job, layers, device, job.training.microbatch // size)
    kept = bench.kept_blocks()
    working_bytes, mapped_bytes = bench.working_bytes(kept)
    for _ in range(WARM_UP):
        check()
        bench.repeat()
    bench.seconds = _Seconds()
    deadline = time.perf_counter() + BUDGET_S
    for done in range(MOST):
        if done >= LEAST and time.perf_counter() >= deadline:
            break
        check()
        bench.repeat()
    seconds = bench.seconds
    state = bench.state.layers[layers[0]]
    backward_s = median(seconds.backward)
    return LayerProfile(
        name=type(state.module).__name__.lower(),
        forward_s={1: median(seconds.forward)},
        backward_s={1: backward_s},
        # Both are measured with their own noise, and a part is no more than the whole.
        backward_input_s={1: min(backward_s, median(seconds.backward_input))},
        update_s={1: median(seconds.update)},
        parameter_bytes=state.gradient.nbytes,
        state_bytes=sum(tensor.nbytes for tensor in state.tensors) + constant_bytes(state.module),
        moved_bytes=state.storage.nbytes,
        sum_bytes=state.gradient.nbytes,
        tied_bytes=state.layout.tied * state.gradient.itemsize,
        activation_bytes=sum(kept),
        working_bytes=working_bytes,
        mapped_bytes=mapped_bytes,
        output_bytes=bench.output_bytes,
    )


class _Bench:
    """Layers of one kind, each a stage of its own, with inputs of the right shape."""

    def __init__(
        self,
        job: JobSpec,
        layers: list[int],
        device: torch.device,
        rows: int,
        given: tuple[Tree, Tree] | None = None,
    ) -> None:
        """`rows`: of a micro-batch; `given`: the input of the layer, which above the first one is
        as it travels, and the targets, for the initial weights. None: all of these are made up."""
        self._job = job
        self._device = device
        self._layers = layers
        self.state = ModelState(job, device)
        self.seconds = _Seconds()
        source = torch.Generator().manual_seed(job.training.seed)
        weights = torch.Generator(device).manual_seed(job.training.seed)
        for layer in layers:
            if given is not None:
                self.state.initialise(layer)
                continue
            # Not the job's initial weights: drawing those takes seconds for a large layer.
            whole = self.state.allocate(layer, version=0)
            whole.storage.zero_()
            whole.storage[0].normal_(std=0.02, generator=weights)
            self.state.complete(layer)
        self._runners = [StageRunner(self.state, range(n, n + 1), job, device) for n in layers]
        first, last = self._runners[0].first, self._runners[0].last
        inputs, targets = samples(job, rows, source) if given is None else given

        def packed(packing: Packing) -> Tensor:
            made = [values(one, rows, source).to(device) for one in packing.tensors]
            return packing.pack(made, rows, device)

        below = None if first else wire(job, layers[0] - 1)
        above = None if last else wire(job, layers[0])
        self._input: Tree = map_tensors(lambda tensor: tensor.to(device), inputs)
        if below is not None and given is None:
            self._input = packed(below.values)
        self._targets = map_tensors(lambda tensor: tensor.to(device), targets) if last else None
        self._gradient = None if above is None else packed(above.gradients)
        self.output_bytes = 0 if above is None else rows * above.values.row_bytes
        self._rows = RowKeys(seed=job.training.seed, step=1, positions=tuple(range(rows)))
        self._step = 0

    def kept_blocks(self) -> list[int]:
        """Return the bytes of each block that one micro-batch keeps of one layer until its
        backward. The layer's input counts; its output is the next layer's input."""
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            alias = tensor.detach()  # the tensor itself would hold its own graph
            kept[alias.untyped_storage().data_ptr()] = alias
            return alias

        def keep_input(module: nn.Module, given: tuple[Tree, RowKeys]) -> None:
            for tensor in flatten(given[0]):
                pack(tensor)

        runner, layer = self._runners[0], self._layers[0]
        hook = self.state.module(layer).register_forward_pre_hook(keep_input)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runner.forward(0, self._input, self._rows, self._targets)
        hook.remove()
        for held in (*self.state.layers[layer].tensors, *constants(self.state.module(layer))):
            kept.pop(held.untyped_storage().data_ptr(), None)
        runner.settle()
        return [tensor.untyped_storage().nbytes() for tensor in kept.values()]

    def working_bytes(self, kept: Sequence[int]) -> tuple[int, int]:
        """Return the most that one micro-batch takes at a moment beside the state and the blocks
        `kept`: in the heap, with its holes, and mapped. The gradient that comes in counts, and so
        do the messages of a stage that this layer ends on both sides, which are posted ahead."""
        runner = self._runners[0]
        messages = [*(tensor.nbytes for tensor in flatten(self._input)), self.output_bytes]

        def run() -> None:
            runner.forward(0, self._input, self._rows, self._targets)
            runner.backward(0, self._gradient)

        made = peak_bytes(run, self._device)
        self.state.zero_gradients()
        heap, mapped = (
            max(0, peak + given - left) + AHEAD * given
            for peak, given, left in zip(
                made, self._sorted(messages), self._sorted(kept), strict=True
            )
        )
        if self._device.type == "cpu":
            heap = with_holes(heap, self._sorted(kept)[0])
        return heap, mapped

    def _sorted(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Return the blocks' heap and mapped bytes, told apart as `peak_bytes` does."""
        return heap_and_mapped(blocks) if self._device.type == "cpu" else (sum(blocks), 0)

    def repeat(self) -> None:
        """Forward of all, backward of all in the other order, and the update of all. The mean over
        the layers counts: what a busy host takes now and then is part of a step too."""
        self.seconds.forward.append(fmean(map(self._forward_s, self._runners)))
        self.seconds.backward.append(fmean(map(self._backward_s, reversed(self._runners))))
        self.seconds.backward_input.append(fmean(map(self._backward_input_s, self._runners)))
        started = self._now()
        self.update()
        self.seconds.update.append((self._now() - started) / len(self._layers))

    def pass_through(self) -> float:
        """Forward and backward of all, and the seconds that they take."""
        return sum(map(self._forward_s, self._runners)) + sum(
            map(self._backward_s, reversed(self._runners))
        )

    def pass_one(self) -> Tensor:
        """Forward and backward of the first; returns its output as it travels."""
        runner = self._runners[0]
        output = runner.forward(0, self._input, self._rows, self._targets)
        runner.backward(0, self._gradient)
        return output

    def evaluate(self) -> None:
        """Forward of all, as in an evaluation."""
        rows, lowest = replace(self._rows, training=False), self._job.model.layer_count
        for runner in self._runners:
            metrics = Counter[str]()
            runner.forward(0, self._input, rows, self._targets, lowest=lowest, metrics=metrics)

    def _forward_s(self, runner: StageRunner) -> float:
        started = self._now()
        runner.forward(0, self._input, self._rows, self._targets)
        return self._now() - started

    def _backward_s(self, runner: StageRunner) -> float:
        started = self._now()
        runner.backward(0, self._gradient)
        return self._now() - started

    def _backward_input_s(self, runner: StageRunner) -> float:
        """Return the seconds of the first part of a backward that comes in two."""
        runner.forward(0, self._input, self._rows, self._targets, split=True)
        started = self._now()
        runner.backward_input(0, self._gradient)
        taken_s = self._now() - started
        runner.backward_weight(0)
        return taken_s

    def update(self) -> None:
        """Do once all that a step does to a layer's state: norm, update, and clearing gradients."""
        self._step += 1
        self.state.squared_norm(
            LayerPart(layer=layer, part=part)
            for layer in self._layers
            for part in ("tied", "own")
            if self.state.gradient_part(LayerPart(layer=layer, part=part)).numel()
        )
        self.state.apply(self._step, scale=1.0)
        for layer in self._layers:
            self.state.module(layer)  # with the copy that it computes with
        self.state.zero_gradients()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
