"""What operators are told, where it is more than a copy of the state."""

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from oobleck.core.ids import JobId, NodeName
from oobleck.core.job.spec import CheckpointSpec, DataPlane, TransportName
from oobleck.host.detection import Detection
from oobleck.master.api.view import job_status, node_info
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import JobSubmitted
from oobleck.master.rules.first_plan import shortfall
from oobleck.planner.cost.estimate import worker_peak_bytes
from oobleck.planner.profile.estimate import estimate_profile, flops_per_token
from support.jobs import job_spec
from support.scenario import UNIX, Player

START = (
    "0.0 register n1 n2 n3 n4\n0.0 submit demo\n0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n"
)
CONFIG = MasterConfig(listen="127.0.0.1:0", state_dir=Path("/nowhere"), timing=Detection())


def test_a_job_that_does_not_move_has_no_speed() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n1.1 steps 2 2 1\n")
    job = player.state.jobs[JobId("demo-1")]
    status = job_status(player.state, job, CONFIG, 3.0)
    assert status.tokens_per_s == pytest.approx(2560)
    assert status.eta_s == pytest.approx(9.8)
    assert status.last_step_age_s == pytest.approx(1.9)
    status = job_status(player.state, job, CONFIG, 3.2)
    assert (status.tokens_per_s, status.eta_s) == (0.0, 0.0)
    assert status.last_step_age_s == pytest.approx(2.1)


def test_why_a_ready_node_is_idle_is_told_until_it_is_used() -> None:
    player = Player()
    player.play(
        START.replace("submit demo", "submit demo templates=1 min_nodes=1 hidden=512 batch=8")
        + "1.0 steps 1 5 1\n"
        "2.0 register n5\n2.5 ready n5\n2.6 assigned n5\n"
    )

    def told() -> str:
        node = player.state.nodes[NodeName("n5")]
        return node_info(player.state, node, player.now, UNIX).reason

    assert told() == "ready to join the job"
    player.play("8.0 assigned n5\n")
    assert told().startswith("kept idle: a step would take ")
    player.play("9.0 close n2\n9.1 peer_lost n1/0 1\n")
    assert told() == ""


def test_the_time_left_does_not_hang_on_how_many_tokens_one_step_learns() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n1.1 steps 2 2 1\n1.2 steps 3 3 1\n")
    job = player.state.jobs[JobId("demo-1")]
    recent = job.seen.steps.recent
    recent[-1] = replace(recent[-1], tokens=0)
    assert job_status(player.state, job, CONFIG, 1.3).eta_s == pytest.approx(9.7)


def test_what_part_of_its_gpus_a_job_reaches_is_told_where_it_is_known() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n1.1 steps 2 2 1\n")
    job = player.state.jobs[JobId("demo-1")]

    def told(*kinds: str, now: float = 1.2) -> float | None:
        for number, kind in enumerate(kinds, 1):
            node = player.state.nodes[NodeName(f"n{number}")]
            node.facts = replace(node.facts, device_kind=kind)
        status = job_status(player.state, job, CONFIG, now)
        return status.mfu if status.HasField("mfu") else None

    h100, a100 = "cuda NVIDIA H100 80GB HBM3", "cuda NVIDIA A100-SXM4-80GB"
    assert told() is None, "a CPU's peak is not known"
    flops_per_s = 2560 * flops_per_token(job.spec)
    fp32 = {h100: 67e12, a100: 19.5e12}
    assert told(h100, h100, h100, h100) == pytest.approx(flops_per_s / (4 * fp32[h100]))
    mixed = told(h100, h100, a100, a100)
    assert mixed == pytest.approx(flops_per_s / (2 * fp32[h100] + 2 * fp32[a100]))
    assert told(h100, h100, h100, "cuda NVIDIA L40S") is None
    assert told(h100, h100, h100, h100, now=9.0) is None, "it does not move"


def test_a_step_that_took_no_time_has_no_speed() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1 0\n")
    job = player.state.jobs[JobId("demo-1")]
    assert job_status(player.state, job, CONFIG, 1.0).tokens_per_s == 0.0


