"""What is said of models and data sets as users write them, before anything is trained."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.describe import look_at
from oobleck.worker.runtime import code
from support.folders import ROOT

JOB = """\
name: demo
model: {{python: "support.bad_models:{model}"}}
data: {{python: "support.bad_models:{data}"}}
training: {{steps: 1, global_batch: 4, seed: 3, precision: {precision}}}
"""
GOOD = (
    "plain",
    "early_table",
    "dicts",
    "dropout",
    "encoder",
    "sequential",
    "tied",
    "frozen",
    "weighted",
)
#: The beginning of what is said of each, and of the fix.
BAD = {
    "batch_norm": ["layer 1 (BatchNorm1d): row 0 of its output changes with the other rows ("],
    "centred": ["layer 1 (Centred): row 0 of its output changes with the other rows ("],
    "averaged": ["layer 1 (Averaged): row 0 of its output changes when it is alone ("],
    "numpy_noise": [
        "layer 1 (NumpyNoise): draws from numpy's or random's generator; draw from torch's own",
        "layer 1 (NumpyNoise): gives something else when it is run again with the same seed; draw",
        "layer 1 (NumpyNoise): draws random numbers in evaluation too; draw only while",
    ],
    "layer_drop": ["layer 1 (LayerDrop): draws from numpy's or random's generator"],
    "own_generator": [
        "layer 1 (OwnGenerator): gives something else when it is run again",
        "layer 1 (OwnGenerator): draws random numbers in evaluation too",
    ],
    "always_drops": ["layer 1 (AlwaysDrops): draws random numbers in evaluation too; draw only"],
    "in_place": ["model: layer 1 (Sequential) writes into what it is given; make a new tensor"],
    "writes_the_data": ["model: layer 0 (InPlace) writes into what it is given"],
    "differentiates": [
        "model: layer 1 (Differentiates) fails on float32[2, 8], which layer 0 (Linear) gives for 2"
        " rows: it uses torch.func, under which what a layer keeps for its backward cannot be"
    ],
    "counted": ["layer 1 (Counted): changes its calls in forward; what is no trained parameter"],
    "no_way_back": [
        "layer 1 (NoWayBack): its backward fails: RuntimeError: there is no way back (bad_models.py"
    ],
    "fails_in_evaluation": [
        "layer 1 (FailsInEvaluation): fails in evaluation on 3 rows of the data: KeyError"
    ],
    "other_in_evaluation": ["layer 1 (Narrower): gives other types or shapes in evaluation"],
    "one_module": [
        f"layer {layer} (Residual): is built from parameters that were there before; what builds"
        for layer in (1, 2)
    ],
    "borrowed": [
        f"layer {layer} (Linear): is built from parameters that were there before"
        for layer in (1, 2)
    ],
    "same_child": [
        "layer 1 (Residual): has norm.weight, and so has layer 2 (Residual) as norm.weight, but "
        'layers may be on different workers; tied=[("1.norm.weight", "2.norm.weight")] has both '
        "trained as one",
    ],
    "untied": [
        "layer 0 (Linear): has weight, and so has layer 2 (Linear) as weight, but layers may be on "
        'different workers; tied=[("0.weight", "2.weight")] has both trained as one'
    ],
    "nothing_trained": ["model: no layer has a parameter that is trained; leave requires_grad"],
    "chosen": [
        "layer 1 (Chosen): row 0 of its output changes with the other rows (",
        "layer 1 (Chosen): gives float32[",
    ],
    "wider": [
        "layer 1 (Wider): gives float64[3, 8] for rows of the data, and float32[3, 8] for made-up"
    ],
    "misfit": [
        "model: layer 2 (Residual) fails on float32[2, 9], which layer 1 (Linear) gives for 2 rows:"
        " RuntimeError: "
    ],
    "hidden": ["model: layer 1 (Hidden) gives None at [1] where a tensor was expected; between"],
    "mean_loss": ["model: the loss gave [] for 2 rows, and must give one number per row"],
    "contrastive": ["loss: row 0's loss changes with the other rows ("],
    "trained_weights": [
        "model: the loss gave weights with a gradient, or complex ones; the weights"
    ],
    "negative_weights": ["loss: gives a weight below 0; give 0 to a row without anything"],
    "common_weights": ["loss: row 0's weight changes with the other rows ("],
    "one_weight": ["model: the loss gave [2], [] for 2 rows, and must give one number per row"],
    "counts_as_loss": ["loss: has no gradient, so that nothing would be trained"],
    "noisy_loss": ["loss: draws random numbers"],
    "failing_loss": ["model: the loss failed on float32[2, 4] and int64[2]: "],
    "list_of_metrics": ["metrics: gives list; give a dict of name to one number per row"],
    "hostile_metric": ["metrics: has the name 'a\\nb'; give names that can be printed"],
    "mean_metric": ["metrics: error is [] for 3 rows, and must be one number per row"],
    "ranked_metric": ["metrics: row 0's rank changes with the other rows; compute it by row"],
}
BAD_DATA = {
    "Jittered": "data: sample 0 differs when it is read again; data[i] must depend on i",
    "Flipped": "data: sample ",
    "Ragged": "data: sample 63 is float32[7] -> int64[], and sample 0 is float32[8] -> int64[]",
    "Boastful": "data: sample 64: IndexError: ",
}


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def job(model: str, data: str = "Points", precision: str = "fp32") -> JobSpec:
    return parse_job(JOB.format(model=model, data=data, precision=precision))


def said(job: JobSpec) -> list[str]:
    return [f"{p.warning or ''}{p}" for p in look_at(job, always=True).problems]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("model", GOOD)
def test_nothing_is_said_of_a_good_one(model: str, precision: str) -> None:
    found = look_at(job(model, precision=precision), always=False)
    assert found.problems == []
    assert found.run
    assert found.descriptions["model"]


def test_layers_are_described_with_the_numbers_of_the_data() -> None:
    """Zeros would be no length, and no token where these begin at 1."""
    found = look_at(job("recurrent", "Padded"), always=True)
    assert found.problems == []
    assert found.descriptions["model"]


def test_the_example_is_a_good_one() -> None:
    text = (ROOT / "examples" / "tagger.yaml").read_text().replace("tagger:", "examples.tagger:")
    assert said(parse_job(text)) == []


@pytest.mark.parametrize("model", BAD)
def test_a_bad_model_is_refused_with_what_is_wrong_and_the_fix(model: str) -> None:
    found = said(job(model))
    assert [line[: len(start)] for line, start in zip(found, BAD[model], strict=True)] == BAD[model]


def test_a_batch_norm_is_refused_with_the_norms_to_use() -> None:
    (line,) = said(job("batch_norm"))
    assert line.endswith("use a norm that works within a row (LayerNorm, GroupNorm)")


@pytest.mark.parametrize("data", BAD_DATA)
def test_a_bad_data_set_is_refused(data: str) -> None:
    (line,) = said(job("plain", data))
    assert line.startswith(BAD_DATA[data])


def test_the_data_of_an_evaluation_are_looked_at_too() -> None:
    def of(data: str, more: str = "") -> list[str]:
        text = JOB.format(model="plain", data="Points", precision="fp32")
        text = text.replace("seed: 3", "microbatch: 2")
        found = f'{{every: 1, data: {{python: "support.bad_models:{data}"{more}}}}}'
        return said(parse_job(f"{text}evaluation: {found}\n"))

    assert of("Points") == []
    for data, start in BAD_DATA.items():
        (line,) = of(data)
        assert line.startswith(f"evaluation.{start}")
    assert of("Points", ", arguments: {size: 1}") == [], "less than a micro-batch is evaluated too"
    (unlike,) = of("Labels")
    assert unlike.startswith("evaluation.data: its samples are ")


CAUSAL = """\
name: demo
model:
  architecture: LlamaForCausalLM
  sequence_length: 6
  config: {{vocab_size: 32, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1,
    num_attention_heads: 2}}
