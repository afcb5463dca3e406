"""What a step asks of the device, operation by operation: a GPU pays for each kernel, each number
that is copied into another type, and most for each time that the host waits for it.

Counts are of a real worker's steps, and of the difference that a block, a micro-batch or a mask
makes. More of any is a regression; fewer is a reason to lower a budget.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oobleck.core.job.spec import JobSpec
from oobleck.worker.runtime.timeline import Stopwatch
from support import foreign
from support.one_worker import training

#: Change no number and start no kernel.
VIEWS = {
    *("view", "t", "transpose.int", "permute", "unsqueeze", "select.int", "slice.Tensor", "expand"),
    *("detach", "split.Tensor", "split_with_sizes", "unbind.int", "_unsafe_view", "alias"),
    *("as_strided", "lift_fresh", "promote_types", "empty.memory_format"),
}
#: Blocks and micro-batches that the counts are the difference of.
FEW, MORE = 2, 3


class Counted(TorchDispatchMode):
    """Operations by name, and numbers that are copied into another type by both."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.casts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.operations[name] += 1
        if name in ("_to_copy", "copy_"):
            given = args[0 if name == "_to_copy" else 1]
            if given.is_floating_point() and given.dtype != found.dtype:
                self.casts[_name(given.dtype), _name(found.dtype)] += found.numel()
        return found

    @property
    def kernels(self) -> Counter[str]:
        return Counter({n: count for n, count in self.operations.items() if n not in VIEWS})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def job(make_job: Any, *, blocks: int, microbatches: int, **given: Any) -> JobSpec:
    made: JobSpec = make_job(
        layers=blocks,
        global_batch=2 * microbatches,
        **{"precision": "fp32", "vocabulary": 256, **given},
    )
    return made


def step_of(job: JobSpec) -> Counted:
    """Its second step: the first makes what stays."""
    with training(job) as executor:
        executor.run_step(1)
        counted = Counted()
        with counted:
            executor.run_step(2)
    return counted


def of_block(make_job: Any, **given: Any) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Kernels and casts of one micro-batch in one block, forward and backward."""
    made = {
        (blocks, microbatches): step_of(
            job(make_job, blocks=blocks, microbatches=microbatches, **given)
        )
        for blocks in (FEW, MORE)
        for microbatches in (FEW, MORE)
    }
    kernels, casts = Counter[str](), Counter[tuple[str, str]]()
    for blocks, microbatches, add in (
        (MORE, MORE, 1),
        (FEW, MORE, 0),
        (MORE, FEW, 0),
        (FEW, FEW, 1),
    ):
        one = made[blocks, microbatches]
        for total, found in ((kernels, one.kernels), (casts, one.casts)):
            (total.update if add else total.subtract)(found)
    return +kernels, +casts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_takes_so_many_kernels_and_casts_nothing(make_job, precision):
    kernels, casts = of_block(make_job, precision=precision)
    # Four products with two gradients each; a sum into each of eight weights.
    added = 4 if precision == "bf16" else 0  # products that add to their sums
    assert kernels["mm"] == 12 - added
    assert kernels["addmm_"] == added
    assert kernels["add_.Tensor"] == 8 - added
    assert kernels.total() - kernels["_to_copy"] <= 34, kernels
    assert casts == products_casts(make_job, precision)


def products_casts(make_job: Any, precision: str) -> Counter[tuple[str, str]]:
    """Of a micro-batch in a block, on a CPU alone: what is multiplied for the gradients of its four
    matrices. A GPU's product takes narrow numbers and adds to wide ones."""
    model = job(make_job, blocks=FEW, microbatches=FEW).model
    numbers = 2 * model.sequence_length * 16 * model.hidden
    return Counter({("bfloat16", "float32"): numbers} if precision == "bf16" else {})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mask_takes_nothing_from_the_host(make_job, precision):
    plain, _ = of_block(make_job, precision=precision)
    kernels, casts = of_block(make_job, precision=precision, dropout=0.1)
    added = kernels - plain
    # Two masks of two rows each, and what multiplies by them.
    assert added.total() <= 2 * 24, added
    assert added["bitwise_xor.Scalar_out"] == added["bitwise_xor_.Scalar"] == 2 * 2
    assert casts == products_casts(make_job, precision)
    few, many = (
        step_of(job(make_job, blocks=blocks, microbatches=FEW, dropout=0.1, precision=precision))
        for blocks in (FEW, MORE)
    )
    assert many.operations["lift_fresh"] == few.operations["lift_fresh"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_host_waits_twice_in_a_step_and_gives_tokens_alone(make_job, precision):
    """For the losses, which are copied at once, and for the norm, both at the vote."""
    few = step_of(job(make_job, blocks=FEW, microbatches=FEW, precision=precision))
    many = step_of(job(make_job, blocks=MORE, microbatches=3 * FEW, precision=precision))
    assert few.operations["_local_scalar_dense"] == 1
    assert many.operations["_local_scalar_dense"] == 1
    assert many.operations["lift_fresh"] - few.operations["lift_fresh"] == 2 * FEW


def test_weights_are_rounded_once_per_step(make_job):
    few, many = (
        step_of(job(make_job, blocks=FEW, microbatches=count, precision="bf16"))
        for count in (FEW, FEW + 1)
    )
    model = job(make_job, blocks=FEW, microbatches=FEW).model
    tokens = 2 * model.sequence_length
    more = Counter(many.casts)
    more.subtract(few.casts)
    # Of another micro-batch: the embedding's output, its gradient, and the logits for the loss.
    logits, hidden = tokens * model.vocabulary, tokens * model.hidden
    assert more["float32", "bfloat16"] == hidden
    products = FEW * products_casts(make_job, "bf16").total() + hidden + logits
    assert more["bfloat16", "float32"] == logits + hidden + products
    rounded = few.casts["float32", "bfloat16"] - FEW * hidden
    with training(job(make_job, blocks=FEW, microbatches=FEW)) as executor:
        layers = executor._context.state.layers
        assert rounded == sum(state.layout.size for layer, state in layers.items() if layer)


def test_heads_that_share_keys_copy_none(make_job):
    """Keys and values go to the kernel as they are, not repeated for each head."""

    def kernels(heads: int) -> Counter[str]:
        spec = foreign.spec(
            "llama",
            sequence_length=8,
            vocab_size=256,
            num_attention_heads=4,
            num_key_value_heads=heads,
        )
        made = job(make_job, blocks=FEW, microbatches=FEW)
        return step_of(replace(made, model=spec)).kernels

    assert kernels(2) == kernels(4)


def test_a_backward_that_completes_no_layer_is_one_span(make_job, monkeypatch):
    """A GPU's host lets few spans wait there: one for each layer, and it waits for the backward."""
    pauses = Counter[int]()
    paused = Stopwatch.paused
    for microbatches in (FEW, MORE):

        def counted(watch: Stopwatch, microbatches: int = microbatches) -> Any:
            pauses[microbatches] += 1
            return paused(watch)

        monkeypatch.setattr(Stopwatch, "paused", counted)
        step_of(job(make_job, blocks=FEW, microbatches=microbatches))
    assert pauses[FEW] == pauses[MORE]
