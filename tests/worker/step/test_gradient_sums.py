"""When a bucket's sum starts, and that the worker's own sums stay as they are."""

from collections.abc import Sequence

import pytest
import torch

from oobleck.core.instructions import LayerPart
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.compiler.gradients import BUCKET_BYTES
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.precision import sums_dtype
from oobleck.worker.step.gradient_sums import GradientSums
from oobleck.worker.transport.transport import Group
from support.meeting import Party
from support.plans import plan_of_cuts, worker

CPU = torch.device("cpu")
OTHER = 0.5


class Peers:
    """Everyone else has `OTHER` everywhere; notes who sums, how much, and in which order."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.started: list[tuple[Group, int]] = []

    def all_reduce(
        self, tensor: torch.Tensor, group: Group, shares: Sequence[torch.Tensor] = ()
    ) -> "Peers":
        assert tensor.is_contiguous()
        if shares:
            torch.cat(list(shares), out=tensor)
        tensor.add_(OTHER * (len(group) - 1))
        self.started.append((group, tensor.numel()))
        return self

    def wait(self) -> None:
        pass


def state_of(job, layers) -> ModelState:
    state = ModelState(job, CPU)
    for layer in layers:
        state.initialise(layer)
        state.layers[layer].gradient.fill_(layer + 1.0)
    return state


def make_sums(job, plan, layers):
    """Each layer fills a bucket."""
    sizes = [BUCKET_BYTES] * job.model.layer_count
    programs = compile_programs(plan, tied=job.model.tied, layer_bytes=sizes)
    rank = {member: index for index, member in enumerate(plan.workers)}
    state, peers = state_of(job, layers), Peers()
    dtype = sums_dtype(job)
    return GradientSums(programs[worker(0)], rank, state, peers, Timeline(), dtype), state, peers


def add(sums: GradientSums, layer: int) -> None:
    """The layer has got a micro-batch."""
    if sums.added(layer):
        sums.start_ready()


def test_a_sum_starts_with_the_last_micro_batch_of_its_layers(make_job) -> None:
    job = make_job(tied=False)
    sums, state, peers = make_sums(job, plan_of_cuts(([5], 2), ([5], 1)), range(5))
    size = layer_sizes(job.model)
    sums.begin(dict.fromkeys(range(5), 2))
    for layer in (4, 3, 2, 1, 0):
        add(sums, layer)
    assert not peers.started
    for done, layer in enumerate((4, 3, 2, 1, 0), start=1):
        add(sums, layer)
        assert peers.started == [((0, 1), size[i]) for i in (4, 3, 2, 1, 0)[:done]]
    list(sums.as_completed())
    for layer, held in state.layers.items():
        assert torch.all(held.gradient == layer + 1.0), "the own sum is untouched"
        assert torch.all(
            state.reduced_part(LayerPart(layer=layer, part="own")) == layer + 1.0 + OTHER
        )


@pytest.mark.parametrize("size", [2, 3])
def test_sums_in_bf16_are_the_same_to_the_bit_on_all_and_no_others_change(make_job, size) -> None:
    """Over real links: what each owner has of its own stays as it was."""
    job = make_job(tied=True, precision="fp32", gradient_sums="bf16")
    plan = plan_of_cuts(*[([5], 1)] * size)
    layers = range(5)
    programs = compile_programs(plan, tied=job.model.ties)
    rank = {member: index for index, member in enumerate(plan.workers)}
    states = [state_of(job, layers) for _ in range(size)]
    for number, state in enumerate(states):
        source = torch.Generator().manual_seed(number)
        for held in state.layers.values():
            held.gradient.normal_(generator=source)
    own = [{n: held.gradient.clone() for n, held in state.layers.items()} for state in states]
    sent = []
    with Party(size) as party:
        party.meet()

        def add_up(transport) -> None:
            all_reduce = transport.all_reduce
            transport.all_reduce = lambda tensor, group: (
                sent.append(tensor.dtype) or all_reduce(tensor, group)
            )
            worker = plan.workers[transport.rank]
            sums = GradientSums(
                programs[worker],
                rank,
                states[transport.rank],
                transport,
                Timeline(),
                sums_dtype(job),
            )
            for _ in range(2):  # the buffers of a step serve the next one
                sums.begin(dict.fromkeys(layers, 0))
                list(sums.as_completed())

        party.everywhere(add_up)
    assert set(sent) == {torch.bfloat16}
    for layer in layers:
        for state, before in zip(states, own, strict=True):
            assert torch.equal(state.layers[layer].gradient, before[layer])
        for kind in ("own", "tied") if states[0].layers[layer].layout.tied else ("own",):
            part = LayerPart(layer=layer, part=kind)
            first, *others = (state.reduced_part(part) for state in states)
            assert first.dtype == torch.float32
            assert torch.equal(first, first.bfloat16().float())
            assert all(torch.equal(first, other) for other in others)
            places = (0, 4) if kind == "tied" else (layer,)
            exact = sum(
                state.gradient_part(LayerPart(layer=place, part=kind))
                for state in states
                for place in places
            )
            assert torch.allclose(first, exact, rtol=2e-2, atol=5e-2)
            assert not torch.equal(first, exact)


def test_a_layer_that_gets_nothing_more_is_summed_in_its_turn(make_job) -> None:
    """Layer 2 has all it gets at the start, but the others may still compute layers above."""
    job = make_job(tied=False)
    sums, _, peers = make_sums(job, plan_of_cuts(([5], 2), ([5], 1)), range(5))
    size = layer_sizes(job.model)
    sums.begin({0: 1, 1: 1, 2: 0, 3: 0, 4: 1})
    assert not peers.started
    add(sums, 4)
    assert [count for _, count in peers.started] == [size[4], size[3], size[2]]


def test_groups_do_not_wait_for_one_another(make_job) -> None:
    # Layers 0 and 1 are shared with worker 1, layers 2 to 4 with worker 2.
    job = make_job(tied=False)
    sums, _, peers = make_sums(job, plan_of_cuts(([5], 2), ([2, 3], 1)), range(5))
    sums.begin({0: 1, 1: 0, 2: 1, 3: 1, 4: 1})
    assert [group for group, _ in peers.started] == [(0, 1)]
    add(sums, 4)
    assert [group for group, _ in peers.started] == [(0, 1), (0, 2)]


def test_both_places_of_the_tied_weight_get_one_sum(make_job) -> None:
    for pipelines in (1, 2):
        job = make_job(tied=True)
        plan = plan_of_cuts(*(([5], 1) for _ in range(pipelines)))
        sums, state, _ = make_sums(job, plan, range(5))
        sums.begin(dict.fromkeys(range(5), 0))
        list(sums.as_completed())
        for layer in (0, 4):
            total = state.reduced_part(LayerPart(layer=layer, part="tied"))
            assert torch.all(total == 1.0 + 5.0 + OTHER * (pipelines - 1))
            assert torch.all(state.layers[layer].gradient == layer + 1.0)
