"""Compare the adapters of transformers' models with `causal_lm`: processor time, in turns.

    python -m bench.adapters [--rounds N]

One process runs a micro-batch of two rows forward, through the loss, and backward, through all
layers of a model as an adapter builds it and as `causal_lm` does. The ratio is the median, with the
range, over the rounds.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oobleck.core.job.code import Json
from oobleck.core.job.families import FAMILIES, Kind
from oobleck.core.job.family import encode_config
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.worker.data.objective import inputs_and_targets, loss
from oobleck.worker.models import own
from oobleck.worker.models.base import split_linear
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime import code
from oobleck.worker.runtime.random import RowKeys

BLOCKS = 4
ROWS = RowKeys(seed=0, step=1, positions=(0, 1))
#: Width, tokens, vocabulary, precision.
SHAPES = (
    (128, 128, 512, "fp32"),
    (128, 512, 512, "fp32"),
    (512, 256, 8192, "fp32"),
    (512, 256, 8192, "bf16"),
)


@dataclass(frozen=True)
class Case:
    kind: Kind
    width: int
    tokens: int
    words: int
    precision: str

    @property
    def config(self) -> dict[str, Any]:
        names = FAMILIES[self.kind].names
        inner = {} if self.kind == "gpt2" else {"intermediate_size": 4 * self.width}
        return {
            names["layers"]: BLOCKS,
            names["hidden"]: self.width,
            names["heads"]: max(4, self.width // 64),
            names["vocabulary"]: self.words,
            names["positions"]: self.tokens,
            **dict.fromkeys(FAMILIES[self.kind].dropouts, 0.0),
            **inner,
        }


def passes(case: Case) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a forward and backward by the adapter, and one by `causal_lm`."""
    mask = {"mask_token_id": case.words - 1} if case.kind == "bert" else {}
    kind = FAMILIES[case.kind]
    config = kind.complete(case.config | mask)
    family = ModelSpec(
        kind=case.kind,
        config=encode_config(config),
        sequence_length=case.tokens,
        **asdict(kind.numbers(config)),
    )
    spec = OwnModelSpec(
        architecture=kind.architecture,
        config=Json(json.dumps(case.config)),
        sequence_length=case.tokens,
    )
    adapted = [build_layer(family, number) for number in range(family.layer_count)]
    for layer in adapted:
        initialise_parameters(layer, family, 0)
    split = [own.build_real(spec, 0, number) for number in range(family.layer_count)]
    for module in split:
        split_linear(module)  # as a worker does
    tokens = torch.randint(case.words - 1, (2, case.tokens + 1))
    inputs, targets = inputs_and_targets(family, tokens, ROWS)
    bf16 = torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16" else nullcontext()

    def by_adapter() -> None:
        x = inputs
        with bf16:
            for layer in adapted:
                x = layer(x, ROWS)
        loss(x, targets).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for layer in adapted:
            layer.zero_grad(set_to_none=True)

    def by_causal_lm() -> None:
        x: Any = inputs
        with bf16:
            for module in split:
                x = module(x)
        sums, weights = own.row_losses(spec, x, targets, 2)
        assert weights is not None
        mean = sums.sum() / weights.sum()
        mean.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for module in split:
            module.zero_grad(set_to_none=True)

    return by_adapter, by_causal_lm


def seconds(run: Callable[[], None], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    code.allow((code.ANY,))
    for shape in SHAPES:
        for kind in FAMILIES:
            ours, theirs = passes(Case(kind, *shape))
            times = 1 if shape[0] > 128 else 8
            seconds(ours, 2)
            seconds(theirs, 2)
            turns = []
            for number in range(rounds):
                order = (ours, theirs) if number % 2 else (theirs, ours)
                taken = {run: seconds(run, times) for run in order}
                turns.append((taken[ours], taken[theirs]))
            ratios = [b / a for a, b in turns]
            ms = [1e3 * statistics.median(side) for side in zip(*turns, strict=True)]
            width, tokens, words, precision = shape
            print(
                f"{kind} {width} wide, 2 x {tokens} of {words}, {precision}: adapter {ms[0]:.1f} "
                f"ms, causal_lm {ms[1]:.1f} ms: {statistics.median(ratios):.3f}x "
                f"({min(ratios):.3f}-{max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
