"""`oobleck simulate`: a trace and its flags go in, a table or JSON comes out."""

import json
from pathlib import Path
from typing import get_args

import pytest

from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.profile import format_profile
from support.commands import refused, run
from support.profiles import profile_of

HEAD = "time_s,event,node,value\n"
SIX = "".join(f"0,add,n{number}\n" for number in range(1, 7))


@pytest.fixture
def asked(tmp_path: Path) -> tuple[str, ...]:
    """A command with a profile of which two nodes hold the model, and T.csv in the same folder."""
    profile = profile_of([0.5] * 6, state=1000, activation=1, memory=3500)
    (tmp_path / "P.json").write_text(format_profile(profile))
    write(tmp_path, f"{SIX}100,remove,n3\n200,remove,n5\n260,add,n7\n400,remove,n1\n")
    return (
        *("simulate", "--trace", str(tmp_path / "T.csv")),
        *("--profile", str(tmp_path / "P.json"), "--nodes", "6", "--global-batch", "12"),
    )


def write(folder: Path, rows: str) -> None:
    (folder / "T.csv").write_text(HEAD + rows)


def test_policies_stand_side_by_side_with_the_bounds(asked: tuple[str, ...]) -> None:
    result = run(*asked, "--policy", "all", "--until", "10m", "--price", "2", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found["policies"]) == set(get_args(RecoveryPolicy))
    waits = found["policies"]["wait"]
    assert (waits["failed_at"], waits["seconds"]["waiting"]) == (100, 500)
    assert waits["reason"].startswith("policy wait: 6 nodes are to train, as before, and 4 can")
    bounds = found["bounds"]
    assert bounds["full_samples_per_s"] > bounds["free_changes_samples_per_s"]
    for each in found["policies"].values():
        assert sum(each["seconds"].values()) == each["wall_s"] == 600
        assert each["seconds"]["useful"] + sum(each["badput"].values()) == 600
        assert each["samples_per_s"] == pytest.approx(each["samples"] / 600)
        # In its wait a layer's last holder goes, an hour before the first checkpoint.
        assert (each["samples"] > 0) == (each is not waits)
        assert each["samples_per_s"] <= 1.01 * bounds["free_changes_samples_per_s"]
        assert each["events"] == 4
        assert each is waits or each["failed_at"] is None
        # 5.67 live nodes on average, for ten minutes at 2 an hour.
        assert each["cost"] == pytest.approx(
            2 * (6 * 100 + 5 * 100 + 4 * 60 + 5 * 140 + 800) / 3600
        )
    auto = found["policies"]["auto"]
    assert auto["cost_per_million_samples"] == pytest.approx(auto["cost"] / auto["samples"] * 1e6)
    assert waits["cost_per_million_samples"] is None
    assert found["policies"]["templates"]["counts"]["templates"]["first"] == 1
    assert found["costs"]["salvage"] == 0.55
    table = run(*asked, "--policy", "all", "--until", "10m").stdout
    first, *rows = table.splitlines()
    assert first.split()[:3] == ["POLICY", "SAMPLES/S", "OF"]
    assert [row.split()[0] for row in rows[:4]] == ["auto", "templates", "reroute", "normalise"]
    assert "bounds: " in table
    assert "templates (first) 1" in table


