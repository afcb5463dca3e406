"""What a stage of several workers has on its way while it computes a layer: by the order in which a
worker launches messages and runs layers, not by the clock."""

from collections.abc import Iterable
from functools import partial

import pytest
import torch

from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.exchange import StageExchange
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.transport.linked import LinkTransport
from support.meeting import Party

CPU = torch.device("cpu")
LAYERS = range(5)
PART = 2


class Trace:
    """What one worker does, in its order; of several messages of one purpose the first."""

    def __init__(self, transport: LinkTransport, state: ModelState) -> None:
        self.done: list[str] = []
        self._send = transport.send
        transport.send = self.send  # type: ignore[method-assign]
        for layer in LAYERS:
            module = state.layers[layer].module
            module.register_forward_pre_hook(partial(self._computed, layer))

    def _computed(self, layer: int, *_: object) -> None:
        self.done.append(f"compute {layer}")

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> object:
        layer, kind = divmod(tag - (1 << 29), 4)
        self._once(f"gather {layer}" if kind < 2 else f"reduce {layer}")
        return self._send(tensor, peer, tag)

    def _once(self, what: str) -> None:
        if self.done[-1:] != [what]:
            self.done.append(what)

    def added(self, layer: int) -> None:
        self.done.append(f"reduced {layer}")


def forward() -> Iterable[str]:
    yield "gather 0"
    for layer in LAYERS:
        if layer < LAYERS[-1]:
            yield f"gather {layer + 1}"
        yield f"compute {layer}"


def backward() -> Iterable[str]:
    yield f"gather {LAYERS[-1]}"
    for layer in reversed(LAYERS):
        if layer:
            yield f"gather {layer - 1}"
        yield f"compute {layer}"  # again, as recomputation does
        if layer < LAYERS[-1]:
            yield f"reduced {layer + 1}"
        yield f"reduce {layer}"
    yield "reduced 0"


def resident_backward(*, last: bool) -> Iterable[str]:
    told = 2  # micro-batches that are complete with the last one
    for layer in reversed(LAYERS):
        yield f"compute {layer}"
        if last:
            yield from [f"reduced {layer + 1}"] * (told * (layer < LAYERS[-1]))
            yield f"reduce {layer}"
    if last:
        yield from ["reduced 0"] * told


@pytest.mark.parametrize("resident", [False, True])
def test_the_next_layers_weights_and_the_last_ones_gradients_travel_meanwhile(make_job, resident):
    job = make_job(recompute="layer")
    states = [ModelState(job, CPU) for _ in range(PART)]
    for part, state in enumerate(states):
        for layer in LAYERS:
            state.initialise(layer, part=part, parts=PART)
    with Party(PART) as party:
        party.meet()

        def work(transport: LinkTransport) -> list[str]:
            state = states[transport.rank]
            trace = Trace(transport, state)
            exchange = StageExchange(
                state,
                LAYERS,
                transport,
                range(PART),
                sums=torch.float64,
                resident=set(LAYERS) if resident else (),
                timeline=Timeline(),
                stopwatch=Stopwatch.on(CPU),
            )
            stage = StageRunner(state, LAYERS, job, CPU, exchange=exchange)
            exchange.begin(dict.fromkeys(LAYERS, 2))
            tokens = torch.zeros(1, job.model.sequence_length, dtype=torch.int64)
            for m in range(2):
                keys = RowKeys(seed=0, step=1, positions=(2 * m + transport.rank,))
                stage.forward(m, tokens, keys, tokens)
                stage.backward(m, on_layer=trace.added)
                assert all(m in each.added for each in state.layers.values()) == (
                    not resident or m == 1
                )
            exchange.end()
            return trace.done

        found, other = party.everywhere(work)
    assert found == other
    if not resident:
        assert found == [*forward(), *backward()] * 2
        return
    all_at_once = [f"gather {layer}" for layer in LAYERS]
    computed = [f"compute {layer}" for layer in LAYERS]
    assert found == [
        *all_at_once,
        *computed,
        *resident_backward(last=False),
        *computed,
        *resident_backward(last=True),
    ]
