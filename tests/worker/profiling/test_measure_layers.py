"""Measuring the model: true bytes, times of every layer, real links, and no trace in training."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import (
    Committed,
    FaultRule,
    LinkMeasured,
    LinkPair,
    Measure,
    Measured,
    Rendezvous,
)
from oobleck.core.profile import Measurement
from oobleck.planner.profile.measurement import assemble_profile, check_fits
from oobleck.worker.profiling.measure_layers import measure_layers
from oobleck.worker.runtime.errors import Superseded
from oobleck.worker.state.layout import layout
from support.director import Director, WarmWorkers, make_plan

MakeJob = Callable[..., JobSpec]
A, B = WorkerId(NodeName("a"), 0), WorkerId(NodeName("b"), 0)


def measure(job: JobSpec) -> Measurement:
    return measure_layers(job, torch.device("cpu"), "cpu", lambda: None)


@pytest.mark.parametrize(
    ("precision", "item", "sent"), [("fp64", 8, 8), ("fp32", 4, 4), ("bf16", 4, 2)]
)
def test_bytes_of_state_and_messages_are_those_of_training(
    make_job: MakeJob, precision: str, item: int, sent: int
) -> None:
    job = make_job(precision=precision)
    found = measure(job)
    for layer, number in ((found.kinds[0], 0), (found.kinds[1], 1), (found.kinds[2], 4)):
        parameters = layout(job.model, number).size
        assert layer.parameter_bytes == item * parameters
        copy = 2 * parameters if precision == "bf16" and number else 0
        assert layer.state_bytes == 4 * item * parameters + copy
        assert layer.travelling_bytes == 3 * item * parameters
        assert layer.sum_bytes == item * parameters
    assert found.kinds[0].output_bytes == found.kinds[1].output_bytes == 2 * 8 * 16 * sent
    assert found.kinds[2].output_bytes == 0
    weight_bytes = item * job.model.vocabulary * job.model.hidden
    assert (found.kinds[0].tied_bytes, found.kinds[2].tied_bytes) == (weight_bytes, weight_bytes)
    assert found.kinds[1].tied_bytes == 0
    profile, _ = assemble_profile(job, [found], [], gpus_per_node=1, memory_bytes=1 << 30)
    check_fits(profile, job)


def test_kept_bytes_are_activations_alone(make_job: MakeJob) -> None:
    """They grow with the micro-batch, which parameters do not."""
    one, two = (measure(make_job(microbatch=size, precision="fp64")) for size in (1, 2))
    assert two.kinds[1].activation_bytes == 2 * one.kinds[1].activation_bytes
    assert two.kinds[0].activation_bytes == 2 * one.kinds[0].activation_bytes == 2 * 8 * 8
    output = two.kinds[1].output_bytes
    # Input, two norms, q, k, v, attention, residual, and four times the width before and after
    # the GELU: 16 widths, and some numbers per row.
    assert 16 * output <= two.kinds[1].activation_bytes < 17 * output


def test_dropout_masks_are_kept_too(make_job: MakeJob) -> None:
    with_dropout = measure(make_job(dropout=0.1)).kinds[1].activation_bytes
    assert with_dropout > measure(make_job()).kinds[1].activation_bytes


def test_every_time_is_there_and_the_parts_are_less_than_the_whole(make_job: MakeJob) -> None:
    found = measure(make_job())
    for layer in found.kinds:
        assert layer.forward_s[1] > 0
        assert layer.backward_s[1] >= layer.backward_input_s[1] > 0
        assert layer.update_s[1] > 0


def test_it_ends_as_soon_as_it_is_not_wanted(make_job: MakeJob) -> None:
    def called_off() -> None:
        raise Superseded(Generation(1))

    with pytest.raises(Superseded):
        measure_layers(make_job(), torch.device("cpu"), "cpu", called_off)


def wish(cluster: Director, attempt: int = 1) -> Measure:
    rendezvous = Rendezvous(host=cluster.workers[A].card, prefix=f"measure-{attempt}")
    pair = LinkPair(scope="inter_node", workers=(A, B), rendezvous=rendezvous)
    return Measure(attempt=attempt, meetings=(pair,))


def losses(warm: WarmWorkers, job: JobSpec, *, measured: bool) -> dict[int, float | None]:
    plan = make_plan(1, [[("a", 2), ("b", 3)]], [3])
    with Director(warm, job) as cluster:
        cluster.start("a", "b")
        if measured:
            for worker in (A, B):
                cluster.workers[worker].channel.send(wish(cluster))
            cluster.wait(
                lambda: bool(cluster.said(A, LinkMeasured) and cluster.said(B, Measured)), "answers"
            )
            check_answers(cluster, job)
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        return cluster.losses()


def check_answers(cluster: Director, job: JobSpec) -> None:
    (link,) = cluster.said(A, LinkMeasured)
    assert isinstance(link, LinkMeasured)
    assert link.link is not None, link.problem
    assert 1e6 < link.link.bytes_per_s < 1e12
    assert 0 < link.link.latency_s < 1
    assert cluster.said(B, LinkMeasured) == []
    found = []
    for worker in (A, B):
        (answer,) = cluster.said(worker, Measured)
        assert isinstance(answer, Measured)
        assert answer.measurement is not None, answer.problem
        found.append(answer.measurement)
    profile, notes = assemble_profile(
        job, found, [link.link], gpus_per_node=1, memory_bytes=1 << 30
    )
    assert len(profile.layers) == job.model.layer_count
    assert notes["workers"] == 2


def test_two_workers_measure_the_link_and_training_is_as_without(
    warm: WarmWorkers, make_job: MakeJob
) -> None:
    job = make_job(dropout=0.1)
    assert losses(warm, job, measured=True) == losses(warm, job, measured=False)


def test_a_peer_that_dies_does_not_hold_up_the_other(warm: WarmWorkers, make_job: MakeJob) -> None:
    job = make_job()
    fault = FaultRule(worker=B, point="before:measure", action="kill_worker")
    with Director(warm, job, [fault]) as cluster:
        cluster.start("a", "b")
        for worker in (A, B):
            cluster.workers[worker].channel.send(wish(cluster))
        cluster.wait(lambda: bool(cluster.said(A, Measured)) and cluster.workers[B].gone, "answers")
        # A newer attempt without it is not kept waiting behind the older one.
        cluster.workers[A].channel.send(Measure(attempt=2))
        cluster.wait(lambda: len(cluster.said(A, Measured)) == 2, "the second answer")
        cluster.workers[A].channel.send(wish(cluster, attempt=3))
        cluster.wait(lambda: len(cluster.said(A, Measured)) == 3, "the third answer")
        alone = make_plan(1, [[("a", 5)]], [3])
        cluster.assign(alone)  # while it waits for its peer
        cluster.wait_finished(alone)
        assert cluster.said(A, Committed)
        assert cluster.said(A, LinkMeasured) == []
        cluster.stop()


def test_one_that_is_in_a_generation_measures_no_link(warm: WarmWorkers, make_job: MakeJob) -> None:
    """What tells its meetings apart would differ from the other one's."""
    with Director(warm, make_job()) as cluster:
        cluster.start("a", "b")
        alone = make_plan(1, [[("a", 5)]], [3])
        cluster.assign(alone)
        cluster.wait_finished(alone)
        for worker in (A, B):
            cluster.workers[worker].channel.send(wish(cluster))
        cluster.wait(lambda: bool(cluster.said(A, LinkMeasured)), "answer")
        (link,) = cluster.said(A, LinkMeasured)
        assert isinstance(link, LinkMeasured)
        assert link.link is None
        assert link.problem == "this worker has entered a generation"
        cluster.stop()


def test_what_cannot_be_measured_is_said(warm: WarmWorkers, make_job: MakeJob) -> None:
    job = make_job()
    # Far more than any machine has, but planning never asked for it: the specs do not forbid it.
    model = dataclasses.replace(job.model, hidden=1 << 18, vocabulary=1 << 24)
    huge = dataclasses.replace(job, model=model)
    with Director(warm, huge) as cluster:
        cluster.start("a", "b")
        cluster.workers[A].channel.send(wish(cluster))
        cluster.wait(lambda: bool(cluster.said(A, Measured)), "answer")
        (answer,) = cluster.said(A, Measured)
        assert isinstance(answer, Measured)
        assert answer.measurement is None
        assert answer.problem
        cluster.stop()