def test_it_is_the_same_in_every_process(asked: tuple[str, ...]) -> None:
    outputs = {
        run(
            *asked, "--policy", "auto,reroute", "--json", environment={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs != {""}


def test_a_made_trace_can_be_replayed(asked: tuple[str, ...], tmp_path: Path) -> None:
    spec = "mtbf=1h,repair=3m,nodes=6,days=0.1,seed=3"
    made = run("simulate", "--make", spec)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == run("simulate", "--make", spec).stdout
    (tmp_path / "T.csv").write_text(made.stdout)
    found = json.loads(run(*asked, "--json").stdout)["policies"]["auto"]
    assert found["events"] > 10


def test_costs_change_the_account(asked: tuple[str, ...], tmp_path: Path) -> None:
    costs = tmp_path / "C.json"
    costs.write_text('{"detect_s": 10, "salvage": 1}')
    found = json.loads(run(*asked, "--costs", str(costs), "--json").stdout)
    auto = found["policies"]["auto"]
    # The last loss is at the end of the trace.
    assert auto["badput"]["detect"] == 20
    assert auto["seconds"]["redone"] == 0
    assert found["costs"]["detect_s"] == 10
    costs.write_text('{\n  "detect_m": 1\n}')
    told = refused(run(*asked, "--costs", str(costs)), 2)
    assert f"--costs {costs}: line 2: unknown cost 'detect_m'; did you mean detect_s?" in told


def test_a_policy_that_cannot_go_on_is_told_with_the_table(
    asked: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path, SIX + "".join(f"60,remove,n{number}\n" for number in range(2, 7)))
    result = run(*asked, "--until", "2m")
    assert result.returncode == 0
    assert "auto cannot go on from 60 s; at the end: needs at least 2 nodes" in result.stdout
    found = json.loads(run(*asked, "--until", "2m", "--json").stdout)["policies"]["auto"]
    assert (found["failed_at"], found["seconds"]["waiting"]) == (60, 60)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0,add,n1\n1,remove,n2", "line 3: remove of n2, which is not there"),
        ("0,add,n1\n5,add,n2\n1,add,n3", "line 4: goes back in time"),
        ("0,add,n1\n5,reboot,n1", "line 3: unknown event 'reboot'"),
        ("0,add,n1\n5,slow,n1,2", "line 3: the rate is '2'"),
        ("0,add,n1\n5,add,n2", "line 3: there are never more than 2 nodes: needs 4 nodes"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(
    asked: tuple[str, ...], tmp_path: Path, rows: str, told: str
) -> None:
    write(tmp_path, rows)
    assert f"--trace {tmp_path / 'T.csv'}: {told}" in refused(run(*asked), 2)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--policy", "best"], "--policy 'best': no such policy; give all, or some of auto"),
        (["--policy", "auto,stay", "--fault-tolerance", "0"], "--policy stay: it needs other"),
        (["--nodes", "3"], "needs 4 nodes"),
        (["--global-batch", "1"], "global_batch"),
        (["--make", "mtbf=1d"], "--make nodes: missing"),
        (["--microbatch", "3"], "--microbatch 3: "),
        (["--spares", "6"], "--spares 6: give fewer than --nodes 6"),
        (["--policy", "all", "--search"], "--search searches under one policy"),
        (["--until", "99999999999d"], "--until: 8.64e+15 s is too late; give at most 3.2e+09 s"),
    ],
)
def test_wrong_usage_is_refused(asked: tuple[str, ...], more: list[str], told: str) -> None:
    assert told in refused(run(*asked, *more), 2)


def test_without_fault_tolerance_all_policies_are_those_that_a_job_may_have(
    asked: tuple[str, ...],
) -> None:
    every = ("--policy", "all", "--fault-tolerance", "0", "--until", "1m")
    found = json.loads(run(*asked, *every, "--json").stdout)
    assert list(found["policies"]) == ["auto", "templates", "uneven", "morph", "wait"]
    note = "may have normalise, reroute, shadow, stay: they are left out"
    assert found["notes"][-1].endswith(note)
    assert note in " ".join(run(*asked, *every).stdout.split())


def test_search_tells_the_best_settings_and_how_much_worse_others_are(
    asked: tuple[str, ...],
) -> None:
    found = json.loads(run(*asked, "--until", "10m", "--search", "--price", "2", "--json").stdout)
    searched = found["search"]
    assert searched["objective"] == "cost_per_million_samples"
    best = searched["best"]
    given = found["policies"]["auto"]
    assert best["cost_per_million_samples"] <= given["cost_per_million_samples"]
    assert all(one.get("worse_by", 0) >= 0 for one in searched["neighbours"])
    table = run(*asked, "--until", "10m", "--search").stdout
    assert "best: fault tolerance " in table
    assert "neighbour: " in table
    routed = run(*asked, "--until", "1m", "--search", "--policy", "reroute", "--json").stdout
    tried = json.loads(routed)["search"]["neighbours"]
    (bare,) = [one for one in tried if one["fault_tolerance"] == 0]
    assert bare["refused"].startswith("--policy reroute: it needs other nodes")


def test_a_row_may_name_a_rack(asked: tuple[str, ...], tmp_path: Path) -> None:
    racks = tmp_path / "racks.csv"
    racks.write_text("node,rack\nn1,left\nn2,left\n")
    write(tmp_path, f"{SIX}60,remove,left\n")
    result = run(*asked, "--until", "2m", "--racks", str(racks), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["policies"]["auto"]["events"] == 1
    racks.write_text("n1,left\n")
    told = refused(run(*asked, "--racks", str(racks)), 2)
    assert f"--racks {racks}: line 1: no header; it must be node,rack" in told


def test_spares_cost_their_price_and_samples(asked: tuple[str, ...]) -> None:
    def figures(*more: str) -> tuple[float, float]:
        result = run(*asked, "--until", "10m", "--price", "2", "--json", *more)
        auto = json.loads(result.stdout)["policies"]["auto"]
        return auto["cost"], auto["samples"]

    (cost, samples), (same_cost, fewer) = figures(), figures("--spares", "1")
    assert cost == same_cost
    assert fewer < samples


def test_a_plot_has_a_png_of_all_policies(asked: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    assert run(*asked, "--policy", "all", "--until", "5m", "--plot", str(path)).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    nowhere = tmp_path / "no" / "out.png"
    assert "its folder does not exist" in refused(run(*asked, "--plot", str(nowhere)), 2)