def test_a_step_that_a_master_before_recorded_is_as_old_as_the_calendar_says() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 2 1\n601.0 restart\n602.0 look\n")
    job = player.state.jobs[JobId("demo-1")]
    status = job_status(player.state, job, CONFIG, 603.0)
    assert (status.last_step_age_s, status.tokens_per_s) == (pytest.approx(602.0), 0.0)


def test_what_the_cluster_lacks_for_a_job_is_told_until_it_starts() -> None:
    player = Player()
    player.play("0.0 register n1 n2\n0.0 submit demo shadows=0\n")
    (large,) = player.state.jobs.values()
    assert shortfall(player.state, large) == (
        "needs 4 nodes: fault_tolerance 1 and pipelines of at least 2 nodes; 2 are live; add 2 "
        "nodes or lower fault_tolerance to 0; the job waits until then"
    )
    player.play("0.2 register n3 n4\n")
    assert shortfall(player.state, large) == ""
    player.play("0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n1.0 close n3\n9.0 look\n")
    assert shortfall(player.state, large) == "", "a started one says itself what it waits for"


def test_nodes_that_are_drained_are_told_instead_of_agents_to_start() -> None:
    player = Player()
    player.play("0.0 register n1 n2\n0.1 drain n1\n0.1 drain n2\n0.2 submit demo\n")
    (job,) = player.state.jobs.values()
    drained = "no node is ready; drained: n1, n2 ('oobleck node undrain NODE' takes one back)"
    assert (job.state, job.reason) == ("waiting for nodes", drained)
    assert shortfall(player.state, job) == f"{drained}; the job waits until then"


