"""What workers of a stage have after a step: to the bit the same over every transport.

The ranks are threads of this process, over links, over buffers, and over NCCL's transport with a
fake in NCCL's place. One of them has no row of any micro-batch.
"""

from collections.abc import Mapping

import pytest
import torch

from oobleck.core.job.spec import JobSpec
from oobleck.core.routes import Shard
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.precision import sums_dtype
from oobleck.worker.step.exchange import StageExchange
from oobleck.worker.step.stage import StageRunner
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.connect import Communicators
from oobleck.worker.transport.nccl.group import Aborts
from oobleck.worker.transport.nccl.transport import NcclTransport
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Transport
from support.fake_nccl import Fabric, RankOfFabric
from support.meeting import Party

CPU = torch.device("cpu")
LAYERS = range(5)
MICROBATCHES = 2
#: By layer: numbers of a share, or of the whole.
Gradients = Mapping[int, torch.Tensor]


def run(stage: StageRunner, job: JobSpec, rows: slice = slice(None)) -> None:
    size, model = job.training.microbatch, job.model
    for m in range(MICROBATCHES):
        source = torch.Generator().manual_seed(m)
        shape = (size, model.sequence_length)
        tokens = torch.randint(model.vocabulary, shape, generator=source)[rows]
        keys = RowKeys(seed=0, step=1, positions=tuple(range(size * m, size * (m + 1)))[rows])
        stage.forward(m, tokens, keys, tokens.flip(1))
        stage.backward(m)


def transport_of(kind: str, links: LinkTransport, fabric: Fabric) -> Transport:
    if kind == "links":
        return links
    staged = StagedTransport(links, everything=True)
    if kind == "staged":
        return staged
    own = Communicators(CPU, Aborts(CPU), RankOfFabric(fabric))
    names = [("stage", tuple(range(links.size)))]
    return NcclTransport(links, staged, own, names, [frozenset()] * links.size)


def shared(job: JobSpec, kind: str, parts: int, resident: bool) -> list[Gradients]:
    """What each worker's share has."""
    fabric = Fabric()

    def work(links: LinkTransport) -> Gradients:
        part, state = links.rank, ModelState(job, CPU)
        for layer in LAYERS:
            state.initialise(layer, part=part, parts=parts)
        transport = transport_of(kind, links, fabric)
        exchange = StageExchange(
            state,
            LAYERS,
            transport,
            range(parts),
            sums=sums_dtype(job),
            resident=LAYERS if resident else (),
            timeline=Timeline(),
            stopwatch=Stopwatch.on(CPU),
        )
        exchange.begin(dict.fromkeys(LAYERS, MICROBATCHES))
        run(StageRunner(state, LAYERS, job, CPU, exchange=exchange), job, slice(part, part + 1))
        exchange.end()
        transport.complete()
        links.gather(b"")
        transport.abort()
        return {layer: held.gradient for layer, held in state.layers.items()}

    with Party(parts) as party:
        party.meet()
        return party.everywhere(work)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
@pytest.mark.parametrize("resident", [True, False], ids=["resident", "per micro-batch"])
@pytest.mark.parametrize("parts", [3, 4])
def test_gradients_are_the_same_to_the_bit_over_all_transports(
    make_job, parts, resident, precision
):
    job = make_job(precision=precision, microbatch=parts - 1, global_batch=2 * (parts - 1))
    over_links, *others = (
        shared(job, kind, parts, resident) for kind in ("links", "staged", "nccl")
    )
    for found in others:
        for expected, share in zip(over_links, found, strict=True):
            assert all(torch.equal(share[layer], expected[layer]) for layer in LAYERS)
    whole = ModelState(job, CPU)
    for layer in LAYERS:
        whole.initialise(layer)
    run(StageRunner(whole, LAYERS, job, CPU), job)
    tolerance = {"rtol": 5e-2, "atol": 5e-4} if precision == "bf16" else {"rtol": 1e-9}
    for layer in LAYERS:
        flat, found = whole.layers[layer].layout, torch.full_like(whole.layers[layer].gradient, 1e9)
        for part, share in enumerate(over_links):
            tied, own = flat.shard(Shard(layer, part, parts))
            found[tied.start : tied.stop] = share[layer][: len(tied)]
            found[own.start : own.stop] = share[layer][len(tied) :]
        assert torch.allclose(found, whole.layers[layer].gradient, **tolerance), layer
