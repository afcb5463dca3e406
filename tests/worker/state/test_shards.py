"""Layers in shares: each number in one of them, updates as of the whole, shares from other ones."""

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from oobleck.core.instructions import LayerPart, Share
from oobleck.core.job.spec import JobSpec
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.layout import layout
from oobleck.worker.state.model_state import ModelState

MakeJob = Callable[..., JobSpec]
CPU = torch.device("cpu")
LAYERS = (0, 1, 4)


def shares(job: JobSpec, parts: int) -> list[ModelState]:
    states = [ModelState(job, CPU) for _ in range(parts)]
    for part, state in enumerate(states):
        for layer in LAYERS:
            state.initialise(layer, part=part, parts=parts)
    return states


def same(share: LayerState, whole: LayerState) -> bool:
    return all(
        torch.equal(
            share.storage[:, share.columns(numbers)], whole.storage[:, numbers.start : numbers.stop]
        )
        for numbers in share.numbers
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_every_number_is_in_one_share(make_job: MakeJob, parts: int, tied: bool) -> None:
    job = make_job(tied=tied, hidden=6, heads=1)
    for layer in LAYERS:
        flat = layout(job.model, layer)
        cuts = [flat.share(Fraction(p, parts), Fraction(p + 1, parts)) for p in range(parts)]
        held = [number for both in zip(*cuts, strict=True) for part in both for number in part]
        assert held == list(range(flat.size))
        assert max(map(len, held_by(cuts))) - flat.size / parts <= 2 * 16


def held_by(cuts: list[tuple[range, range]]) -> list[list[int]]:
    return [[*tied, *own] for tied, own in cuts]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("parts", [2, 3])
def test_updates_are_those_of_the_whole_to_the_last_bit(
    make_job: MakeJob, parts: int, precision: str
) -> None:
    job = make_job(precision=precision, hidden=20, heads=1)
    (whole,), split = shares(job, 1), shares(job, parts)
    for step in (1, 2, 3):
        for layer in LAYERS:
            one = whole.layers[layer]
            gradient = torch.randn(one.gradient.shape, dtype=one.gradient.dtype)
            one.gradient.copy_(gradient)
            # As where others hold the layer in halves: the update comes in two pieces.
            for number in range(2):
                part = LayerPart(layer=layer, part="own", share=Share(number, number + 1, 2))
                whole.set_reduced(part, whole.gradient_part(part).clone())
            for state in split:
                share = state.layers[layer]
                for numbers in share.numbers:
                    piece = gradient[numbers.start : numbers.stop]
                    share.gradient[share.columns(numbers)] = piece
        for state in (whole, *split):
            state.apply(step, scale=0.5)
            state.zero_gradients()
    for state in split:
        for layer in LAYERS:
            assert state.layers[layer].version == 3
            assert same(state.layers[layer], whole.layers[layer])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_new_shares_are_made_of_old_ones(make_job: MakeJob, before: int, after: int) -> None:
    """The first worker keeps what it has; the pieces that it lacks come from the others."""
    job = make_job()
    (whole,), old = shares(job, 1), shares(job, before)
    me = old[0]
    for layer in LAYERS:
        me.allocate(layer, version=0, part=0, parts=after).storage.fill_(torch.nan)
        me.write_own(layer)
        begin = Fraction(1, before)
        for part in range(1, before):
            stop = min(Fraction(part + 1, before), Fraction(1, after))
            if begin < stop:
                numbers = me.share(layer, begin, stop)
                values = old[part].read(layer, numbers)
                me.room(layer, numbers).copy_(values)
                me.write(layer, numbers, values)
                begin = stop
        me.complete(layer)
        assert same(me.layers[layer], whole.layers[layer])
        assert me.former[layer].shard.parts == before
        # Until the next commit it gives the old one to others as well.
        assert torch.equal(
            me.read(layer, me.share(layer, Fraction(0), Fraction(1, before))),
            shares(job, before)[0].layers[layer].storage,
        )
    me.former.clear()
    assert not me.former
