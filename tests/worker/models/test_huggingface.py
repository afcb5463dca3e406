"""Models of transformers as layers: what they compute, draw, load and refuse."""

import copy
import dataclasses
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForSequenceClassificationLoss
from transformers.models.llama import modeling_llama

from oobleck.core.job.model import OwnModelSpec
from oobleck.data import shifted
from oobleck.worker.models.huggingface import balancing, pretrained
from oobleck.worker.models.huggingface.architecture import (
    TASKS,
    Architecture,
    Task,
    configuration,
)
from oobleck.worker.models.huggingface.balancing import balancing_losses
from oobleck.worker.models.huggingface.causal_lm import (
    build,
    causal_lm,
    foreign_names,
    label_losses,
    row_losses,
)
from oobleck.worker.models.huggingface.unsplit import handed, take_apart
from oobleck.worker.models.registry import weight_files
from support import causal
from support.folders import ROOT

FAMILIES = [
    "ArceeForCausalLM",
    "CohereForCausalLM",  # layers with parallel residuals, scaled logits
    "Cohere2ForCausalLM",  # windows, layers without positions
    "Exaone4ForCausalLM",
    "Ernie4_5ForCausalLM",
    "GPT2LMHeadModel",  # learnt positions, no pipeline plan
    "GPTNeoXForCausalLM",  # parallel residuals, part of a head rotated
    "Gemma2ForCausalLM",  # windows, capped scores and logits, scaled embedding
    "Gemma3ForCausalLM",  # windows, rotary tables of two kinds
    "GemmaForCausalLM",
    "Glm4ForCausalLM",
    "GlmForCausalLM",
    "GraniteForCausalLM",  # multipliers
    "HeliumForCausalLM",
    "LlamaForCausalLM",
    "MinistralForCausalLM",
    "MistralForCausalLM",  # windows in all layers
    "NemotronForCausalLM",
    "Olmo2ForCausalLM",  # norms behind
    "Olmo3ForCausalLM",
    "OlmoForCausalLM",  # norms without weights
    "Phi3ForCausalLM",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "SmolLM3ForCausalLM",  # a layer without positions
    "StableLmForCausalLM",
    "Starcoder2ForCausalLM",
    "OPTForCausalLM",  # layers in an inner part of the base model, which the head calls by itself
    "BloomForCausalLM",  # a table of all heads and rows in one dimension, layers that give tuples
    "BertLMHeadModel",  # an encoder as a decoder
    "BertForMaskedLM",  # no final norm, a head with a bias that it has twice
    "ModernBertForMaskedLM",  # windows both ways
    "BertForSequenceClassification",  # a pooler
    "LlamaForSequenceClassification",  # looks for the last token of each row
    "ViTForImageClassification",
]
PAGE = (ROOT / "docs" / "huggingface-classes.md").read_text()
#: Their experts are computed by kernels that have no float64 otherwise.
EAGER = {"experts_implementation": "eager"}
MIXTURES = [
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_layers_compute_what_the_whole_model_does(family: str) -> None:
    causal.compare(family)


def test_rows_do_not_know_each_other(family: str) -> None:
    layers = causal.pair(family).layers
    ids, _ = causal.batch(causal.pair(family))
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        together = causal.chain(layers, ids)
        causal.close(causal.chain(layers, ids[order]), together[order], 1e-12)
        causal.close(causal.chain(layers, ids[:1]), together[:1], 1e-12)


def test_labels_of_rows_are_learnt_as_transformers_does() -> None:
    """One of several, numbers, any of several: by the config, or by what the targets are."""
    draws = torch.Generator().manual_seed(1)
    classes, yes_or_no = torch.tensor([2, 0, 1]), torch.rand(3, 3, generator=draws).round()
    ignored = torch.tensor([2, -100, 1])
    numbers = torch.randn(3, generator=draws)
    for labels, problem, targets in [
        (3, None, classes),
        (3, "single_label_classification", classes.int()),
        (3, None, ignored),
        (3, "single_label_classification", ignored[:, None]),
        (3, None, yes_or_no),
        (3, "multi_label_classification", yes_or_no),
        (3, "regression", torch.randn(3, 3, generator=draws)),
        (1, None, numbers),
        (1, None, numbers[:, None]),
    ]:
        logits = torch.randn(3, labels, generator=draws)
        config = transformers.BertConfig(num_labels=labels, problem_type=problem)
        given = targets if targets.is_floating_point() else targets.long()
        theirs = ForSequenceClassificationLoss(given, logits, config)
        mine = label_losses(logits, targets, problem=problem, labels=labels)
        sums, weights = mine if isinstance(mine, tuple) else (mine, torch.ones(3))
        assert sums.shape == weights.shape == (3,)
        torch.testing.assert_close(sums.sum() / weights.sum(), theirs)


def test_the_name_of_a_class_says_what_it_learns() -> None:
    """The planner has no transformers, and goes by the end of the name."""
    for name in sorted(frozenset().union(*TASKS.values())):
        kind = getattr(transformers, name)
        if name.endswith("ForConditionalGeneration") and kind.config_class().is_encoder_decoder:
            continue  # it is refused
        task = Architecture(name, "{}").task
        spec = OwnModelSpec(architecture=name, sequence_length=8)
        assert spec.labelled == (task != "causal"), name
        assert spec.weighs_tokens == (task not in ("sequence", "image")), name
        if task == "image":
            OwnModelSpec(architecture=name)
        else:
            with pytest.raises(ValueError, match="sequence_length: is missing"):
                OwnModelSpec(architecture=name)


@pytest.mark.parametrize(
    ("labels", "targets", "why"),
    [
        (3, torch.zeros(2, 4, dtype=torch.int64), r"one integer as the target .*int64\[2, 4\]"),
        (3, torch.zeros(2), "3 numbers as the target"),
        (1, torch.zeros(2, 3), "one number as the target"),
    ],
)
def test_labels_of_another_kind_are_refused(labels: int, targets: torch.Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        label_losses(torch.zeros(2, labels), targets, problem=None, labels=labels)


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("LlamaForCausalLM", {"input_ids": 0, "attention_mask": 0}, "give input_ids alone"),
        ("BertForSequenceClassification", torch.zeros(2, 16), r"integers \(tokens,\), .*float32"),
        ("ViTForImageClassification", {"pixel_values": 0}, "give pixel_values alone"),
    ],
)
def test_what_is_no_single_tensor_of_inputs_is_refused(name: str, given: Any, why: str) -> None:
    embedding = causal.pair(name).layers[0]
    with pytest.raises(ValueError, match=why):
        embedding(given)