def test_a_model_too_large_for_all_nodes_is_told_with_its_submission() -> None:
    too_large = "the model does not fit on any number of nodes: a worker needs at least "
    player = Player()
    player.play("0.0 register n1 n2\n0.0 submit demo memory=1000\n0.1 submit other memory=1000\n")
    for job in player.state.jobs.values():
        assert job.state == "failed"
        assert shortfall(player.state, job).startswith(too_large)

    empty = Player()
    spec = job_spec("demo")
    profile = estimate_profile(spec, gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    for found in (profile, dataclasses.replace(profile, gpu_memory_bytes=1000)):
        job_id = JobId(f"demo-{found.gpu_memory_bytes}")
        empty._journal(JobSubmitted(job_id=job_id, request_id=job_id, spec=spec, profile=found))
    fits, not_ever = (shortfall(empty.state, job) for job in empty.state.jobs.values())
    assert fits.startswith("no node is ready; start oobleck-agent")
    assert not_ever.startswith(f"by its profile {too_large}")
    assert "; no node is ready; " in not_ever


def test_steps_that_are_done_again_are_told_until_the_last_of_them() -> None:
    player = Player()
    player.play(
        "0.0 register n1\n0.0 submit demo f=0 min_nodes=1 checkpoint=1\n0.5 ready n1\n"
        "0.7 enter 1 n1\n1.0 steps 1 50 1\n2.0 exit n1/0\n2.5 saved 40\n3.0 replace n1/0\n"
        "3.1 restored 40 2 n1\n"
    )
    job = player.state.jobs[JobId("demo-1")]

    def told(now: float) -> tuple[int, int, int] | None:
        status = job_status(player.state, job, CONFIG, now)
        redo = status.redo
        found = (redo.first_step, redo.last_step, redo.committed_step)
        return found if status.HasField("redo") else None

    assert told(3.1) == (41, 50, 40)
    assert job_status(player.state, job, CONFIG, 3.1).checkpoint_at == UNIX + 2.5
    player.play("4.0 progress 44 2 n1\n")
    assert told(4.0) == (41, 50, 44)
    player.play("5.0 progress 50 2 n1\n")
    assert told(5.0) is None


def test_when_a_node_was_heard_outlives_the_master() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n2.0 silent n4\n8.0 look\n9.0 restart\n")

    def heard(name: str) -> tuple[float, bool]:
        info = node_info(player.state, player.state.nodes[NodeName(name)], 9.5, UNIX + 9.5)
        return info.last_heard_s, info.heard_before

    assert heard("n4") == (pytest.approx(7.5), False)
    assert heard("n1") == (pytest.approx(0.5), True)
    player.play("9.2 reconnect n1\n")
    assert heard("n1") == (pytest.approx(0.3), False)


def test_failures_of_a_node_are_told_for_ten_minutes() -> None:
    player = Player()
    player.play(START + "1.0 close n4\n9.0 look\n")
    for now, failures in ((9.0, 1), (590.0, 1), (640.0, 0)):
        player.play(f"{now} look\n")
        node = player.state.nodes[NodeName("n4")]
        assert node_info(player.state, node, now, UNIX + now).failures == failures


def test_the_secret_of_a_place_is_told_to_nobody() -> None:
    player = Player()
    player.play(START)
    job = player.state.jobs[JobId("demo-1")]
    spec = CheckpointSpec(path="s3://KEY:hunter2@store/saved")
    job.spec = dataclasses.replace(job.spec, checkpoint=spec)
    status = job_status(player.state, job, CONFIG, 1.0)
    assert status.checkpoint_path == "s3://***@store/saved"


@pytest.mark.parametrize(
    ("happened", "told"),
    [
        ("2.0 silent n3 n4\n", "nodes n3, n4 were lost; n3: not heard of for 5.0 s"),
        ("2.0 silent n4\n2.1 exit n1/0\n", "node n4 (rank 2) was lost: not heard of for 5.0 s"),
        ("2.0 silent n4\n2.1 exit n1/0\n", "; also lost: worker n1/0"),
        (
            "2.0 silent n1 n2 n3 n4\n",
            "n1, n2, n3, n4 fell silent together: the head is cut off from them, or they are lost",
        ),
    ],
)
def test_status_names_all_that_failed_at_once(happened: str, told: str) -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n" + happened + "13.0 look\n")
    job = player.state.jobs[JobId("demo-1")]
    assert told in job_status(player.state, job, CONFIG, 13.0).last_incident


def test_status_names_slow_workers_as_an_incident_and_a_failure_in_it_as_a_newer_one() -> None:
    player = Player()

    def told(happened: str) -> tuple[int, str, float]:
        player.play(happened)
        job = player.state.jobs[JobId("demo-1")]
        status = job_status(player.state, job, CONFIG, player.now)
        named = [f"{worker.node}/{worker.slot}" for worker in status.slow_workers]
        assert named == (["n2/0"] if status.last_incident == slow else [])
        return status.incidents, status.last_incident, status.last_incident_at

    slow = "slow worker n2/0 (rank 1): 0.50 of the others' pace"
    player.play(START.replace("demo", "demo templates=1 hidden=1024") + "1.0 steps 1 1 1\n")
    assert told("1.0 compute 5 2 n2/0=2\n") == (1, slow, 0.0)
    assert told("7.0 exit n1/0\n") == (
        2,
        "worker n1/0 (rank 0, pid 2009) was killed by SIGKILL",
        0.0,
    )
    number, failure, at = told("7.3 replace n1/0\n7.4 enter 2 n1 n2 n3 n4\n7.5 steps 2 2 2\n")
    assert (number, at) == (2, UNIX + 7.5)
    assert failure.endswith("recovered in 0.500 s, step 2 done again")
    assert told("8.0 compute 12 2\n") == (2, failure, at), (
        "the end of the older one is in the events"
    )
    again = "; no plan answered it, well again after 15.0 s"
    number, last, at = told("20.0 compute 5 2 n2/0=2\n25.0 compute 11 2\n")
    assert (number, last, at > UNIX + 30) == (3, slow + again, True)


def test_a_job_that_waits_says_what_becomes_of_its_turn() -> None:
    lose = "1.0 steps 1 5 1\n{}1.6 submit next f=0 min_nodes=1\n2.0 close n2 n3 n4\n10.0 look\n"
    saved, unsaved = Player(), Player()
    saved.play(START.replace("demo", "demo checkpoint=1") + lose.format("1.5 saved 3\n"))
    unsaved.play(START + lose.format(""))

    def reason(player: Player, name: str) -> str:
        return job_status(player.state, player.state.jobs[JobId(name)], CONFIG, 107.0).reason

    assert reason(saved, "demo-1").endswith(
        "; gives way to next-2 in 500 s, and goes on from its checkpoint after it"
    )
    assert reason(unsaved, "demo-1").endswith(
        "; keeps its turn before next-2, since its state is nowhere else: 'oobleck cancel demo-1' "
        "gives it up"
    )
    saved.play("700.0 look\n")
    assert reason(saved, "demo-1").endswith("next-2 has its turn meanwhile")


def test_a_drain_is_told_of_a_node_that_is_lost() -> None:
    player = Player()
    player.play(START + "1.0 close n4\n7.0 drain n4\n")
    info = node_info(player.state, player.state.nodes[NodeName("n4")], 8.0, UNIX + 8.0)
    assert (info.state, info.job_id, info.generation) == ("lost", "", 0)
    assert info.reason.endswith("; drained, also when it is back")


def test_a_job_tells_that_the_journal_lost_its_end_in_its_life() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n")
    job = player.state.jobs[JobId("demo-1")]
    assert job_status(player.state, job, CONFIG, 1.0).journal_cut_at == 0.0
    player.play("2.0 tear FirstStepCommitted\n")
    job = player.state.jobs[JobId("demo-1")]
    assert job_status(player.state, job, CONFIG, 2.0).journal_cut_at == UNIX + 2.0


def test_workers_have_their_peak_beside_what_the_plan_counts_on() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 1 1\n")
    job, node = player.state.jobs[JobId("demo-1")], player.state.nodes[NodeName("n2")]
    status = node.seen.status
    (worker,) = status.workers
    told = replace(worker, generation=1, peak_memory_bytes=1000, base_memory_bytes=300)
    node.seen.status = replace(status, workers=(told,))
    memory = {
        found.worker.node: found for found in job_status(player.state, job, CONFIG, 2.0).memory
    }
    assert {name: found.peak_bytes for name, found in memory.items()} == {
        "n1": 0,
        "n2": 700,
        "n3": 0,
        "n4": 0,
    }
    assert job.current.made is not None
    profile = estimate_profile(job.spec, gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    expected = worker_peak_bytes(job.current.made.plan, profile)
    assert {found.worker.node: found.predicted_bytes for found in memory.values()} == {
        worker.node: peak for worker, peak in expected.items()
    }
    # What is told of another generation is not of this plan.
    node.seen.status = replace(status, workers=(replace(told, generation=7),))
    assert not any(found.peak_bytes for found in job_status(player.state, job, CONFIG, 2.0).memory)


def test_a_node_that_is_left_out_is_told_how_to_come_back() -> None:
    player = Player()
    player.play(
        START
        + '1.0 steps 1 1 1\n2.0 register n5\n2.1 ready n5\n2.2 fail n5/0 user "no such device"\n'
    )
    info = node_info(player.state, player.state.nodes[NodeName("n5")], 3.0, UNIX + 3.0)
    assert (info.state, info.reason) == (
        "live",
        "cannot join the job: no such device; put that right, then 'oobleck node undrain' it or "
        "start its agent anew",
    )


def test_a_node_with_a_sick_gpu_is_told_with_the_fix_and_what_else_is_wrong() -> None:
    sick, concern = "GPU 0: GPU is lost; restart the host", "GPU 1: Xid 94; reset it"
    player = Player()
    player.play(START + f'1.0 steps 1 1 1\n2.0 sick n4 "{sick}"\n')
    node = player.state.nodes[NodeName("n4")]
    node.seen.status = replace(node.seen.status, concern=concern)
    info = node_info(player.state, node, 3.0, UNIX + 3.0)
    assert (info.state, info.reason.count(sick)) == ("draining", 1)
    assert info.reason.endswith(f"; {concern}")
    player.play("4.0 undrain n4\n")
    info = node_info(player.state, node, 4.0, UNIX + 4.0)
    assert (info.state, info.reason) == ("live", sick)


def test_a_node_with_another_torch_is_told_what_to_install() -> None:
    player = Player()
    start = "0.0 register n1@2.13.0\n0.0 submit demo f=0 min_nodes=1\n0.5 ready n1\n"
    player.play(start + "1.0 register n2@2.14.0\n")
    assert node_info(player.state, player.state.nodes[NodeName("n2")], 3.0, UNIX + 3.0).reason == (
        "cannot join the job: torch 2.14, where the job's other nodes have 2.13: install the same, "
        "or give the job allow_mixed_versions: true"
    )


def test_workers_that_cannot_meet_are_told_with_the_time_of_their_next_meeting() -> None:
    player = Player()
    player.play(START + "1.0 steps 1 5 1\n10.0 peer_lost n1/0 1\n")
    job = player.state.jobs[JobId("demo-1")]
    lost = "n1/0 lost a peer: socket closed; the workers meet again in"
    assert job_status(player.state, job, CONFIG, 10.5).reason == f"{lost} 2 s"
    player.play("13.1 peer_lost n1/0 2\n")
    reason = job_status(player.state, job, CONFIG, 13.1).reason
    assert reason == f"{lost} 3 s, meeting 2 since the last step"
    player.play("16.9 enter 3 n1 n2 n3 n4\n17.0 steps 6 6 3\n")
    assert job_status(player.state, job, CONFIG, 17.0).reason == ""


def test_what_is_not_worth_a_change_follows_no_more() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2 n3 n4 n5\n0.0 submit demo reroute=1 f=1 shadows=0 steps=1000\n"
        "0.5 ready n1 n2 n3 n4 n5\n0.7 enter 1 n1 n2 n3 n4 n5\n1.0 steps 1 5 1\n"
        "2.0 close n1\n2.0 close n2\n2.01 peer_lost n3/0 1\n2.2 enter 2 n3 n4 n5\n"
    )
    job = player.state.jobs[JobId("demo-1")]
    assert job_status(player.state, job, CONFIG, 2.3).then == "normalise"
    player.play("2.4 steps 6 6 2\n")
    status = job_status(player.state, job, CONFIG, 2.5)
    assert (status.state, status.plan_policy, status.then, status.reason) == (
        "running",
        "reroute",
        "",
        "",
    )


def test_a_re_routed_plan_is_told_with_its_routes_and_what_workers_hold() -> None:
    player = Player()
    six = "n1 n2 n3 n4 n5 n6"
    player.play(
        f"0.0 register {six}\n"
        "0.0 submit demo hidden=5120 sequence=1 memory=68719476736 f=2 shadows=0\n"
        f"0.5 ready {six}\n0.7 enter 1 {six}\n1.0 steps 1 1 1 3.6\n"
    )
    job = player.state.jobs[JobId("demo-1")]
    before = job_status(player.state, job, CONFIG, 1.0)
    assert (before.policy, before.plan_policy, before.then) == ("auto", "templates", "")
    assert not before.plan.routes
    assert not before.plan.holds

    player.play("2.0 close n3\n2.01 peer_lost n4/0 1\n2.1 enter 2 n1 n2 n4 n5 n6\n")
    status = job_status(player.state, job, CONFIG, 2.2)
    assert (status.policy, status.plan_policy, status.then) == ("auto", "reroute", "templates")
    ways = [
        (
            [hop.workers[0].node for hop in route.hops],
            (route.first_microbatch, route.microbatches),
        )
        for route in status.plan.routes
    ]
    assert ways == [
        (["n1", "n2"], (0, 3)),
        (["n5", "n4"], (3, 2)),
        (["n1", "n4"], (5, 1)),
        (["n5", "n6"], (6, 2)),
    ]
    alive = ["n1", "n2", "n4", "n5", "n6"]
    assert [hold.workers[0].node for hold in status.plan.holds] == alive
    assert {found.worker.node for found in status.memory} == set(alive)

    job.state = "running"
    reason = job_status(player.state, job, CONFIG, 2.3).reason
    assert reason.startswith("n3 lost: others that hold the same layers")
    job.reason = ""
    reason = job_status(player.state, job, CONFIG, 2.3).reason
    assert reason == "a plan of templates follows at a step boundary once one is possible"


def test_a_plan_is_told_with_its_shadows_and_with_none_once_they_run() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2\n0.0 submit demo\n0.5 ready n1 n2\n1.6 look\n1.7 enter 1 n1 n2\n"
        "1.8 steps 1 5 1\n"
    )
    job = player.state.jobs[JobId("demo-1")]

    def told() -> tuple[list[tuple[str, int, int]], int]:
        status = job_status(player.state, job, CONFIG, player.now)
        shadows = [(s.workers[0].node, s.first_layer, s.last_layer) for s in status.plan.shadows]
        return shadows, status.can_lose

    assert told() == ([("n1", 4, 7), ("n2", 0, 3)], 1)
    player.play("2.0 close n2\n2.01 peer_lost n1/0 1\n2.2 enter 2 n1\n2.4 steps 6 6 2\n")
    assert told() == ([], 0)


