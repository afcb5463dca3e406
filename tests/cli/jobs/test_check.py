"""`oobleck check`, and what a submit says of a model of the user's; no master is asked."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from oobleck.cli.jobs import own_code
from oobleck.cli.jobs.job_file import read_job
from oobleck.core.job.file import parse_job
from support.commands import run
from support.folders import ROOT
from support.wheels import wheel_of

pytestmark = pytest.mark.usefixtures("quick_start")

SUPPORT = ROOT / "tests" / "support"
JOB = """\
name: demo
model: {{python: "bad_models:{model}", path: {support}}}
data: {{python: "bad_models:{data}", path: {support}}}
training: {{steps: 1, global_batch: 4}}
"""


def written(folder: Path, model: str, data: str = "Points") -> str:
    path = folder / "job.yaml"
    path.write_text(JOB.format(model=model, data=data, support=SUPPORT))
    return str(path)


def test_a_good_model_is_shown_by_its_layers() -> None:
    done = run("check", str(ROOT / "examples" / "tagger.yaml"), "--set", "model.arguments.blocks=3")
    assert (done.returncode, done.stderr) == (0, "")
    heads, first, blocks, last, ok = done.stdout.splitlines()
    assert heads.split("  ")[0] == "LAYERS"
    assert first.split() == ["0", "Embedding", "2,048", "128", "B", "float32[16,", "32]"]
    assert blocks.split()[:3] == ["1-3", "Block", "8,352"]
    assert last.split()[:2] == ["4", "Linear"]
    assert ok == "ok"


def test_each_problem_is_a_line(tmp_path: Path) -> None:
    done = run("check", written(tmp_path, "counted", "Jittered"))
    assert done.returncode == 2
    data, model = done.stderr.splitlines()
    assert data.startswith("oobleck: data: sample 0 differs when it is read again")
    assert model.startswith("oobleck: layer 1 (Counted): changes its calls in forward")
    assert "ok" not in done.stdout.splitlines()


def test_the_data_of_an_evaluation_are_looked_at(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "plain"))
    data = f'{{python: "bad_models:Jittered", path: {SUPPORT}}}'
    path.write_text(f"{path.read_text()}evaluation: {{every: 1, data: {data}}}\n")
    done = run("check", str(path))
    assert done.returncode == 2
    told = "oobleck: evaluation.data: sample 0 differs when it is read again"
    assert done.stderr.startswith(told)


def test_as_json(tmp_path: Path) -> None:
    done = run("check", written(tmp_path, "unknown_metric"), "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["ok"]) == (0, "", True)
    assert [layer["class"] for layer in found["layers"]] == ["Linear", "Linear"]
    (problem,) = found["problems"]
    assert (problem["where"], problem["warning"]) == ("metrics", True)


def test_as_yaml(tmp_path: Path) -> None:
    done = run("check", written(tmp_path, "batch_norm"), "-o", "yaml")
    found = yaml.safe_load(done.stdout)
    assert (done.returncode, done.stderr, found["ok"]) == (2, "", False)
    assert [problem["where"] for problem in found["problems"]] == ["layer 1 (BatchNorm1d)"]


def test_a_submit_looks_too_and_asks_no_master_before(tmp_path: Path) -> None:
    done = run("submit", written(tmp_path, "batch_norm"), "--master", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("oobleck: layer 1 (BatchNorm1d): row 0 of its output changes with the ")


def test_somebody_at_a_terminal_is_told_what_takes_so_long(tmp_path: Path) -> None:
    """The module waits until that was said."""
    said = tmp_path / "said"
    os.mkfifo(said)
    source = (SUPPORT / "bad_models.py").read_text()
    (tmp_path / "slow_models.py").write_text(f"{source}\nopen({str(said)!r}).close()\n")
    path = Path(written(tmp_path, "plain"))
    text = path.read_text().replace("bad_models", "slow_models")
    path.write_text(text.replace(str(SUPPORT), str(tmp_path)))
    main, other = pty.openpty()
    command = [sys.executable, "-m", "oobleck.cli.main", "check", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, text=True)
    os.close(other)
    shown = ""
    while "\n" not in shown:
        shown += os.read(main, 1 << 16).decode()
    said.open("w").close()
    ended, _ = process.communicate()
    os.close(main)
    assert shown.startswith("oobleck: checking the code of the job")
    assert ended.endswith("ok\n"), shown


def test_code_that_ends_its_process_is_named(tmp_path: Path) -> None:
    done = run("check", written(tmp_path, "quits"))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("oobleck: model: bad_models:quits failed: SystemExit: I leave (bad_mod")


def test_of_a_built_in_model_files_are_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: demo\nmodel: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}\n"
        'data: {text: ["*.txt"]}\ntraining: {steps: 1, global_batch: 4}\n'
    )
    done = run("check", str(path))
    assert done.returncode == 2
    assert "data.text: no file matches" in done.stderr
    (tmp_path / "a.txt").write_text("some text")
    done = run("check", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_of_a_large_model_a_submit_says_how_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "counted")
    monkeypatch.setattr(own_code, "_MODULE", "small_limit")
    (tmp_path / "small_limit.py").write_text(
        "import sys\nfrom oobleck.worker import describe\ndescribe._LARGE = 10\n"
        "sys.exit(describe.main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert read_job(Path(path), ()).model.layer_count == 3
    assert capsys.readouterr().err.startswith("oobleck: note: the model is large and was not run")


def test_a_model_may_come_in_a_wheel(tmp_path: Path) -> None:
    """It is looked at from there alone, and what it imports of its own."""
    files = {"brought/__init__.py": "", "brought/layers.py": "from torch import nn\n"}
    source = (ROOT / "examples" / "tagger.py").read_text()
    before, after = (
        "from torch import Tensor, nn",
        "from torch import Tensor\n\nfrom .layers import nn",
    )
    files["brought/models.py"] = source.replace(before, after)
    assert files["brought/models.py"] != source
    (tmp_path / "dist").mkdir()
    wheel = tmp_path / "dist" / "brought-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel_of(files))
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: demo\nmodel: {python: 'brought.models:tagger', arguments: {blocks: 2}}\n"
        "data: {python: 'brought.models:Sentences'}\ntraining: {steps: 1, global_batch: 4}\n"
        f"code: dist/{wheel.name}\n"
    )
    done = run("check", str(job))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "ok"
    done = run("check", str(job), "--set", "code=dist/other.whl")
    assert done.returncode == 2
    assert f"code: {tmp_path}/dist/other.whl: No such file" in done.stderr
    wheel.write_bytes(wheel_of({**files, "brought/fast.so": "x"}))
    done = run("submit", str(job), "--master", "127.0.0.1:1")
    (line,) = done.stderr.splitlines()
    assert (done.returncode, f"code: {wheel}: brought/fast.so in it is not Python" in line) == (
        2,
        True,
    )


def test_a_pattern_that_spares_no_parameter_is_refused_for_models_by_their_kind_too(
    tmp_path: Path,
) -> None:
    (tmp_path / "data.txt").write_text("x" * 100)
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: demo\nmodel: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}\n"
        "data: {text: data.txt}\ntraining: {steps: 1, global_batch: 4}\n"
    )
    key = "training.optimizer.no_decay"
    good = run("check", str(path), "--set", f"{key}=['*.bias']")
    assert (good.returncode, good.stderr) == (0, "")
    bad = run("check", str(path), "--set", f"{key}=['*.bias', '*.scale']")
    assert bad.returncode == 2
    assert bad.stderr.startswith(f"oobleck: {key}: no parameter's name matches *.scale; names")


@pytest.mark.parametrize(
    ("where", "how", "told"),
    [
        (
            "layer",
            "os._exit",
            "model: layer 1 (Layer): the user's code ended the process with status 0",
        ),
        (
            "sample",
            "exit",
            "data: sample 0: the user's code ended the process with status 9 (its last line: no "
            "thread is left)",
        ),
        ("loss", "KeyboardInterrupt", r"KeyboardInterrupt (ending_models.py:"),
        ("optimizer", "GeneratorExit", r"GeneratorExit (ending_models.py:"),
    ],
)
def test_code_that_ends_the_process_is_told_in_a_line(
    tmp_path: Path, where: str, how: str, told: str
) -> None:
    named = f"path: {SUPPORT}, arguments: {{where: {where}, how: {how}}}"
    path = tmp_path / "job.yaml"
    path.write_text(
        f'name: demo\nmodel: {{python: "ending_models:model", {named}}}\n'
        f'data: {{python: "ending_models:Points", {named}}}\n'
        "training: {steps: 1, global_batch: 4, optimizer: "
        f'{{python: "ending_models:Optimizer", lr: 0.1, {named}}}}}\n'
    )
    done = run("check", str(path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert told in line


def test_sizes_of_a_built_in_model_that_stay_in_bfloat16_are_said() -> None:
    config = "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 8"
    model = "model: {{kind: llama, sequence_length: 8, config: {{{}}}}}"
    rest = "data: {text: [a.txt]}\ntraining: {steps: 2, global_batch: 4, microbatch: 1, precision: "
    keys = "num_key_value_heads: 1, intermediate_size: 100"
    for more, precision, said in (
        (keys, "fp8", {"num_key_value_heads": 8, "intermediate_size": 100}),
        ("intermediate_size: 96", "fp8", {}),
        (keys, "bf16", {}),
    ):
        text = f"name: one\n{model.format(f'{config}, {more}')}\n{rest}{precision}}}\n"
        assert [str(problem) for problem in own_code.look_at(parse_job(text)).problems] == [
            f"model.config.{key}: gives weights of size {size}, which multiply in bfloat16: fp8 "
            "takes weights whose sizes are multiples of 16"
            for key, size in said.items()
        ]