def test_a_layer_on_the_meta_device_has_its_shapes_alone(family: str) -> None:
    both = causal.pair(family)
    for make, real in zip(both.model.layers, both.layers, strict=True):
        with torch.device("meta"):
            empty = make()
        assert all(value.is_meta for value in empty.state_dict().values())
        assert shapes(empty) == shapes(real)


def shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in module.state_dict().items()}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_load_of_experts_is_balanced_per_row(name: str) -> None:
    causal.compare(name, tolerance=1e-5, output_router_logits=True, **EAGER)
    both = causal.pair(name, output_router_logits=True, **EAGER)
    ids = torch.randint(1, 64, (3, causal.LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        output = both.forward(ids)
        alone = both.forward(ids[1:2])
    assert output[1].shape == (3, 2, 4)
    balanced, _ = both.model.loss(output, ids)
    assert not torch.allclose(balanced, row_losses(output[0], ids)[0], rtol=1e-6)
    causal.close(both.model.loss(alone, ids[1:2])[0], balanced[1:2], 1e-12)


def test_experts_without_balancing_send_hidden_states_alone() -> None:
    assert isinstance(causal.pair("MixtralForCausalLM", **EAGER).layers[1](hidden()), torch.Tensor)


def hidden() -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(2, causal.LENGTH, 32, generator=draws, dtype=torch.float64)


def test_a_row_without_targets_counts_zero() -> None:
    targets = torch.tensor([[1, -100], [-100, -100]])
    losses, counted = row_losses(torch.zeros(2, 2, 4), targets)
    assert losses.tolist() == pytest.approx([torch.tensor(4.0).log().item(), 0.0])
    assert counted.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def test_labels_are_learned_as_transformers_shifts_and_weighs_them(name: str) -> None:
    """Of rows with all, some and one of their labels, in one batch."""
    both = causal.pair(name)
    ids = torch.randint(1, 64, (3, causal.LENGTH), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[1, :9] = -100
    labels[2, :-1] = -100
    targets = torch.stack([torch.from_numpy(shifted(row.numpy())) for row in labels])
    for module in [both.whole, *both.layers]:
        module.zero_grad()
    theirs = both.whole(ids, labels=labels).loss
    sums, counted = both.model.loss(both.forward(ids), targets)
    assert counted.tolist() == [causal.LENGTH - 1, causal.LENGTH - 9, 1]
    mine = sums.sum() / counted.sum()
    causal.close(mine, theirs, 1e-6)  # transformers computes it in float32
    mine.backward()
    theirs.backward()
    names = both.names(1)
    whole = dict(both.whole.named_parameters())
    for key, parameter in both.layers[1].named_parameters():
        assert parameter.grad is not None
        causal.close(parameter.grad, whole[names[key]].grad, 1e-5, key)


def test_the_balancing_loss_of_a_row_weighs_as_its_tokens_do() -> None:
    both = causal.pair("MixtralForCausalLM", output_router_logits=True, **EAGER)
    ids = torch.randint(1, 64, (3, causal.LENGTH), generator=torch.Generator().manual_seed(3))
    targets = ids.roll(-1, 1)
    targets[0, 2:], targets[1] = -100, -100
    with torch.no_grad():
        (logits, _), alone = both.forward(ids), [both.forward(row[None]) for row in ids]
        sums, counted = both.model.loss(both.forward(ids), targets)
        plain, _ = row_losses(logits, targets)
        for row, (_, routed) in enumerate(alone):
            balancing = balancing_losses(routed, 2)[0] * both.whole.config.router_aux_loss_coef
            # Alone and together, what transformers computes in float32 is rounded differently.
            causal.close(sums[row], plain[row] + counted[row] * balancing, 1e-8)
    assert counted.tolist() == [2, 0, causal.LENGTH]
    assert sums[1] == 0


def test_masks_and_tables_are_shared_by_layers() -> None:
    architecture = causal.pair("MistralForCausalLM").architecture
    first, *others = handed(architecture, causal.LENGTH, torch.device("cpu"), torch.float32)
    window = first.to(2).named["attention_mask"]
    assert not window[0, 0, -1, 0]
    assert window[0, 0, -1, -1]
    for other in others:
        mine, theirs = (x.to(1).named["attention_mask"] for x in (first, other))
        assert mine.data_ptr() == theirs.data_ptr()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "StableLmForCausalLM"])
def test_initial_weights_are_those_of_transformers(name: str) -> None:
    model = causal_lm(name, wide(name), sequence_length=causal.LENGTH)
    architecture = architecture_of(model)
    torch.manual_seed(0)
    whole = getattr(transformers, name)(copy.deepcopy(configuration(architecture))).state_dict()
    for number, make in enumerate(model.layers):
        layer = make()
        for own, full in foreign_names(architecture, number).items():
            value, theirs = layer.state_dict()[own], whole[full]
            if theirs.std() == 0.0:
                assert torch.equal(value, theirs), full
            else:
                assert value.std().item() == pytest.approx(theirs.std().item(), rel=0.1), full


def wide(name: str) -> dict[str, Any]:
    return causal.keys_of(name, vocab_size=256, intermediate_size=256)


def architecture_of(model: Any) -> Any:
    return model.layers[0].args[0]


def test_a_layer_is_drawn_from_the_generator_alone() -> None:
    architecture = architecture_of(
        causal_lm("Qwen2ForCausalLM", wide("Qwen2ForCausalLM"), sequence_length=causal.LENGTH)
    )

    def drawn(number: int) -> torch.Tensor:
        torch.manual_seed(5)
        return torch.cat([p.flatten() for p in build(architecture, number).parameters()])

    before = drawn(2)
    drawn(0)
    with torch.device("meta"):
        build(architecture, 1)
    assert torch.equal(drawn(2), before)


def test_layers_and_loss_travel_between_processes() -> None:
    model = causal.pair("LlamaForCausalLM").model
    again = pickle.loads(pickle.dumps((list(model.layers), model.loss)))  # noqa: S301  # our own
    assert shapes(again[0][1]()) == shapes(model.layers[1]())


@pytest.fixture(autouse=True)
def look_anew() -> Iterator[None]:
    """Files are looked at once per process; here they change."""
    yield
    weight_files.cache_clear()
    pretrained._sources.cache_clear()


# Mixtral's files have one tensor per expert and projection, and its model one of all.
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "GemmaForCausalLM", "MixtralForCausalLM", "GPTNeoXForCausalLM"]
)
def test_training_begins_with_saved_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    whole = kind(kind.config_class(**causal.keys_of(name)))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    model = causal_lm(weights=str(tmp_path), sequence_length=causal.LENGTH)
    state = whole.state_dict()
    for number, make in enumerate(model.layers):
        layer = make()
        for own, full in foreign_names(architecture_of(model), number).items():
            assert torch.equal(layer.state_dict()[own], state[full]), full