def test_a_plan_protects_from_losses_once_a_step_is_committed_in_it() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2 n3 n4 n5 n6\n0.0 submit demo f=1 min_nodes=2 templates=1\n"
        "0.5 ready n1 n2 n3 n4 n5 n6\n0.7 enter 1 n1 n2 n3 n4 n5 n6\n1.0 steps 1 5 1\n"
        "1.1 stepped 1 n1 n2 n3 n4 n5 n6\n"
    )
    job = player.state.jobs[JobId("demo-1")]

    def told() -> tuple[int, int]:
        status = job_status(player.state, job, CONFIG, player.now)
        return status.generation, status.can_lose

    assert told() == (1, 1)
    player.play("2.0 silent n3 n5\n7.5 look\n7.6 enter 2 n1 n2 n4 n6\n")
    assert job.current.made is not None
    assert (job.current.made.can_lose, told()) == (1, (2, 0))
    player.play("8.0 steps 6 7 2\n8.1 stepped 2 n1 n2 n4 n6\n")
    assert told() == (2, 1)
    # Shadows are copied while training goes on; they count once all have switched.
    player.play("9.0 silent n4 n6\n14.5 look\n14.6 enter 3 n1 n2\n14.8 steps 8 9 3\n")
    assert (job.current.made.boundary, job.current.made.can_lose, told()) == (True, 1, (4, 0))
    player.play("15.0 enter 4 n1 n2\n15.1 steps 10 11 4\n")
    assert told() == (4, 1)


