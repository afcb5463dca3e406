"""Each example trains through the death of a node, smaller than it is written."""

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from support.clusters import PATIENT, make_whole
from support.folders import ROOT

pytestmark = pytest.mark.cluster

EXAMPLES = ROOT / "examples"
NODES = {"n1", "n2"}
#: Of each job file: what is made smaller, and what its loss is at most at the end, over that at the
#: start.
_SOON = "training.schedule.warmup=2"
SMALLER = {
    "tagger": (("model.arguments.width=16", "training.steps=40"), 0.97),
    "vision": (
        ("model.arguments.blocks=2", _SOON, "training.optimizer.lr=3e-3", "training.steps=40"),
        0.9,
    ),
    "pretrain": (("model.layers=2", _SOON, "training.steps=20"), 0.9),
    "huggingface": ((_SOON, "training.steps=20"), 0.9),
}
FAULTS: list[dict[str, object]] = [
    {
        "worker": {"node": "n2", "slot": 0},
        "point": "after:Forward",
        "job": name,
        "step": 8,
        "action": "kill_node",
    }
    for name in SMALLER
]
ENDS = 5


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("examples") / "state"
    with LocalCluster(
        len(NODES), state_dir=state_dir, fault_plan=FAULTS, options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


def run_here(program: Path, *arguments: Path) -> None:
    """Run the example in this process, which has torch and transformers loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(program), *map(str, arguments)])
        runpy.run_path(str(program), run_name="__main__")


def made(cluster: LocalCluster, name: str, folder: Path) -> tuple[str, ...]:
    """What the comment at the top of the example has the reader make; where it is now."""
    match name:
        case "vision":
            run_here(EXAMPLES / "vision.py", folder)
            return (f"data.arguments.path={folder}",)
        case "pretrain":
            tokens = folder / "docs.bin"
            cluster.oobleck("data", "prepare", str(ROOT / "docs" / "*.md"), "-o", str(tokens))
            return (f"data.tokens={tokens}",)
        case "huggingface":
            base = folder / "base"
            run_here(EXAMPLES / "huggingface.py", base)
            return f"model.weights={base}", f"checkpoint.path={folder / 'saved'}"
        case _:
            return ()


def test_all_job_files_are_tried() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.yaml")} == set(SMALLER)
    listed = (EXAMPLES / "README.md").read_text()
    shown = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert {name for name in shown if f"({name})" not in listed} == set()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("name", SMALLER)
def test_a_job_file_trains_through_the_loss_of_a_node(
    cluster: LocalCluster, name: str, tmp_path: Path
) -> None:
    smaller, fall = SMALLER[name]
    changes = (*smaller, "profile=estimate")
    changes += made(cluster, name, tmp_path)
    make_whole(cluster, NODES)
    options = [part for change in changes for part in ("--set", change)]
    job = cluster.oobleck("submit", str(EXAMPLES / f"{name}.yaml"), *options).stdout.strip()
    assert cluster.wait_end(job) == "succeeded", cluster.end_of(job)
    told = cluster.events(job, "reconfigured")
    assert [node for event in told for node in event["nodes_lost"]] == ["n2"]
    metrics = cluster.metrics(job)
    steps = int(smaller[-1].partition("=")[2])
    assert [line["step"] for line in metrics] == list(range(1, steps + 1))
    losses = [line["loss"] for line in metrics]
    assert sum(losses[-ENDS:]) < fall * sum(losses[:ENDS])
    if name == "huggingface":
        cluster.oobleck(
            "checkpoint", "export", str(tmp_path / "saved"), "-o", f"{tmp_path}/adapter"
        )
        assert loss_with_adapter(tmp_path) < fall * losses[0]


def loss_with_adapter(folder: Path) -> float:
    """Of some text that was trained on, as a user computes it."""
    import peft  # two seconds of a core, of each process that collects these tests

    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder / "base"), folder / "adapter"
    )
    text = (ROOT / "docs" / "architecture.md").read_bytes()[: 64 * 64]
    ids = torch.tensor(list(text)).view(64, 64)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    preloaded: Preloaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", preloaded.python_path)
    command = [sys.executable, str(EXAMPLES / "notebook.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "generation 2: node lost" in ended.stdout
    told = [line.split() for line in ended.stdout.splitlines() if line.startswith("step")]
    assert [int(words[1]) for words in told] == list(range(20, 161, 20))
    assert float(told[-1][3]) < 0.5 * float(told[0][3])
    assert "succeeded at step 160;" in ended.stdout