def test_a_saved_mixture_that_balances_its_experts_is_loaded(tmp_path: Path) -> None:
    """Whether its balancing loss is known is found out while layers are built without memory."""
    keys = causal.keys_of("MixtralForCausalLM") | {"output_router_logits": True}
    config = transformers.MixtralConfig(**keys)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    balancing.balance_of.cache_clear()
    model = causal_lm(weights=str(tmp_path), sequence_length=causal.LENGTH)
    assert len(model.layers) == config.num_hidden_layers + 2


@pytest.mark.parametrize(
    ("saved_as", "name", "drawn"),
    [
        ("BertForMaskedLM", "BertForSequenceClassification", ["bert.pooler", "classifier"]),
        ("BertModel", "BertForTokenClassification", ["classifier"]),
        ("LlamaForCausalLM", "LlamaForSequenceClassification", ["score"]),
        ("ViTModel", "ViTForImageClassification", ["classifier"]),
        ("BertForMaskedLM", "BertForMaskedLM", []),
        ("OPTForCausalLM", "OPTForCausalLM", []),
    ],
)
def test_a_classifier_begins_with_the_weights_of_what_reads(
    saved_as: str, name: str, drawn: list[str], tmp_path: Path
) -> None:
    """Its own head, which the files lack, is drawn."""
    kind = getattr(transformers, saved_as)
    keys = causal.keys_of(name)
    whole = kind(kind.config_class(**keys))
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    whole.save_pretrained(tmp_path)
    length = None if name in TASKS["image"] else causal.LENGTH
    config = {"num_labels": causal.LABELS} if drawn else None
    model = causal_lm(name, config, str(tmp_path), sequence_length=length)
    theirs, report = getattr(transformers, name).from_pretrained(
        tmp_path, num_labels=causal.LABELS, output_loading_info=True
    )
    state = theirs.state_dict()
    missing = set()
    for number, make in enumerate(model.layers):
        layer = make()
        for own, full in foreign_names(architecture_of(model), number).items():
            if full.startswith(tuple(drawn)):
                missing.add(full)
            else:
                assert torch.equal(layer.state_dict()[own], state[full]), full
    assert missing == set(report["missing_keys"])


