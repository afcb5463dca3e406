"""What is said of models whose rows influence each other, which keep something from call to call,
or which torch builds in a way of its own; and that good ones which look alike are taken."""

import json
from collections.abc import Iterator

import pytest

from oobleck.core.job.file import parse_job
from oobleck.worker.describe import look_at
from oobleck.worker.runtime import code

JOB = """\
name: demo
model: {{python: "support.checked_models:{model}", arguments: {arguments}}}
data: {{python: "support.{data}"}}
training: {{steps: 9, global_batch: 4, seed: {seed}, precision: {precision}}}
"""
SENTENCES = "checked_models:Sentences"
#: What is said of a layer of a class, at which row's what.
INFLUENCES = {
    "Gated": "row 0 of its output changes with the other rows (",
    "Modulated": "row 0 of its output changes with the other rows (",
    "Branch": "row 0 of its output changes with the other rows (",
    "GatedByCount": "row 0 of its output changes when it is alone (",
    "Summed": "row 0 of its output changes as row 3 of more rows (",
    "Backwards": "the gradient of row 0's input changes with the other rows",
    "Leaning": "what row 0 adds to the gradient of weight changes with the other rows",
    "CentredInEvaluation": "in evaluation row 0 of its output changes with the other rows (",
    "Warmed": "row 2 of its output changes with the other rows (",
}
#: As `INFLUENCES`, of layers in which a row's place or the number of rows matters.
ANYWHERE = {
    "ByPlace": "row 0 of its output changes as row 3 of more rows (",
    "ByPlaceLater": "row 0 of its output changes as row 3 of more rows (",
    "ByPlaceAndDraws": "in evaluation row 0 of its output changes as row 3 of more rows (",
    "CentredIfMany": "row 0 of its output changes as row 0 of more rows (",
    "Averages": "the gradient of row 0's input changes as row 3 of more rows",
    "AveragesAndDraws": "in evaluation the gradient of row 0's input changes as row 3 of more",
    "CountsInEvaluation": "in evaluation row 0 of its output changes when it is alone (",
    "GatedInEvaluation": "in evaluation row 0 of its output changes with the other rows (",
}
KEEPS = {
    "CountsCalls": "calls: 1, then 2",
    "KeepsMean": "mean",
    "Remembers": "len(seen): 1, then 2",
    "CountsInFile": "support.checked_models._calls['all']: ",
}
GOOD = ("Rotary", "Shares", "Steep", "Recurrent", "Picky", "WarmedUp", "Parts", "Draws")


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def said(
    model: str,
    data: str = "bad_models:Points",
    *,
    precision: str = "fp32",
    seed: int = 3,
    **arguments: object,
) -> list[str]:
    text = JOB.format(
        model=model, arguments=json.dumps(arguments), data=data, precision=precision, seed=seed
    )
    found = look_at(parse_job(text), always=True).problems
    return [f"{'warning: ' if p.warning else ''}{p}" for p in found]


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("layer", INFLUENCES)
def test_rows_that_influence_each_other_with_other_weights_are_refused(
    layer: str, seed: int
) -> None:
    (line,) = said("named_layer", name=layer, seed=seed)
    assert line.startswith(f"layer 1 ({layer}): {INFLUENCES[layer]}")
    assert "row alone" in line or "within a row" in line, "the fix"


@pytest.mark.parametrize("layer", ANYWHERE)
def test_rows_that_depend_on_their_place_or_number_are_refused(layer: str) -> None:
    (line,) = said("named_layer", name=layer)
    assert line.startswith(f"layer 1 ({layer}): {ANYWHERE[layer]}")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("place", "row 0's loss changes as row 3 of more rows ("),
        ("many", "row 0's loss changes as row 0 of more rows ("),
        ("weight", "row 0's weight changes as row 3 of more rows ("),
        ("warmed", "row "),
    ],
)
def test_losses_that_depend_on_the_place_or_number_of_rows_are_refused(
    name: str, what: str
) -> None:
    (line,) = said("named_loss", name=name)
    assert line.startswith(f"loss: {what}")
    assert "as row " in line
    assert "its place in the batch" in line


