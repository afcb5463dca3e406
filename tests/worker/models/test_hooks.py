"""What is said of hooks of parameters, and of weights that a layer keeps beside its modules."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from oobleck.core.job.code import Json
from oobleck.core.job.description import read_description
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.worker.describe import look_at
from oobleck.worker.models import own
from oobleck.worker.runtime import code
from support.gradient_models import HOOKS


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def job_of(model: str, **arguments: str) -> JobSpec:
    return JobSpec(
        name="hooks",
        model=OwnModelSpec(
            python=f"support.gradient_models:{model}", arguments=Json(json.dumps(arguments))
        ),
        data=DataSpec(python="support.gradient_models:Keyed"),
        training=TrainingSpec(steps=1, global_batch=4, microbatch=2, seed=7),
    )


def said(model: str, **arguments: str) -> list[str]:
    found = look_at(job_of(model, **arguments), always=True)
    return [f"{one.where}: {one.sentence}" for one in found.problems]


def described(model: str, **arguments: str) -> OwnModelSpec:
    job = job_of(model, **arguments)
    found = look_at(job, always=False)
    assert not found.problems
    assert isinstance(job.model, OwnModelSpec)
    return replace(job.model, described=found.descriptions["model"])


@pytest.mark.parametrize("model", ["branches", "masked", "hooked", "given"])
def test_nothing_is_said_of_good_ones(model: str) -> None:
    assert said(model) == []


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_given_rows_or_whole_micro_batches_or_refused(name: str) -> None:
    whole = HOOKS[name][1]
    if whole is None:
        (sentence,) = said("with_hooks", name=name)
        assert "layer 1 (Hooked): the hook of linear.weight" in sentence
        return
    spec = described("with_hooks", name=name)
    assert [layer.whole for layer in spec.description.layers] == [False, whole, False]
    assert spec.may_share(1) == (not whole)


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_hook_that_is_registered_in_forward_is_refused(how: str) -> None:
    (sentence,) = said("hooked_late", how=how)
    assert sentence.startswith(
        "model: layer 1 (HookedLate) registers a hook of linear.weight in forward"
    )
    assert sentence.endswith("do so in __init__")


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        ("mask", "mask", None),
        ("mask", "none", "their hooks change a gradient in different ways"),
        ("none", "mask", "their hooks change a gradient in different ways"),
        ("clamp", "clamp", "the hook of 0.table does not give the same for the sum"),
    ],
)
def test_hooks_of_a_tied_parameter_are_alike(first: str, last: str, why: str | None) -> None:
    found = said("tied_hooks", first=first, last=last)
    assert [why in sentence for sentence in found] == ([] if why is None else [True]), found


def test_a_hook_that_wants_the_whole_gradient_takes_no_loss_with_weights() -> None:
    assert said("hooked") == []
    (sentence,) = said("weighed")
    assert "gives weights, and a hook of layer 2" in sentence


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("closure", "gives something else where workers put its weights"),
        ("attribute", "gives something else where workers put its weights"),
        ("buffer", "gives something else where workers put its weights"),
        ("list", "keeps a parameter in scales, where no optimizer sees it"),
        ("hidden", "fails where workers put its weights"),
    ],
)
def test_what_would_not_follow_the_weights_is_refused(how: str, why: str) -> None:
    (sentence,) = said("viewed", how=how)
    assert sentence.startswith(f"layer 1 (Viewed): {why}"), sentence


def test_layers_are_built_for_real_where_they_hold_on_to_something() -> None:
    """Others are not: to draw initial weights would keep a worker that takes a layer over."""
    drawn = {
        model: [own.empty_layer(spec, 7, layer).drawn for layer in range(spec.layer_count)]
        for model in ("branches", "masked")
        if (spec := described(model))
    }
    assert drawn == {
        "branches": [False, False, False, False],
        "masked": [True, True, False, True, True],
    }
    assert read_description(described("masked").described).tied