def test_a_language_models_head_is_never_drawn_beside_files(tmp_path: Path) -> None:
    keys = causal.keys_of("LlamaForCausalLM")
    transformers.LlamaModel(transformers.LlamaConfig(**keys)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tensor lm_head"):
        causal_lm("LlamaForCausalLM", None, str(tmp_path), sequence_length=causal.LENGTH)


def test_what_layers_are_handed_of_frozen_weights_must_not_come_from_files(tmp_path: Path) -> None:
    """Those of RoFormer have its table of positions, maybe rounded, and here it is made anew."""
    keys = causal.keys_of("RoFormerForMaskedLM")
    causal_lm("RoFormerForMaskedLM", keys, sequence_length=causal.LENGTH)
    whole = transformers.RoFormerForMaskedLM(transformers.RoFormerConfig(**keys))
    whole.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="handed more than hidden states"):
        causal_lm(weights=str(tmp_path), sequence_length=causal.LENGTH)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(**causal.keys_of("LlamaForCausalLM"))
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_config_has_the_last_word_over_the_directory(saved: Path) -> None:
    keys = {"rms_norm_eps": 0.5, "num_hidden_layers": 2}
    model = causal_lm(config=keys, weights=str(saved), sequence_length=causal.LENGTH)
    assert len(model.layers) == 4
    assert configuration(architecture_of(model)).rms_norm_eps == 0.5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3"),
        ({"intermediate_size": 40}, r"is \[48, 32\], and the model needs \[40, 32\]"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"architectures": None}, "does not name one architecture"),
    ],
)
def test_weights_of_another_model_are_refused(
    saved: Path, changes: dict[str, object], why: str
) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=why):
        causal_lm(weights=str(saved), sequence_length=causal.LENGTH)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("Qwen3ForCausaLM", {}, r"no model Qwen3ForCausaLM \(did you mean Qwen3F"),
        ("LlamaForCausalLM", {"hiden_size": 32}, r"no key hiden_size \(did you mean hidden_size"),
        ("LlamaForCausalLM", {"hidden_size": "32"}, "transformers refuses it.*hidden_size"),
        ("LlamaForCausalLM", {"num_attention_heads": 5}, "transformers refuses it|cannot be built"),
        ("LlamaForCausalLM", {"max_position_embeddings": 8}, "beyond .* max_position_embeddings 8"),
        ("LlamaForCausalLM", {"pad_token_id": 64}, "set pad_token_id to null"),
        ("XGLMForCausalLM", {"layerdrop": 0.5}, "set layerdrop to 0"),
        ("BartForCausalLM", {}, "has an encoder"),
        ("NanoChatForCausalLM", {}, "its final norm is used in front"),
        ("BertLMHeadModel", {"is_decoder": False}, "set is_decoder to true"),
        ("LlamaForCausalLM", {"num_labels": 3}, "no key num_labels"),
        ("LlamaForSequenceClassification", {"pad_token_id": None}, "pad_token_id, which is null"),
        ("Gemma4UnifiedForCausalLM", {}, "handed more than hidden states"),
        ("ZambaForCausalLM", {}, "cannot be"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    name: str, changes: dict[str, object], why: str
) -> None:
    keys = {**causal.keys_of(name), **changes} if hasattr(transformers, name) else {}
    with pytest.raises(ValueError, match=why) as refusal:
        causal_lm(name, keys, sequence_length=causal.LENGTH)
    assert "\n" not in str(refusal.value)