@pytest.mark.parametrize("layer", ["Signs", "Hooked"])
def test_a_gradient_that_is_not_scaled_is_refused_where_the_loss_gives_weights(layer: str) -> None:
    assert said("hooked", layer=layer, weighed=False) == []
    (line,) = said("hooked", layer=layer, weighed=True)
    assert line.startswith(f"layer 1 ({layer}): ")
    assert " changes by another factor than the gradient of the output" in line
    assert said("hooked", layer="Hooked", weighed=True, limit=None) == []


def test_a_row_of_integers_that_goes_into_others_is_found_at_another_place() -> None:
    (line,) = said("summed_ids", SENTENCES)
    assert line.startswith(
        "layer 0 (SummedIds): row 0 of its output changes as row 3 of more rows ("
    )


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_nothing_is_said_of_layers_that_other_numbers_break(precision: str) -> None:
    for layer in GOOD:
        assert said("named_layer", name=layer, precision=precision) == [], layer


@pytest.mark.parametrize(
    ("precision", "seed"),
    [
        ("fp32", 0),
        ("fp64", 1),
        *(
            pytest.param(precision, seed, marks=pytest.mark.soak)
            for precision in ("fp32", "fp64")
            for seed in range(2, 7)
        ),
    ],
)
def test_nothing_is_said_of_experts_masks_choices_and_layers_that_are_computed_twice(
    precision: str, seed: int
) -> None:
    for model, data in (
        ("experts", SENTENCES),
        ("choice", "bad_models:Points"),
        ("by_step", "bad_models:Points"),
        ("weight_norm", "bad_models:Points"),
    ):
        assert said(model, data, precision=precision, seed=seed) == [], model
    (line,) = said("masked", precision=precision, seed=seed)
    assert line.startswith("warning: layer 1 (Masked): gives numbers that are not finite")


@pytest.mark.parametrize("layer", KEEPS)
def test_what_a_layer_keeps_from_call_to_call_is_a_warning(layer: str) -> None:
    (line,) = said("named_layer", name=layer)
    start = f"warning: layer 1 ({layer}): keeps something else after each forward ({KEEPS[layer]}"
    assert line.startswith(start)
    assert "oobleck.model.step()" in line


def test_a_layer_that_counts_calls_and_keeps_a_view_is_refused_as_others_that_keep_one() -> None:
    warning, line = said("named_layer", name="CountsCallsOfAView")
    assert warning.startswith("warning: layer 1 (CountsCallsOfAView): keeps something else after")
    assert line.startswith("layer 1 (CountsCallsOfAView): gives something else where workers put")


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (
            "Aliased",
            "has a.weight and b.weight in the same memory, and an optimizer would change it twice; "
            "make them one parameter: b.weight = a.weight",
        ),
        (
            "Overlapping",
            "has up, whose memory is in part that of down of this layer, and an optimizer would "
            "change it twice; give each memory of its own, as nn.Parameter(w[:8].clone()) does",
        ),
    ],
)
def test_weights_of_a_layer_in_the_same_memory_are_refused_with_the_fix(
    layer: str, what: str
) -> None:
    assert said("named_layer", name=layer) == [f"layer 1 ({layer}): {what}"]


def test_layers_of_a_sequence_may_have_parts_of_a_tensor_and_not_the_same_parts() -> None:
    assert said("parts_of_layers") == []
    (line,) = said("parts_of_layers", overlap=3)
    assert line.startswith(
        "layer 1 (Scale): has scale, whose memory is in part that of scale of layer 2 (Scale), and"
    )


def test_layers_of_a_sequence_draw_from_pythons_generator_as_they_are_built() -> None:
    assert said("drawn_in_sequence") == []


