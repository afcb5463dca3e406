"""The job file: what it means, and one clear line for everything that is wrong with it."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.core.errors import InvalidJob
from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import (
    DataSpec,
    JobSpec,
    RecoveryPolicy,
    RecoverySpec,
    ResourceSpec,
    TrainingSpec,
)
from oobleck.core.units import format_bytes, parse_bytes

JOB = """\
name: demo
model: {kind: gpt, layers: 8, hidden: 256, heads: 8, sequence_length: 256}
data:  {text: ["path/or/glob"]}
training:
  steps: 200
  global_batch: 32
  microbatch: 2
  optimizer: {name: adamw, lr: 3e-4, weight_decay: 0.1}
  schedule: {name: cosine, warmup: 20}
fault_tolerance: 1
resources:
  memory_per_worker: 64MiB
"""


def test_a_job_file_is_read() -> None:
    job = parse_job(JOB)
    assert job == JobSpec(
        name="demo",
        model=ModelSpec(layers=8, hidden=256, heads=8, sequence_length=256),
        data=DataSpec(text=("path/or/glob",)),
        training=TrainingSpec(
            steps=200,
            global_batch=32,
            microbatch=2,
            optimizer=OptimizerSpec(lr=3.0e-4, weight_decay=0.1),
            schedule=ScheduleSpec(name="cosine", warmup=20),
        ),
        resources=ResourceSpec(memory_per_worker_bytes=64 << 20),
    )


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(InvalidJob) as caught:
        parse_job(text, overrides=overrides, source="job.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{kind: gpt, layers",
            "{kind: gpt, layer",
            "job.yaml:2: unknown key 'layer' in model; did you mean 'layers'?",
        ),
        (
            "fault_tolerance",
            "fault_tolerence",
            "job.yaml:10: unknown key 'fault_tolerence'; did you mean 'fault_tolerance'?",
        ),
        (
            "  steps: 200\n",
            "  qqqq: 200\n",
            "job.yaml:5: unknown key 'qqqq' in training; known keys: steps, global_batch, "
            "microbatch, seed, precision, fp8_recipe, float32_matmul, gradient_sums, recompute, "
            "compile, optimizer, schedule, pipeline_schedule, clip, max_skipped_steps",
        ),
        (
            "  steps: 200\n",
            "  steps: 200\n  precision: fp64\n  gradient_sums: bf16\n",
            "job.yaml:7: training.gradient_sums: bf16 rounds gradients to 8 bits, and precision "
            "is fp64; leave it out, or choose precision fp32 or bf16",
        ),
        (
            "  steps: 200\n",
            "  steps: 200\n  precision: bf16\n  fp8_recipe: rowwise\n",
            "job.yaml:7: training.fp8_recipe: rowwise scales products in float8, and precision is "
            "bf16; set precision to fp8, or leave the recipe out",
        ),
        (
            'hidden: 256, heads: 8, sequence_length: 256}\ndata:  {text: ["path/or/glob"]}\n'
            "training:\n",
            'hidden: 264, heads: 8, sequence_length: 256}\ndata: {text: ["path/or/glob"]}\n'
            "training:\n  precision: fp8\n",
            "job.yaml:5: training.precision: fp8 multiplies matrices whose sizes are multiples of",
        ),
        (
            "  steps: 200\n",
            "",
            "job.yaml:4: missing key 'steps' in training; add it (an integer from 1 to",
        ),
        (
            '256}\ndata:  {text: ["path/or/glob"]}\ntraining:\n',
            '256, dropout: 0.1}\ndata: {text: ["path/or/glob"]}\ntraining:\n  compile: true\n',
            "set dropout to 0, or leave compile out",
        ),
        (
            "steps: 200",
            'steps: "200"',
            "training.steps must be an integer from 1 to 1000000000, not the",
        ),
        ("steps: 200", 'steps: "200"', "remove the quotes"),
        ("steps: 200", "steps: true", "job.yaml:5: training.steps must be an integer from 1"),
        ("steps: 200", "steps: 2.5", "job.yaml:5: training.steps must be an integer from 1"),
        ("steps: 200", "steps: 1e2", "job.yaml:5: training.steps must be an integer from 1"),
        ("steps: 200", "steps:", "job.yaml:5: training.steps must be an integer from 1"),
        ("steps: 200", "steps: [1]", "job.yaml:5: training.steps must be an integer from 1"),
        ("steps: 200", "steps: 9223372036854775808", "not 9223372036854775808, which is too large"),
        (
            "fault_tolerance: 1",
            "checkpoint: {path: saved, every: 0}",
            "job.yaml:10: checkpoint.every must be an integer of at least 1 or auto, not 0",
        ),
        (
            "fault_tolerance: 1",
            "checkpoint: {path: saved, resume: maybe}",
            "checkpoint.resume must be auto or never or require, not the text",
        ),
        (
            "fault_tolerance: 1",
            "on_state_lost: no",
            "job.yaml:10: on_state_lost must be fail or res",
        ),
        (
            "fault_tolerance: 1",
            "data_plane: open",
            "job.yaml:10: data_plane must be auto or clear or sealed, not the text",
        ),
        (
            "fault_tolerance: 1",
            "track: [mlflow, abacus]",
            "job.yaml:10: track[1] must be mlflow or tensorboard or wandb, not the text",
        ),
        (
            "fault_tolerance: 1",
            "track: [mlflow, mlflow]",
            "job.yaml:10: track: names a program twice; name it once",
        ),
        (
            "fault_tolerance: 1",
            "recovery: {policy: rerout}",
            f"recovery.policy must be {' or '.join(sorted(get_args(RecoveryPolicy)))}, not the "
            "text \"rerout\"; did you mean 'reroute'?",
        ),
        (
            "fault_tolerance: 1",
            "recovery: {polcy: auto}",
            "unknown key 'polcy' in recovery; did you mean 'policy'?",
        ),
        (
            "fault_tolerance: 1",
            "fault_tolerance: 0\nrecovery: {policy: reroute}",
            "job.yaml:11: recovery.policy: reroute needs other nodes that hold the same "
            "layers; set fault_tolerance to 1 or more, or policy to auto",
        ),
        *(
            (
                "fault_tolerance: 1",
                f"fault_tolerance: 0\nrecovery: {{policy: {policy}}}",
                f"job.yaml:11: recovery.policy: {policy} needs other nodes that hold the same",
            )
            for policy in ("shadow", "normalise", "stay")
        ),
        (
            "fault_tolerance: 1",
            "checkpoint: {pth: saved}",
            "unknown key 'pth' in checkpoint; did you mean 'path'?",
        ),
        (
            "fault_tolerance: 1",
            "checkpoint: {every: 5}",
            "missing key 'path' in checkpoint; add it (a text)",
        ),
        ("fault_tolerance: 1", "checkpoint: {path: ' '}", "checkpoint.path: is empty; give a dir"),
        (
            "fault_tolerance: 1",
            'checkpoint: {path: "saved\\u200b"}',
            "checkpoint.path: has characters that cannot be printed; name another place",
        ),
        (
            "fault_tolerance: 1",
            f"checkpoint: {{path: {'x' * 901}}}",
            "checkpoint.path: is longer than 900 characters; name another place",
        ),
        (
            "fault_tolerance: 1",
            'checkpoint: {path: "my\\u00a0checkpoints"}',
            "job.yaml:10: checkpoint.path: has characters that a table cannot show, such as a no-",
        ),
        (
            "fault_tolerance: 1",
            f"checkpoint: {{path: 's3://b/?{'&token=a' * 109}'}}",
            "checkpoint.path: is longer than 900 characters where its secrets are hidden; name",
        ),
        (
            "steps: 200",
            "steps: 0",
            "job.yaml:5: training.steps must be an integer from 1 to 1000000000, not 0",
        ),
        (
            "lr: 3e-4",
            "lr: fast",
            "job.yaml:8: training.optimizer.lr must be a number of at l",
        ),
        ("lr: 3e-4", "lr: 1e999", "job.yaml:8: 1e999 is too large"),
        ("lr: 3e-4", "lr: -.inf", "job.yaml:8: -.inf is not finite; give a number"),
        ("name: cosine", "name: step", "schedule.name must be constant or cosine or linear, not t"),
        (
            "name: adamw,",
            "name: adamw, momentum: 0.9,",
            "job.yaml:8: training.optimizer.momentum: is a setting of sgd; remove it, or set name: "
            "sgd (adamw takes lr, weight_decay, beta1, beta2, eps)",
        ),
        (
            "name: adamw,",
            "name: sgd, beta2: 0.9,",
            "job.yaml:8: training.optimizer.beta2: is a setting of adamw; remove it",
        ),
        (
            "name: adamw,",
            "name: sgd, nesterov: true,",
            "job.yaml:8: training.optimizer.nesterov: needs momentum; give momentum, such as 0.9",
        ),
        (
            "name: adamw,",
            "name: sgd, momentum: 1.0,",
            "job.yaml:8: training.optimizer.momentum must be a number from 0 to below 1, not 1.0",
        ),
        (
            "warmup: 20",
            "min_lr: 1.0e-3",
            "job.yaml:9: training.schedule.min_lr: 0.001 is above the optimizer's lr (0.0003)",
        ),
        (
            "{name: cosine, warmup: 20}",
            "{min_lr: 1.0e-5}",
            "job.yaml:9: training.schedule.min_lr: is where linear and cosine end; remove it",
        ),
        ("microbatch: 2", "microbatch: 5", "job.yaml:7: training.microbatch: 5 does not divide"),
        (
            "fault_tolerance",
            "evaluation: {every: 5}\nfault_tolerance",
            "job.yaml:10: evaluation: give exactly one of fraction (of the data) and data",
        ),
        (
            "fault_tolerance",
            "evaluation: {every: 5, fraction: 1.5}\nfault_tolerance",
            "job.yaml:10: evaluation.fraction must be a number between 0 and 1, not 1.5",
        ),
        (
            "fault_tolerance",
            "evaluation: {every: 0, fraction: 0.1}\nfault_tolerance",
            "job.yaml:10: evaluation.every must be an integer of at least 1, not 0",
        ),
        ("name: demo", "name: My Job", "job.yaml:1: name: job name 'My Job' is not allowed"),
        ("name: demo", "name: 5", "job.yaml:1: name must be a text, not 5"),
        ("heads: 8", "heads: 7", "job.yaml:2: model.heads: 7 does not divide hidden (256)"),
        (
            "memory_per_worker: 64MiB",
            "min_nodes_per_pipeline: 11",
            "min_nodes_per_pipeline: 11 nodes are more than the 10 layers",
        ),
        (
            "layers: 8",
            "layers: 1000000",
            "job.yaml:2: model.layers must be an integer from 1 to 512",
        ),
        ("global_batch: 32", "global_batch: 1000000000", "job.yaml:6: training.global_batch must"),
        ("64MiB", "64 miles", "job.yaml:12: resources.memory_per_worker: '64 miles' is not a size"),
        ("64MiB", "0", "job.yaml:12: resources.memory_per_worker must be an integer of at least 1"),
        ('["path/or/glob"]', "[1]", "job.yaml:3: data.text[0] must be a text, not 1"),
        ('["path/or/glob"]', "[]", "job.yaml:3: data: give exactly one of text"),
        (
            "path/or/glob",
            "s3://key:secret@store/corpus/*.txt",
            "job.yaml:3: data.text: s3://***@store/corpus/*.txt: URLs are not supported yet here; "
            "give a path that is the same on all nodes",
        ),
        ('text: ["path/or/glob"]', "tokens: https://h/t.bin", "data.tokens: https://h/t.bin: URLs"),
        ('glob"]}', 'glob"], tokenizer: "hf://t"}', "job.yaml:3: data.tokenizer: hf://t: URLs are"),
        (
            "fault_tolerance",
            "evaluation: {every: 5, data: {text: 'gs://b/x'}}\nfault_tolerance",
            "job.yaml:10: evaluation.data.text: gs://b/x: URLs are not supported yet here",
        ),
        (
            "fault_tolerance",
            "output: s3://b/w\nfault_tolerance",
            "job.yaml:10: output: s3://b/w: U",
        ),
        ("kind: gpt, layers: 8", "weights: s3://b/w", "job.yaml:2: model.weights: s3://b/w: URLs"),
        ("fault_tolerance: 1", "fault_tolerance: 16", "job.yaml:6: training.global_batch: 32 samp"),
        (
            "fault_tolerance: 1",
            "name: other",
            "job.yaml:10: key 'name' is given a second time (first at job.yaml:1); remove",
        ),
        (
            "kind: gpt, layers: 8, hidden: 256, heads: 8",
            "architecture: BertForMaskedLM",
            "job.yaml:3: data: a model of that architecture learns from labels, and text",
        ),
        (
            "kind: gpt, layers: 8, hidden: 256, heads: 8, sequence_length: 256",
            "architecture: BertForSequenceClassification",
            "job.yaml:2: model: sequence_length: is missing; give the tokens of a row",
        ),
        ("fault_tolerance: 1", "<<: {profile: estimate}", "job.yaml:10: job files merge no mapp"),
        ("fault_tolerance: 1", "profile: 5", "job.yaml:10: profile must be a text, not 5"),
        ("fault_tolerance: 1", 'profile: " "', "job.yaml:10: profile: is empty; give measure, est"),
        ("resources:", "resources: x\nx:", "resources must be a mapping (key: value lines), not"),
    ],
)
def test_a_wrong_job_gets_one_line_with_place_and_fix(old: str, new: str, message: str) -> None:
    assert old in JOB
    assert message in refusal(JOB.replace(old, new))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (r"\0", "has characters that cannot be printed; name another place"),
        (r"a\nb", "has characters that cannot be printed; name another place"),
        (" ", "is empty; give "),
        ("x" * 901, "is longer than 900 characters; name another place"),
    ],
    ids=["NUL", "line end", "space", "length"],
)
@pytest.mark.parametrize(
    "key",
    [
        "output",
        "profile",
        "checkpoint.path",
        "model.weights",
        "data.text",
        "data.tokens",
        "data.tokenizer",
        "data.cache",
        "evaluation.data.tokens",
    ],
)
def test_one_rule_holds_for_all_paths(key: str, path: str, why: str) -> None:
    name = key.rpartition(".")[2]
    before = {"data.tokens": ["data=null"], "evaluation.data.tokens": ["evaluation.every=5"]}
    with pytest.raises(InvalidJob, match=re.escape(f"{name}: {why}")):
        parse_job(JOB, overrides=[*before.get(key, []), f'{key}="{path}"'])


def test_a_path_may_be_in_any_script() -> None:
    named = "データ　集/été\u00a0👩‍🔬"
    assert parse_job(JOB, overrides=[f'output="{named}"']).output == named


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job.yaml: it is empty; a job needs at least name, model, data, training"),
        ("# nothing\n", "job.yaml: it is empty; a job needs at least name, model, data, training"),
        ("- a\n", "job.yaml:1: the job must be a mapping (key: value lines), not a list"),
        ("hello\n", 'job.yaml:1: the job must be a mapping (key: value lines), not the text "hel'),
        ("a:\n\tb: 1\n", "job.yaml:2: not valid YAML: while scanning for the next token"),
        ("a:\n  b: 1\n c: 2\n", "; check the indentation of this line and those above"),
        ("name: [\n", "job.yaml:2: not valid YAML: while parsing a flow node"),
        ("name: a\n---\nname: b\n", "not valid YAML: expected a single document in the stream"),
        ("a: \x00", "job.yaml: not valid YAML: unacceptable character"),
        ("[" * 1_000_000, "job.yaml:1: nested too deeply for a job"),
        ("a: &a [*a]", "job.yaml:1: nested too deeply for a job"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000)),
            "job.yaml:1: nested too deeply for a job",
        ),
        ("a: [" + "1, " * 300_000, "job.yaml:1: too many values for a job"),
        ("[a]: 1\n", "job.yaml:1: a key must be a plain word"),
        ('name: "\\ud800"\n', "job.yaml:1: the text holds half a character"),
        ("name: " + "9" * 5000, "job.yaml:1: the number is too long"),
    ],
)
def test_a_text_that_is_no_job_gets_one_line(text: str, message: str) -> None:
    assert message in refusal(text)


def test_aliases_cannot_blow_up() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    assert "too many values" in refusal("\n".join(lines))


def test_overrides_replace_and_add_values_in_order() -> None:
    job = parse_job(
        JOB,
        overrides=[
            "training.steps=5",
            "training.steps=7",
            "resources.memory_per_worker=1GiB",
            "output=/tmp/out",
            "training.clip=",
            "training.max_skipped_steps=",
            "data.text=[a, b]",
        ],
    )
    assert job.training.steps == 7
    assert job.training.clip is None
    assert job.training.max_skipped_steps is None
    assert job.resources.memory_per_worker_bytes == 1 << 30
    assert job.output == "/tmp/out"
    assert job.data.text == ("a", "b")
    without = JOB.partition("resources:")[0]
    assert parse_job(without, overrides=["resources.memory_per_worker=64MiB"]) == parse_job(JOB)


def test_null_takes_a_section_out() -> None:
    without = parse_job(JOB.partition("resources:")[0])
    assert parse_job(JOB, overrides=["resources=null"]) == without
    assert parse_job(f"{JOB}\ncheckpoint: {{path: saved}}", overrides=["checkpoint=null"]) == (
        parse_job(JOB)
    )
    plain = parse_job(JOB, overrides=["training.optimizer=null", "training.optimizer.lr=0.5"])
    assert plain.training.optimizer == OptimizerSpec(lr=0.5)
    assert "training must be a mapping (key: value lines), not empty" in refusal(JOB, "training=")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("training.steps", "write it as key.path=value, such as training.steps=100"),
        ("=5", "write it as key.path=value"),
        ("training..steps=5", "write it as key.path=value"),
        ("training.step=5", "unknown key 'step' in training; did you mean 'steps'?"),
        ("training.steps=x", "training.steps must be an integer from 1"),
        ("name.first=x", 'there are no keys below the text "demo"'),
        ("training=[", "not valid YAML"),
        ("training.microbatch=3", "training.microbatch: 3 does not divide global_batch (32)"),
    ],
)
def test_a_wrong_override_names_itself(argument: str, message: str) -> None:
    assert refusal(JOB, argument).startswith(f"--set {argument}: {message}")


def test_json_is_a_job_file_too() -> None:
    assert parse_job(format_job(parse_job(JOB))) == parse_job(JOB)


paths = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)
jobs = st.builds(
    JobSpec,
    name=st.from_regex(r"[a-z0-9][a-z0-9._-]{0,20}", fullmatch=True),
    model=st.builds(
        ModelSpec,
        layers=st.integers(1, 200),
        hidden=st.just(64),
        heads=st.sampled_from([1, 2, 4]),
        sequence_length=st.integers(1, 4096),
        tied=st.booleans(),
        dropout=st.floats(0, 0.99),
    ),
    data=st.one_of(
        st.builds(
            DataSpec,
            text=st.lists(paths, min_size=1, max_size=3).map(tuple),
        ),
        st.builds(DataSpec, tokens=paths),
    ),
    training=st.builds(
        TrainingSpec,
        steps=st.integers(1, 10**9),
        global_batch=st.just(64),
        microbatch=st.sampled_from([1, 2, 4]),
        seed=st.integers(0, 2**63 - 1),
        precision=st.sampled_from(["fp32", "bf16", "fp64"]),
        float32_matmul=st.sampled_from(["highest", "high", "medium"]),
        optimizer=st.builds(
            OptimizerSpec, lr=st.floats(0, 1e3), eps=st.floats(0, 1), beta1=st.floats(0, 0.999)
        ),
        clip=st.one_of(st.none(), st.floats(1e-300, 1e300)),
        max_skipped_steps=st.one_of(st.none(), st.integers(1, 10**9)),
    ),
    fault_tolerance=st.integers(0, 15),
    resources=st.builds(
        ResourceSpec,
        memory_per_worker_bytes=st.one_of(st.none(), st.integers(1, 2**62)),
        min_nodes_per_pipeline=st.integers(1, 3),
    ),
    output=st.one_of(st.none(), paths),
    recovery=st.builds(RecoverySpec, policy=st.sampled_from(["auto", "templates"])),
    profile=st.one_of(st.sampled_from(("measure", "estimate")), paths),
)


@given(job=jobs)
def test_every_job_survives_its_text(job: JobSpec) -> None:
    assert parse_job(format_job(job)) == job


@pytest.mark.parametrize(
    ("text", "count"),
    [("64MiB", 64 << 20), ("1.5GB", 1_500_000_000), ("2k", 2048), ("7", 7), ("0.1 KiB", 102)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_short_form_of_sizes() -> None:
    assert [format_bytes(n) for n in (12, 2048, 3 << 29)] == ["12 B", "2.0 KiB", "1.5 GiB"]


@given(
    line=st.integers(0, JOB.count("\n") - 1),
    junk=st.one_of(
        st.text(max_size=12), st.text(alphabet='[]{}:,-&*!|>%@`"# \n\t01e.', max_size=9)
    ),
    at=st.integers(0, 60),
)
def test_whatever_is_typed_gives_a_job_or_one_clear_line(line: int, junk: str, at: int) -> None:
    lines = JOB.splitlines()
    lines[line] = lines[line][:at] + junk + lines[line][at:]
    message = "job.yaml:"
    try:
        parse_job("\n".join(lines), overrides=[f"training.seed={junk}"], source="job.yaml")
    except InvalidJob as error:
        message = str(error)
    assert message.startswith(("job.yaml:", "--set "))
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("data_plane", "off_host", "on_host"),
    [("auto", True, False), ("sealed", True, True), ("clear", False, False)],
)
def test_links_are_sealed_off_the_host_unless_the_job_says_otherwise(
    data_plane: str, off_host: bool, on_host: bool
) -> None:
    job = parse_job(JOB, overrides=[f"data_plane={data_plane}"])
    assert job.seals_links(on_loopback=False) == off_host
    assert job.seals_links(on_loopback=True) == on_host


def test_links_are_sealed_off_the_host_by_default() -> None:
    assert parse_job(JOB).data_plane == "auto"


OWN = """\
name: x
model: {python: "m:f"}
data: {python: "m:d"}
training: {steps: 1, global_batch: 4, optimizer: {name: adamw}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '{python: "m:f"}',
            '{pyhton: "m:f"}',
            "2: unknown key 'pyhton' in model; did you mean 'py",
        ),
        (
            '{python: "m:f"}',
            '{Plugin: "m:f"}',
            "2: unknown key 'Plugin' in model; did you mean 'pl",
        ),
        (
            '"m:f"',
            '"m:f", kwargs: {}',
            "2: unknown key 'kwargs' in model; did you mean 'arguments'?",
        ),
        (
            '"m:f"',
            '"m:f", blocks: 3',
            "2: unknown key 'blocks' in model; known keys: plugin, python, path, arguments, "
            "architecture, config, weights, lora, sequence_length, vocabulary; put arguments of "
            "your function into arguments",
        ),
        (
            '{python: "m:f"}',
            "{kind: gpt, arguments: {}}",
            "2: unknown key 'arguments' in model; it goes with one of plugin, python, architecture",
        ),
        ('"m:f"', '"m.f"', "2: model.python: 'm.f' has no colon; write m:f"),
        ('"m:f"', '"m.py:f"', "2: model.python: 'm.py:f' names a file; write m:f"),
        ('"m:f"', '"/a/m.py:f"', "2: model.python: '/a/m.py:f' names a file; write m:f, and /a as"),
        ('"m:f"', '"m:<lambda>"', "2: model.python: 'm:<lambda>' has no name that workers could"),
        ('"m:f"', '"m:A.f"', "2: model.python: 'm:A.f' is not at the top of its module; give a"),
        (
            '"m:f"',
            '"__main__:f"',
            "2: model.python: f is in a notebook or script, which workers cannot import; write it "
            "to a file, such as my_job.py, and give my_job:f",
        ),
        (
            '"m:d"',
            '"m:d", num_workers: 2',
            "3: unknown key 'num_workers' in data; did you mean 'wo",
        ),
        ("steps: 1", "lr: 1", "4: unknown key 'lr' in training; it goes into training.optimizer"),
        (
            "steps: 1",
            "steps: 1, schedule: {name: cosin}",
            "4: training.schedule.name must be constant or cosine or linear, not the text "
            "\"cosin\"; did you mean 'cosine'?",
        ),
        (
            "name: adamw",
            'python: "torch.optim.lr_scheduler:CosineAnnealingLR"',
            "4: training.optimizer.python: is a schedule of the rate, not an optimizer; give "
            "training.schedule",
        ),
        (
            "name: adamw",
            "name: adam",
            '4: training.optimizer.name must be adamw or sgd, not the text "adam"; for another '
            "one name its class, as python: torch.optim:Adam, instead of name",
        ),
        (
            "training:",
            "evaluation: {every: 1, python: 'm:e'}\ntraining:",
            "4: unknown key 'python' in evaluation; it goes into evaluation.data",
        ),
    ],
)
def test_a_key_of_a_users_model_or_data_that_is_wrong_is_told_with_the_right_one(
    old: str, new: str, message: str
) -> None:
    assert old in OWN
    assert refusal(OWN.replace(old, new)).startswith(f"job.yaml:{message}")