def refusals() -> list[tuple[str, str]]:
    """Classes that the page says are refused, and why."""
    found = re.search(r"<!-- refused -->\n.*?\n\|---.*?\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert found is not None
    rows = re.findall(r"^\| (.*) \| (`.*`) \|$", found[1], re.MULTILINE)
    return [(name, why) for why, names in rows for name in re.findall(r"\w+", names)]


@pytest.mark.parametrize(("name", "why"), refusals())
def test_what_the_page_says_is_refused_is_refused_so(name: str, why: str) -> None:
    length = None if name in TASKS["image"] else causal.LENGTH
    with pytest.raises(ValueError, match=r"^model") as refusal:
        causal_lm(name, sequence_length=length)
    text = str(refusal.value)
    assert "\n" not in text
    for part in why.split(", give "):
        assert part in text
    assert "; " in text, "what to do"


class _Altered(transformers.LlamaModel):
    """A base model that does something of its own, at a place that a test chooses."""

    place = ""

    def forward(self, *positional: Any, **named: Any) -> Any:
        def double(_: Any, __: Any, given: torch.Tensor) -> torch.Tensor:
            return given * 2.0

        def write(_: Any, __: Any, given: torch.Tensor) -> torch.Tensor:
            return given.mul_(2.0)

        hook = {"between": (self.layers[:1], double), "behind": ([self.norm], write)}
        modules, change = hook[self.place]
        handles = [module.register_forward_hook(change) for module in modules]
        out = super().forward(*positional, **named)
        for handle in handles:
            handle.remove()
        return out


@pytest.mark.parametrize(
    ("place", "why"), [("between", "between two"), ("behind", "between its final norm and its")]
)
def test_a_model_that_does_more_than_its_layers_is_refused(
    monkeypatch: pytest.MonkeyPatch, place: str, why: str
) -> None:
    monkeypatch.setattr(_Altered, "place", place)
    monkeypatch.setattr(modeling_llama, "LlamaModel", _Altered)
    take_apart.cache_clear()
    with pytest.raises(ValueError, match=why):
        causal_lm(
            "LlamaForCausalLM", causal.keys_of("LlamaForCausalLM"), sequence_length=causal.LENGTH
        )


def test_neither_name_nor_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="give one such as"):
        causal_lm(sequence_length=8)


