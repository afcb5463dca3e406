"""`oobleck plan`: what the files, the flags and the machine say, and what is shown of it."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from oobleck.cli.jobs.job_file import read_job, read_profile
from oobleck.cli.planning.question import Flags, notes_of_times
from oobleck.core.job.file import parse_job
from oobleck.core.profile import format_profile, parse_profile
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.memory import usable_bytes
from oobleck.planner.report.speed import PUBLISHED
from support.commands import refused, run

JobFile = Callable[..., Path]
MEMORY = 7 << 20


@pytest.fixture
def named(job_file: JobFile) -> Callable[..., str]:
    """Writes a job that names a profile of 2 GPUs per node and gives its path."""

    def write(extra: str = "") -> str:
        job = job_file(extra=f"profile: p.json\n{extra}")
        estimate = estimate_profile(
            parse_job(job.read_text()), gpus_per_node=2, memory_per_worker_bytes=1 << 30
        )
        times = {"forward_s": {1: 0.2, 2: 0.1}, "backward_s": {1: 0.4, 2: 0.2}}
        layers = tuple(replace(layer, **times) for layer in estimate.layers)
        profile = replace(estimate, gpu_memory_bytes=MEMORY, layers=layers)
        job.with_name("p.json").write_text(format_profile(profile))
        return str(job)

    return write


def planned(*arguments: str) -> dict[str, Any]:
    result = run("plan", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_the_profile_that_a_job_names_speaks_for_its_machines(named: Callable[..., str]) -> None:
    asked = ("plan", named(), "--nodes", "2", "--lost", "1")
    report = json.loads(run(*asked, "-o", "json").stdout)
    assert report == yaml.safe_load(run(*asked, "-o", "yaml").stdout)
    wide = run(*asked, "-o", "wide")
    assert (wide.returncode, wide.stdout) == (0, run(*asked).stdout), "a pipe has any width"
    assert report["plan"]["gpu_memory_bytes"] == MEMORY
    stages = report["templates"][0]["stages"]
    assert [(stage["node"], stage["gpus"]) for stage in stages] == [(0, 2)]
    assert "notes" not in report


LLAMA = """
name: l8
model: {preset: llama-3-8b, sequence_length: 8192}
data: {text: [/x]}
training: {steps: 10, global_batch: 1024, microbatch: 8, precision: bf16}
"""


def test_a_job_for_gpus_gets_believable_times(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(LLAMA)
    report = planned(str(job), "--nodes", "16", "--gpu", "h100")
    speed = report["speed"]
    assert 0.35 < speed["mfu"] < 0.5
    assert speed["tokens_per_s"] == pytest.approx(1024 * 8192 / report["plan"]["step_s"])
    assert speed["tokens_per_s_per_worker"] == pytest.approx(speed["tokens_per_s"] / 128)
    assert "notes" not in report
    assert 1.02 < speed["with_compile"]["mfu"] / speed["mfu"] < 1.2
    shown = run("plan", str(job), "--nodes", "16", "--gpu", "H100").stdout
    said = r"[\d,]+ tokens/s, [\d,]+ per GPU; \d+ TFLOP/s per GPU, \d+% of the peak"
    told = "  share of published figures that estimates reach: 0.96 to 0.99 without compile, "
    ways = rf"  with compile: {said}.*\n  with compile and fp8: {said}.*\n"
    assert re.search(rf"^speed: {said}.*\n{ways}{told}", shown, re.M)
    fp8 = planned(
        *(str(job), "--nodes", "16", "--gpu", "h100"),
        *("--set", "training.compile=true", "--set", "training.precision=fp8"),
    )
    # Its own plan may cut the model better than the one for bf16, which the other figure is of.
    assert 0.98 < fp8["speed"]["mfu"] / speed["with_fp8"]["mfu"] < 1.12
    assert {"with_fp8", "with_compile", "without_compile"} & {*fp8["speed"]} == {
        *("with_compile", "without_compile")
    }
    asked = ("plan", str(job), "--nodes", "16", "--gpu", "a100", "--set", "training.precision=fp8")
    assert "fp8 needs products in float8, which a100 lacks" in refused(run(*asked), 2)
    compiled = planned(str(job), "--nodes", "16", "--gpu", "h100", "--set", "training.compile=true")
    assert compiled["speed"]["mfu"] == pytest.approx(speed["with_compile"]["mfu"], rel=0.02)
    assert compiled["speed"]["without_compile"]["mfu"] == pytest.approx(speed["mfu"], rel=0.02)
    job.write_text(
        LLAMA.replace("preset: llama-3-8b", "preset: gpt3-small, config: {attn_pdrop: 0.1}")
    )
    dropping = planned(
        str(job), "--nodes", "16", "--gpu", "h100", "--set", "model.sequence_length=1024"
    )
    assert "with_compile" not in dropping["speed"]


@pytest.mark.parametrize(
    ("nodes", "batch", "published"),
    [
        (1, 16, {"without_compile": 5762, "with_compile": 6667, "with_fp8": 8532}),
        (16, 256, {"without_compile": 5605, "with_compile": 6514, "with_fp8": 8380}),
    ],
)
def test_estimates_reach_of_published_figures_what_is_told(
    tmp_path: Path, nodes: int, batch: int, published: dict[str, int]
) -> None:
    """Of torchtitan: benchmarks/llama3_h100_202412_torchtitan.md."""
    job = tmp_path / "job.yaml"
    job.write_text(LLAMA + f"fault_tolerance: {min(1, nodes - 1)}\n")
    given = (f"training.global_batch={batch}", "training.microbatch=2")
    sets = [part for one in given for part in ("--set", one)]
    speed = planned(str(job), "--nodes", str(nodes), "--gpu", "h100", *sets)["speed"]
    for way, found in {**speed, "without_compile": speed}.items():
        if way not in published:
            continue
        least, most = PUBLISHED[way]
        share = found["tokens_per_s_per_worker"] / published[way]
        assert least <= round(share, 2) <= most


def test_without_gpus_times_are_said_to_be_nominal(job_file: JobFile) -> None:
    report = planned(str(job_file()), "--nodes", "2")
    assert report["notes"][-1].startswith("times are for one nominal CPU core per worker")
    assert "speed" not in report


def test_a_profile_is_sent_without_spaces_as_messages_have_a_limit(
    named: Callable[..., str],
) -> None:
    job = Path(named())
    written = job.with_name("p.json").read_text()
    sent = read_profile(read_job(job, ()))
    assert " " in written
    assert " " not in sent
    assert parse_profile(sent) == parse_profile(written)


def test_a_profile_says_what_its_workers_do(named: Callable[..., str], tmp_path: Path) -> None:
    job = named()
    line = refused(run("plan", job, "--nodes", "2", "--gpu", "h100"), 2)
    assert "--set profile=estimate leaves it out" in line
    profile = str(Path(job).with_name("p.json"))
    line = refused(run("plan", "--profile", profile, "--nodes", "2", "--gpu", "a100"), 2)
    assert "has measured times" in line


def test_a_job_may_have_shadows_where_nodes_are_few(job_file: JobFile) -> None:
    job = str(job_file(extra="resources: {min_nodes_per_pipeline: 2}\n"))
    plan = planned(job, "--nodes", "2")["plan"]
    assert plan["can_lose"] == 1
    assert {shadow["worker"] for shadow in plan["shadows"]} == {"n1/0", "n2/0"}
    assert planned(job, "--nodes", "4")["plan"]["shadows"] == []
    for words in (["--no-shadows"], ["--set", "recovery.shadows=none"]):
        assert "needs 4 nodes: " in refused(run("plan", job, "--nodes", "2", *words), 2)


def test_flags_and_the_job_itself_come_before_the_profile(named: Callable[..., str]) -> None:
    flags = ("--gpus-per-node", "6", "--memory-per-worker", "32MiB")
    job = named()
    report = planned(job, "--nodes", "2", *flags)
    assert report["plan"]["gpu_memory_bytes"] == usable_bytes(32 << 20)
    assert [stage["gpus"] for stage in report["templates"][0]["stages"]] == [2, 2, 2]
    assert "notes" not in report
    many = planned(job, "--nodes", "2", *flags, "--workers-per-node", "10")
    assert many["notes"] == [
        "2 of 10 workers per node stay idle: the model's 4 layers cannot form a pipeline that uses "
        "more than 8"
    ]
    assert (
        many["notes"][0] in run("plan", job, "--nodes", "2", *flags, "--gpus-per-node", "10").stdout
    )
    limited = named("resources: {memory_per_worker: 9MiB}\n")
    assert planned(limited, "--nodes", "2", *flags)["plan"]["gpu_memory_bytes"] == 9 << 20


def test_a_profile_alone_is_planned_as_it_is(named: Callable[..., str]) -> None:
    profile = ("--profile", str(Path(named()).with_name("p.json")), "--global-batch", "4")
    report = planned(*profile, "--nodes", "2")
    assert {stage["gpus"] for stage in report["templates"][0]["stages"]} <= {1, 2}
    assert report["plan"]["gpu_memory_bytes"] == MEMORY
    assert "notes" not in report
    small = planned(*profile, "--nodes", "2", "--memory-per-worker", "4MiB")
    assert small["plan"]["gpu_memory_bytes"] == usable_bytes(4 << 20)


def test_a_layer_may_be_for_two_gpus_alone(named: Callable[..., str]) -> None:
    job = named()
    path = Path(job).with_name("p.json")
    profile = json.loads(path.read_text())
    for name in ("forward_s", "backward_s"):
        del profile["layers"][2][name]["1"]
    path.write_text(json.dumps(profile))
    report = planned(job, "--nodes", "2")
    assert [stage["gpus"] for stage in report["templates"][0]["stages"]] == [2]


def test_idle_nodes_and_losses_in_words(job_file: JobFile) -> None:
    text = run("plan", str(job_file()), "--nodes", "4", "--lost", "2").stdout
    assert "n2 lost: " in text
    assert ", then " in text
    assert "pipelines of 1 nodes" not in text
    flags = ("--nodes", "30", "--lost", "1", "--policy", "templates")
    many = run("plan", str(job_file()), *flags).stdout
    assert "idle: " in many
    assert "idle nodes, " in many


def test_policies_stand_side_by_side(job_file: JobFile) -> None:
    job = str(job_file())
    two = ("--set", "resources.min_nodes_per_pipeline=2", "--set", "model.hidden=256")
    flags = ("--nodes", "6", "--lost", "1", "--policy", "reroute", *two)
    report = json.loads(run("plan", job, *flags, "--json").stdout)
    (loss,) = report["after_losses"]
    assert (loss["policy"], loss["rule"], loss["then"]) == ("reroute", "reroute", "normalise")
    assert list(loss["policies"]) == ["templates", "reroute"]
    templates, reroute = loss["policies"].values()
    assert (
        templates.keys()
        == reroute.keys()
        == {"step_s", "moved_bytes", "stall_s", "can_lose", "plan"}
    )
    assert reroute["moved_bytes"] == 0 < templates["moved_bytes"]
    assert loss["plan"]["step_s"] == reroute["step_s"]
    whole = sum(pipeline["microbatches"] for pipeline in report["plan"]["pipelines"])
    assert sum(route["microbatches"] for route in loss["plan"]["routes"]) == whole
    text = run("plan", job, *flags).stdout
    assert "lost: reroute, then " in text
    assert "s per step, and normalise at a step boundary behind it (" in text
    head, *rows = text[text.index("POLICY ") :].splitlines()
    assert head.split() == ["POLICY", "STEP", "MOVES", "IN", "CAN", "LOSE", "PLAN"]
    assert [row.split()[0] for row in rows[:2]] == ["templates", "reroute"]
    # What follows stands below, with its own step, bytes and losses.
    behind, shadows = loss["follow_ups"]
    assert (behind["policy"], shadows["policy"]) == ("normalise", "shadow")
    assert behind["step_s"] < reroute["step_s"]
    assert behind["can_lose"] < shadows["can_lose"]
    assert rows[2].startswith(f"then normalise  {behind['step_s']:.4g} s ")
    assert rows[2].endswith(f" {behind['can_lose']}  {behind['plan']}")
    # Where one has no answer, the other one's is taken, and the table says why.
    alone = run("plan", job, "--nodes", "2", "--fault-tolerance", "0", *flags[2:]).stdout
    assert "reroute has no answer: " in alone


def test_losses_are_answered_as_the_job_says(job_file: JobFile) -> None:
    def answer(job: Path, *flags: str) -> dict[str, Any]:
        two = ("--set", "resources.min_nodes_per_pipeline=2")
        (loss,) = planned(str(job), "--nodes", "6", "--lost", "1", *two, *flags)["after_losses"]
        return dict(loss)

    def answered(job: Path, *flags: str) -> str:
        return str(answer(job, *flags)["policy"])

    by_auto = answer(job_file())
    steps = {policy: figures["step_s"] for policy, figures in by_auto["policies"].items()}
    assert by_auto["policy"] == min(steps, key=lambda policy: steps[policy]), "nothing else counts"
    assert answered(job_file(), "--policy", "templates") == "templates"
    assert answered(job_file(extra="recovery: {policy: reroute}\n")) == "reroute"
    assert answered(job_file(extra="recovery: {policy: reroute}\n"), "--policy", "uneven") == (
        "templates"
    )


def test_plans_for_slow_workers_stand_side_by_side(job_file: JobFile) -> None:
    job = str(job_file())
    two = ("--set", "resources.min_nodes_per_pipeline=2")
    big = ("--global-batch", "48", "--set", "model.layers=8", "--set", "model.hidden=256")
    flags = ("--nodes", "6", "--slow", "n1=0.5", "--slow", "n4/0=0.25", *two, *big)
    report = json.loads(run("plan", job, *flags, "--json").stdout)
    slow = report["slow"]
    assert slow["rates"] == {"n1/0": 0.5, "n4/0": 0.25}
    assert slow["relative"] == pytest.approx(slow["step_s"] / report["plan"]["step_s"])
    rules = [each["rule"] for each in slow["candidates"]]
    assert rules[-1] == "stand by"
    assert slow["taken"] in rules
    taken = slow["candidates"][rules.index(slow["taken"])]
    assert taken["relative"] < 0.97 * slow["relative"]
    assert taken.keys() == {
        "rule", "step_s", "relative", "moved_bytes", "stall_s", "can_lose", "plan"
    }  # fmt: skip
    text = run("plan", job, *flags).stdout
    assert "n1/0 at 0.5, n4/0 at 0.25 of the profiled speed: a step takes " in text
    assert "RELATIVE" in text


@pytest.mark.parametrize(
    ("slow", "part"),
    [
        ("n3=0.5", "slow names node 'n3'; the nodes are n1 to n2"),
        ("n1/1=0.5", "slow names n1/1; slots are 0 to 0"),
        ("n1=0", "slow has the rate '0'; give the share of the profiled speed"),
        ("n1=nan", "slow has the rate 'nan'"),
        ("n1=1.5", "slow has the rate '1.5'"),
        ("n1", "slow is 'n1'; give NODE=RATE or NODE/SLOT=RATE"),
    ],
)
def test_wrong_rates_are_refused(job_file: JobFile, slow: str, part: str) -> None:
    found = run("plan", str(job_file()), "--nodes", "2", "--fault-tolerance", "0", "--slow", slow)
    assert part in refused(found, 2)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--nodes", "1000000"), "nodes is 1000000; it must be at most 65536"),
        (("--nodes", "2", "--global-batch", "1000000"), "must be an integer from 1 to 131072"),
        (("--nodes", "2", "--memory-per-worker", "0"), "--memory-per-worker 0: give a size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_too_much_or_nothing(job_file: JobFile, flags: tuple[str, ...], part: str) -> None:
    assert part in refused(run("plan", str(job_file()), *flags), 2)


def test_what_is_no_profile_file_is_refused_at_once(job_file: JobFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\x80\xff")
    asked = ("--nodes", "2", "--global-batch", "4")
    for path, problem in (
        ("/dev/zero", "is not a regular file"),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "binary"), "not a text file"),
        (str(tmp_path / "absent"), "No such file or directory"),
        (str(tmp_path / "pipe"), "nothing came through this pipe for 5 s"),
    ):
        line = refused(run("plan", "--profile", path, *asked), 2)
        assert line.startswith(f"oobleck: --profile {path}: {problem}; give a profile file, as ")
        if path.endswith("absent"):
            continue  # tests/cli/planning/test_profile.py
        if path.endswith("pipe"):
            continue  # it is waited for in the same place, for another 5 s
        job = job_file(extra=f"profile: {path}\n")
        line = refused(run("plan", str(job), "--nodes", "2"), 2)
        assert line == (
            f"oobleck: profile: {path}: {problem}; give measure, estimate or the path of a "
            "profile file"
        )


def test_without_a_speed_it_is_said_why() -> None:
    """Of a model of one's own for a GPU, and of no GPU; a measured profile speaks for itself."""
    flags = Flags(**dict.fromkeys(field.name for field in fields(Flags)))
    (own,) = notes_of_times(replace(flags, gpu="h100"), None, measured=False)
    assert own.startswith("tokens/s and MFU are omitted")
    (nominal,) = notes_of_times(flags, None, measured=False)
    assert nominal.startswith("times are for one nominal CPU core")
    assert notes_of_times(flags, None, measured=True) == ()
