"""The main job, for a newcomer to watch: train, lose a node, go on, take it back, and compare.

    python -m bench.demo [--out DIR]

Starts five nodes on this machine, trains a small GPT on the sources of Python's standard library,
kills one node in mid-run, starts it again later, then trains the same job undisturbed and holds
the two against each other. Leaves the job files and a plot in the output directory.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.support.client import Record
    from bench.support.cluster import LocalCluster

NODES = 5
STEPS = 80
KILL_AT, RETURN_AT = 25, 50
#: Relative difference of losses that the order of floating-point sums explains, in fp32.
TOLERANCE = 1e-6
PHASES = ("detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step")


def job(name: str) -> dict[str, object]:
    return {
        "name": name,
        "model": {"layers": 6, "hidden": 96, "heads": 4, "sequence_length": 128},
        "data": {"text": [f"{sysconfig.get_paths()['stdlib']}/*.py"]},
        "training": {
            "steps": STEPS,
            "global_batch": 32,
            "microbatch": 2,
            "optimizer": {"name": "adamw", "lr": 1.0e-3},
            "schedule": {"name": "cosine", "warmup": 10},
        },
        "fault_tolerance": 1,
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",  # both runs begin with the same plan
    }


@dataclass(frozen=True, kw_only=True)
class Disturbed:
    """Results of the disturbed run."""

    metrics: list[Record]
    records: list[Record]
    victim: str
    killed_at: float
    returned_at: float


def say(text: str) -> None:
    print(text, flush=True)


def progress(cluster: LocalCluster, job_id: str, until: int) -> None:
    """Wait for a step, and show the progress."""
    shown = 0
    while True:
        metrics = cluster.metrics(job_id)
        step = int(metrics[-1]["step"]) if metrics else 0
        if step >= until:
            return
        if step >= shown + 10:
            shown = step - step % 10
            last = metrics[-1]
            loss, generation = last["loss"], last["generation"]
            say(f"  step {step:>3}/{STEPS}  loss {loss:.4f}  generation {generation}")
        cluster.wait_step(job_id, min(step + 1, until))


def drawing(pipelines: list[list[Record]]) -> str:
    """Format a line with the layers that each node of each pipeline holds."""
    return "   ".join(
        " > ".join(f"{s['node']}[{s['first_layer']}-{s['last_layer']}]" for s in stages)
        for stages in pipelines
    )


def disturbed_run(cluster: LocalCluster) -> Disturbed:
    job_id = cluster.submit(job("demo"))
    say(f"submitted {job_id}: a GPT, {STEPS} steps on the sources of Python's standard library")
    cluster.wait_step(job_id, 1)
    started = cluster.events(job_id, "started")[0]
    say(f"  pipelines  {drawing(started['pipelines'])}")
    say(f"  any {started['can_lose']} node may be lost without losing a layer")
    progress(cluster, job_id, KILL_AT)
    victim = "n4"
    say(f"  !! kill -9 of node {victim}: its agent and its worker")
    killed_at = time.time()
    cluster.kill_node(victim)
    cluster.wait(lambda: len(cluster.events(job_id, "reconfigured")) == 1, "the recovery")
    say(f"  training goes on without {victim}, in the same processes")
    progress(cluster, job_id, RETURN_AT)
    say(f"  ++ node {victim} is started again")
    returned_at = time.time()
    cluster.start_node(victim)
    progress(cluster, job_id, STEPS)
    end = cluster.wait_end(job_id)
    if end != "succeeded":
        raise SystemExit(f"the demo's job {end}: {cluster.end_of(job_id)}")
    return Disturbed(
        metrics=cluster.metrics(job_id),
        records=cluster.events(job_id, "reconfigured"),
        victim=victim,
        killed_at=killed_at,
        returned_at=returned_at,
    )


def undisturbed_run(cluster: LocalCluster) -> list[Record]:
    job_id = cluster.submit(job("undisturbed"))
    say(f"submitted {job_id}: the same again, and nobody is killed")
    progress(cluster, job_id, STEPS)
    cluster.wait_end(job_id)
    return cluster.metrics(job_id)


def throughput(metrics: list[Record], generation: int) -> float:
    """Return the median tokens per second of a generation, without its first step, a warm-up."""
    steps = [r for r in metrics if r["generation"] == generation][1:]
    return statistics.median(r["tokens"] / r["step_seconds"] for r in steps) if steps else 0.0


def report(run: Disturbed, reference: list[Record], cores: int) -> bool:
    """Print what happened; return whether the losses are equal."""
    say("\n== what happened ==")
    for record in run.records:
        what = ", ".join(
            [f"lost {n}" for n in record["nodes_lost"]]
            + [f"joined {n}" for n in record["nodes_joined"]]
        )
        say(f"generation {record['from_generation']} -> {record['to_generation']}: {what}")
        say(f"  rule      {record['rule']}: {record['reason']}")
        say(f"  before    {drawing(record['pipelines_before'])}")
        say(f"  after     {drawing(record['pipelines_after'])}")
        phases = " + ".join(f"{name} {record['phases'][name] * 1e3:.0f}" for name in PHASES)
        say(f"  phases    {phases} = {record['total_s'] * 1e3:.0f} ms")
        if record["boundary"]:
            say("            (training went on until the new plan was ready: nothing was redone)")
    first = next(r for r in run.metrics if r["generation"] == run.records[0]["to_generation"])
    say(f"\nfrom kill -9 to the next committed step: {first['time'] - run.killed_at:.2f} s")
    before, during, after = (throughput(run.metrics, g) for g in (1, 2, 3))
    say(f"throughput: {before:.0f} tokens/s before, {during:.0f} with 4 nodes, {after:.0f} after")
    say(f"  (5 workers share {cores} cores here, so a lost node frees as much as it takes)")

    steps = [r["step"] for r in run.metrics]
    once = steps == list(range(1, STEPS + 1))
    same_samples = [r["samples_digest"] for r in run.metrics] == [
        r["samples_digest"] for r in reference
    ]
    difference = max(
        abs(a["loss"] - b["loss"]) / abs(b["loss"])
        for a, b in zip(run.metrics, reference, strict=True)
    )
    equal = once and same_samples and difference <= TOLERANCE
    say("\n== against the run without failure ==")
    say(f"each step committed exactly once   {'yes' if once else 'NO'}")
    say(f"same samples in every step         {'yes' if same_samples else 'NO'}")
    say(f"largest relative loss difference   {difference:.1e} (allowed {TOLERANCE:.0e})")
    say(f"final loss {run.metrics[-1]['loss']:.6f} and {reference[-1]['loss']:.6f}")
    say("the same training: " + ("YES" if equal else "NO"))
    return equal


def plot(run: Disturbed, reference: list[Record], path: Path) -> None:
    """Plot loss and throughput over time, with the events."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    start = run.metrics[0]["time"]
    times = [r["time"] - start for r in run.metrics]
    ends = [b - a for a, b in itertools.pairwise(times)]
    rates = [r["tokens"] / gap for r, gap in zip(run.metrics[1:], ends, strict=True)]
    figure, (loss_axes, rate_axes) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True)
    loss_axes.plot(times, [r["loss"] for r in reference], lw=5, color="#c8d8e8", label="no failure")
    loss_axes.plot(
        times, [r["loss"] for r in run.metrics], lw=1.5, color="#1f4e79", label="this run"
    )
    loss_axes.set_ylabel("loss")
    loss_axes.legend(loc="upper right")
    rate_axes.plot(times[1:], rates, drawstyle="steps-pre", color="#1f4e79", lw=1.2)
    rate_axes.set_ylabel("tokens per second")
    rate_axes.set_xlabel("seconds since the first step")
    rate_axes.set_ylim(bottom=0)
    for axes in (loss_axes, rate_axes):
        axes.axvline(run.killed_at - start, color="#b03030", ls="--", lw=1)
        axes.axvline(run.returned_at - start, color="#308040", ls="--", lw=1)
        axes.grid(alpha=0.25)
    top = loss_axes.get_ylim()[1]
    loss_axes.text(run.killed_at - start, top, f" kill -9 {run.victim}", color="#b03030", va="top")
    loss_axes.text(run.returned_at - start, top, f" {run.victim} back", color="#308040", va="top")
    loss_axes.set_title("Losing and regaining a node: the loss curve does not notice")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"))
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    say(f"starting a cluster of {NODES} nodes on this machine")
    try:
        from bench.support.cluster import LocalCluster  # takes a while, in which Ctrl-C ends it too

        with LocalCluster(NODES, state_dir=out / "state") as cluster:
            run = disturbed_run(cluster)
            reference = undisturbed_run(cluster)
        equal = report(run, reference, os.cpu_count() or 1)
        plot(run, reference, out / "demo.png")
    except KeyboardInterrupt:
        say(f"\ninterrupted; the cluster has ended, and its state is in {out / 'state'}")
        sys.exit(130)
    say(f"\nplot: {out / 'demo.png'}   job files: {out / 'state' / 'jobs'}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
