"""When a bucket's sum starts, and that the worker's own sums stay as they are."""

import torch

from oobleck.planner.programs.compile import compile_programs
from oobleck.planner.programs.gradients import BUCKET_BYTES
from oobleck.planner.programs.instructions import LayerPart
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.gradient_sums import GradientSums
from oobleck.worker.transport.transport import Group
from support.plans import plan_of_cuts, worker

CPU = torch.device("cpu")
OTHER = 0.5


class Peers:
    """Everyone else has `OTHER` everywhere; notes who sums, how much, and in which order."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.started: list[tuple[Group, int]] = []

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> "Peers":
        assert tensor.is_contiguous()
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
    return GradientSums(programs[worker(0)], rank, state, peers, Timeline()), state, peers


def test_a_sum_starts_with_the_last_micro_batch_of_its_layers(make_job) -> None:
    job = make_job(tied=False)
    sums, state, peers = make_sums(job, plan_of_cuts(([5], 2), ([5], 1)), range(5))
    size = layer_sizes(job.model)
    sums.begin(dict.fromkeys(range(5), 2))
    for layer in (4, 3, 2, 1, 0):
        sums.added(layer)
    assert not peers.started
    for done, layer in enumerate((4, 3, 2, 1, 0), start=1):
        sums.added(layer)
        assert peers.started == [((0, 1), size[i]) for i in (4, 3, 2, 1, 0)[:done]]
    list(sums.as_completed())
    for layer, held in state.layers.items():
        assert torch.all(held.gradient == layer + 1.0), "the own sum is untouched"
        assert torch.all(
            state.reduced_part(LayerPart(layer=layer, part="own")) == layer + 1.0 + OTHER
        )


def test_a_layer_that_gets_nothing_more_is_summed_in_its_turn(make_job) -> None:
    """Layer 2 has all it gets at the start, but the others may still compute layers above."""
    job = make_job(tied=False)
    sums, _, peers = make_sums(job, plan_of_cuts(([5], 2), ([5], 1)), range(5))
    size = layer_sizes(job.model)
    sums.begin({0: 1, 1: 1, 2: 0, 3: 0, 4: 1})
    assert not peers.started
    sums.added(4)
    assert [count for _, count in peers.started] == [size[4], size[3], size[2]]


def test_groups_do_not_wait_for_one_another(make_job) -> None:
    # Layers 0 and 1 are shared with worker 1, layers 2 to 4 with worker 2.
    job = make_job(tied=False)
    sums, _, peers = make_sums(job, plan_of_cuts(([5], 2), ([2, 3], 1)), range(5))
    sums.begin({0: 1, 1: 0, 2: 1, 3: 1, 4: 1})
    assert [group for group, _ in peers.started] == [(0, 1)]
    sums.added(4)
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