@pytest.mark.parametrize("how", ["branch", "step"])
def test_weights_that_the_batch_changes_for_some_outputs_or_steps_are_refused(how: str) -> None:
    (line,) = said("weights_of_rows", how=how)
    assert line.startswith("loss: row ")
    assert "'s weight changes with the other rows (" in line


def test_a_loss_that_counts_its_calls_is_refused_where_that_changes_it() -> None:
    (line,) = said("counting_loss")
    assert line.startswith("loss: keeps something else after each call (")
    assert "oobleck.model.step()" in line


def test_the_step_is_for_forwards_and_not_for_backwards() -> None:
    (line,) = said("named_layer", name="WarmedBackwards")
    assert "its backward fails: RuntimeError: oobleck.model.step() is known only in" in line


def test_a_loss_over_the_batch_is_no_matter_of_norms() -> None:
    travelling = said("balanced")
    assert travelling[0].startswith(
        "layer 1 (Router): row 0 of its output['balance'] changes with the other rows ("
    )
    alone = said("balanced", wide=False)
    assert alone[0].startswith("model: layer 1 (Router) gives a tensor of shape [] for 2 rows; ")
    added = said("balanced_in_loss")
    assert added[0].startswith("loss: row 0's loss changes with the other rows (")
    for (line,) in (travelling, alone, added):
        assert "LayerNorm" not in line
        assert "auxiliary" in line
        assert "p.mean(1) instead of p.mean(0)" in line


def test_a_branch_in_the_loss_is_found_in_outputs_that_other_weights_give() -> None:
    for model in ("branch_in_loss", "warmed_loss"):
        (line,) = said(model)
        assert line.startswith("loss: row "), model
        assert "'s loss changes with the other rows (" in line


@pytest.mark.parametrize(
    ("model", "arguments", "what", "fix"),
    [
        ("lazy", {}, "has 0 (LazyLinear)", "nn.Linear(in, out)"),
        ("sparse", {}, "has words (Embedding) with sparse=True", "leave sparse out"),
        ("sparse", {"bag": True}, "has words (EmbeddingBag) with", "leave sparse out"),
        ("orthogonal", {}, "has an orthogonal parametrization of weight", "use_trivialization=Fal"),
        ("quantised", {}, "is Linear, whose weights are quantised", "train the float layer"),
        ("quantised_dynamically", {}, "has 0 (Linear), whose weights", "train the float layer"),
        ("quantisation_aware", {}, "is Linear of torch.ao, which records", "train the float layer"),
        ("prepared_for_quantisation", {}, "has 0 (Linear) of torch.ao", "train the float layer"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch.ao
def test_layers_of_torch_that_cannot_be_trained_are_named_with_the_fix(
    model: str, arguments: dict[str, object], what: str, fix: str
) -> None:
    (line,) = said(model, SENTENCES if model == "sparse" else "bad_models:Points", **arguments)
    assert line.startswith("model: layer ")
    assert what in line
    assert fix in line


@pytest.mark.parametrize("how", ["cayley", "matrix_exp"])
def test_an_orthogonal_layer_without_numbers_of_its_own_is_taken(how: str) -> None:
    assert said("orthogonal", orthogonal_map=how, use_trivialization=False) == []


@pytest.mark.parametrize(
    ("dtype", "precision", "fix"),
    [
        ("bfloat16", "fp32", "or set training.precision: bf16"),
        ("bfloat16", "bf16", "leave dtype out"),
        ("float16", "fp32", "or set training.precision: bf16"),
        ("float64", "fp32", "or set training.precision: fp64"),
        ("float64", "fp64", None),
        ("float32", "fp64", None),
    ],
)
def test_a_layer_in_another_precision_than_the_jobs_is_a_warning(
    dtype: str, precision: str, fix: str | None
) -> None:
    found = said("in_dtype", dtype=dtype, precision=precision)
    assert len(found) == (fix is not None)
    for line in found:
        assert line.startswith(f"warning: layer 1 (Linear): builds weight in {dtype} (and 1 more)")
        assert line.endswith(fix or "") or f"{fix}," in line