data: {data}
training: {{steps: 1, global_batch: 4}}
evaluation: {{every: 1, data: {data}}}
"""


def test_targets_that_are_the_inputs_are_refused_where_the_next_token_is_learned(
    tmp_path: Path,
) -> None:
    ids = np.random.default_rng(0).integers(32, size=(8, 6))
    for name, column in (("input_ids", ids), ("labels", ids.copy())):
        np.save(tmp_path / f"{name}.npy", column)

    def of(aims: str) -> JobSpec:
        arguments = f"{{path: {tmp_path}, inputs: input_ids, {aims}: labels}}"
        return parse_job(CAUSAL.format(data=f"{{plugin: arrays, arguments: {arguments}}}"))

    found = [line.partition(", so ")[0] for line in said(of("targets"))]
    assert found == [f"{key}: targets equal the inputs" for key in ("data", "evaluation.data")]
    assert said(of("labels")) == []


def test_what_may_be_meant_is_a_warning() -> None:
    sentences = {
        "infinite": "Truelayer 1 (Infinite): gives numbers that are not finite",
        "unknown_metric": "Truemetrics: error is not finite with the initial weights",
    }
    for model, start in sentences.items():
        line, *_ = found = said(job(model))
        assert line.startswith(start)
        assert all(text.startswith("True") for text in found)


def test_all_problems_of_a_model_and_its_data_are_told_at_once() -> None:
    found = said(job("counted", "Jittered"))
    assert [line.partition(":")[0] for line in found] == ["data", "layer 1 (Counted)"]


def test_a_large_model_is_run_only_when_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oobleck.worker.describe._LARGE", 100)
    unasked = look_at(job("counted"), always=False)
    assert (unasked.problems, unasked.run) == ([], False)
    assert unasked.descriptions
    asked = look_at(job("counted"), always=True)
    assert (len(asked.problems), asked.run) == (1, True)


def test_a_layer_of_each_kind_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    from oobleck.worker.models import own

    real = own.build_real

    def build_real(spec: OwnModelSpec, seed: int, layer: int) -> object:
        built.append(layer)
        return real(spec, seed, layer)

    monkeypatch.setattr(own, "build_real", build_real)
    assert said(job("plain")) == []
    described, checked = built[:4], built[4:]
    assert described == [0, 1, 2, 3]
    assert checked == [0, 1, 3], "2 is as 1"