def test_nothing_is_dropped_unless_the_config_says_so() -> None:
    keys = causal.keys_of("SeedOssForCausalLM")
    for changes, share in ({}, 0.0), ({"attention_dropout": 0.5}, 0.5):
        model = causal_lm("SeedOssForCausalLM", {**keys, **changes}, sequence_length=causal.LENGTH)
        assert configuration(architecture_of(model)).attention_dropout == share


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "XGLMForCausalLM"])
def test_a_model_that_drops_embeddings_comes_apart(name: str) -> None:
    """Both runs of the proof have to drop the same."""
    drops = {"embd_pdrop": 0.5} if name == "GPT2LMHeadModel" else {"dropout": 0.5}
    keys = {**causal.keys_of(name), **drops}
    embedding, *_ = causal_lm(name, keys, sequence_length=causal.LENGTH).layers
    ids = torch.ones(1, causal.LENGTH, dtype=torch.int64)
    torch.manual_seed(0)
    dropped = (embedding()(ids) == 0.0).float().mean().item()  # type: ignore[operator]
    assert dropped == pytest.approx(0.5, abs=0.15)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("default")
def test_the_page_says_which_architectures_work() -> None:
    for mark, measured in ("measured", table()), ("measured heads", other_heads()):
        found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
        assert found is not None
        assert found[1] == measured, f"put this there:\n{measured}"


def table() -> str:
    """Return the causal language models that declare a plan, or work, by what was found of each."""
    found = {}
    for name in sorted(TASKS["causal"]):
        works, plan = outcome(name), planned(name)
        if plan or works == "yes":
            found[name] = (plan, works, balance(name))
    return grouped(found)


def grouped(found: dict[str, tuple[str, str, str]]) -> str:
    """Return a row per combination of plan, layers and balancing loss; first those that work."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, combination in found.items():
        alike.setdefault(combination, []).append(name)
    rows = [
        f"| {' | '.join(combination)} | {', '.join(names)} |"
        for combination, names in sorted(
            alike.items(), key=lambda item: (item[0][1] != "yes", item[0])
        )
    ]
    head = "| Plan | Layers | Balancing loss | Architectures |\n|---|---|---|---|"
    return "\n".join([head, *rows, ""])


def test_the_page_groups_architectures_as_it_is_measured() -> None:
    part = re.search(r"<!-- measured -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert part is not None
    found = {
        name: (plan, works, balancing)
        for plan, works, balancing, names in re.findall(
            r"^\| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([\w, ]+) \|$", part[1], re.MULTILINE
        )
        if works != "Layers"
        for name in names.split(", ")
    }
    assert len(found) > 100
    assert part[1] == grouped(dict(sorted(found.items())))


def other_heads() -> str:
    """Families whose other classes work, by the end of these."""
    rows = []
    for task, end in ENDS.items():
        names = sorted(name for name in TASKS[task] if name.endswith(end))
        works = [name.removesuffix(end) for name in names if outcome(name) == "yes"]
        rows.append(f"| `{end}` | {', '.join(works)} |")
    return "\n".join(["| Classes | Of |", "|---|---|", *rows, ""])


ENDS: dict[Task, str] = {
    "masked": "ForMaskedLM",
    "token": "ForTokenClassification",
    "sequence": "ForSequenceClassification",
    "image": "ForImageClassification",
}


def planned(name: str) -> str:
    return "yes" if getattr(transformers, name).config_class.base_model_pp_plan else ""


def outcome(name: str, **more: object) -> str:
    """The reason in words where they do not."""
    try:
        causal.compare(name, tolerance=1e-5, **EAGER, **more)
    except ValueError as error:
        why = str(error).removeprefix("model.architecture: ").replace(f" of {name}", "")
        tried = "transformers refuses it" not in why and "cannot be built" not in why
        clause = re.split(r"; | \(", why.removeprefix(f"{name} cannot be cut into layers: "))[0]
        clause = clause.removeprefix("model.config: the load-balancing loss ")
        return f"no: {clause}" if tried else "not tried: needs a config of its own"
    except AssertionError:
        return "**other results**"
    except (RuntimeError, AttributeError, TypeError, ImportError) as error:
        return f"no: {type(error).__name__}"
    return "yes"


def balance(name: str) -> str:
    fields = {field.name for field in dataclasses.fields(getattr(transformers, name).config_class)}
    if not {"output_router_logits", "router_aux_loss_coef"} <= fields:
        return ""
    return outcome(name, output_router_logits=True)
