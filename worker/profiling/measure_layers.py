"""Measurement of the layers of a job's model on this device: seconds, and bytes kept.

Each kind of layer (embedding, block, head) runs as a stage of its own through the training code.
Knows nothing of peers or plans, and leaves no trace that training could notice.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from oobleck.core.job.spec import JobSpec
from oobleck.core.profile import LayerProfile, Measurement
from oobleck.worker.models.own import constant_bytes
from oobleck.worker.models.tree import Tree, map_tensors
from oobleck.worker.profiling.bench import Bench, Seconds
from oobleck.worker.runtime import pulse

#: Repeats of one kind of layer: at least this long, within these bounds.
BUDGET_S = 0.4
WARM_UP, LEAST, MOST = 1, 3, 40
#: Bounds of a round, by duration and by bytes of state and activations, which exceed any cache. A
#: round has all layers of a kind, one after the other, so that each finds the caches as empty as in
#: training: a small layer repeated alone takes up to a third less time.
ROUND_S = 0.5
ROUND_BYTES = 512 << 20

#: Time for which a standby worker computes each kind of layer.
ALONE_S = 0.3

#: Check between repeats; raises when the measurement is no longer wanted.
Check = Callable[[], None]


def measure_layers(
    job: JobSpec,
    device: torch.device,
    name: str,
    check: Check,
    *,
    sizes: Sequence[int] = (1,),
) -> Measurement:
    """Measure each kind of layer; raise what `check` raises.

    `name`: name of the device. `sizes`: numbers of workers that may share a layer, from 1; each
    divides the micro-batch.
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
    """Return the seconds of a micro-batch's forward and backward in a layer of each kind.

    Raise what `check` raises.
    """
    return tuple(_alone_s(job, layer, device, check) for layer in job.model.examples)


def pass_once(
    job: JobSpec,
    layer: int,
    device: torch.device,
    given: tuple[Tree, Tree] | None = None,
    *,
    sharing: int = 1,
) -> Tensor:
    """Pass a micro-batch through one layer, as in a step and, if the job has any, an evaluation.

    `given`: as in `Bench`. `sharing`: number of workers that share the layer; then it gets the rows
    of one. Return the layer's output as it is sent; the loss for the last layer.
    """
    rows = job.training.microbatch // sharing
    if given is not None:
        inputs, targets = (map_tensors(lambda tensor: tensor[:rows], side) for side in given)
        given = inputs, targets
    bench = Bench(job, [layer], device, rows, given)
    output = bench.pass_one()
    bench.update()
    if job.evaluation is not None:
        bench.evaluate()
    return output


def _alone_s(job: JobSpec, layer: int, device: torch.device, check: Check) -> float:
    """Return the mean seconds of a pass. A mean, because a CPU quota grants time in bursts.

    The worker rests as long as it computes, like workers that wait for others in training;
    otherwise its quota would run out sooner.
    """
    pulse.beat("measure", layer)
    bench = Bench(job, [layer], device, job.training.microbatch)
    bench.pass_through()  # warm-up
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
    bench = Bench(job, [example], device, job.training.microbatch)
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
    """Return the layers' profile, with the times of one worker's rows by number of workers."""
    alone, *shared = (_measure(job, layers, device, check, size) for size in sizes)
    times = {1: (alone.forward_s[1], alone.backward_s[1], alone.backward_input_s[1])}
    before = times[1]
    for size, found in zip(sizes[1:], shared, strict=True):
        # Each time has its own noise. Fewer rows take at most as long, and so does a part of the
        # backward.
        forward_s = min(before[0], found.forward_s[1])
        backward_s = min(before[1], found.backward_s[1])
        input_s = min(backward_s, found.backward_input_s[1])
        times[size] = before = (forward_s, backward_s, input_s)
    return replace(
        alone,
        forward_s={size: forward_s for size, (forward_s, _, _) in times.items()},
        backward_s={size: backward_s for size, (_, backward_s, _) in times.items()},
        backward_input_s={size: input_s for size, (_, _, input_s) in times.items()},
        # The update is elementwise, so its time is proportional to the share.
        update_s={size: alone.update_s[1] / size for size in times},
    )


def _measure(
    job: JobSpec, layers: list[int], device: torch.device, check: Check, size: int
) -> LayerProfile:
    """Return the medians over repeats of layers of one kind.

    A micro-batch has the rows that one of `size` workers gets of it.
    """
    bench = Bench(job, layers, device, job.training.microbatch // size)
    kept = bench.kept_blocks()
    working_bytes, mapped_bytes = bench.working_bytes(kept)
    for _ in range(WARM_UP):
        check()
        bench.repeat()
    bench.seconds = Seconds()
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
        # Each time has its own noise; a part takes at most as long as the whole.
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