def test_a_data_plane_in_the_clear_is_told_unless_it_stays_on_the_host() -> None:
    player = Player()
    player.play(START)
    (job,) = player.state.jobs.values()

    def told(wish: DataPlane) -> str:
        job.spec = dataclasses.replace(job.spec, data_plane=wish)
        return job_status(player.state, job, CONFIG, 1.0).data_plane

    assert [told("auto"), told("sealed"), told("clear")] == ["sealed", "sealed", "clear"]
    for node in player.state.nodes.values():
        node.facts = replace(node.facts, address="127.0.0.1")
    assert [told("auto"), told("sealed"), told("clear")] == ["loopback", "sealed", "loopback"]
    away = player.state.nodes[NodeName("n2")]
    away.facts = replace(away.facts, address="10.0.0.2")
    assert [told("auto"), told("sealed"), told("clear")] == ["sealed", "sealed", "clear"]


def test_what_gpus_send_by_nccl_is_not_told_as_sealed() -> None:
    player = Player()
    player.play(START)
    (job,) = player.state.jobs.values()

    def told(plane: DataPlane, transport: TransportName) -> str:
        resources = dataclasses.replace(job.spec.resources, transport=transport)
        job.spec = dataclasses.replace(job.spec, data_plane=plane, resources=resources)
        return job_status(player.state, job, CONFIG, 1.0).data_plane

    first, *others = player.state.nodes.values()
    for node in others:
        node.facts = replace(node.facts, device="cuda")
    assert told("auto", "auto") == "sealed", "one worker without a GPU, and links carry all"
    first.facts = replace(first.facts, device="cuda")
    assert told("auto", "auto") == told("sealed", "auto") == "nccl"
    assert told("auto", "tcp") == "sealed"
    assert told("clear", "auto") == "clear"
