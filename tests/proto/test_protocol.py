"""Which protocol two releases speak, and what a job is told without."""

import json

import pytest

from oobleck.core.job.file import format_job, parse_job
from oobleck.host.detection import DETECTIONS
from oobleck.proto import control_pb2 as pb
from oobleck.proto import protocol
from oobleck.proto.detection import read_welcome, welcome_message
from oobleck.proto.protocol import NEWEST, OLDEST, common, refusal
from oobleck.proto.status import read_register
from support.agent import facts


@pytest.mark.parametrize(
    ("oldest", "newest", "chosen"),
    [(2, 4, None), (2, 5, 5), (5, 5, 5), (6, 9, 7), (1, 12, 7), (7, 7, 7), (8, 9, None)],
)
def test_both_ends_take_the_newest_that_both_speak(
    monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int, chosen: int | None
) -> None:
    monkeypatch.setattr(protocol, "OLDEST", 5)
    monkeypatch.setattr(protocol, "NEWEST", 7)
    assert common(oldest, newest) == chosen
    if chosen is None:
        who = "the master" if oldest > 7 else "Oobleck on n1"
        told = refusal("n1", oldest, newest)
        assert told.startswith(f"the agent speaks protocols {oldest} to {newest} and this master ")
        assert f"this master protocols 5 to 7: upgrade {who}, one release" in told


def test_an_agent_too_new_is_told_what_to_upgrade_whatever_else_it_says() -> None:
    told = pb.Register(
        protocol=NEWEST + 1,
        newest_protocol=NEWEST + 1,
        node="n1",
        address="10.0.0.1",
        device="quantum",
    )
    incarnation = facts("n1").incarnation
    with pytest.raises(ValueError, match="upgrade the master, one release after the other"):
        read_register(told, incarnation)
    told.protocol = NEWEST
    with pytest.raises(ValueError, match="worker_slots: 0 is not"):
        read_register(told, incarnation)


def test_a_welcome_of_a_protocol_that_the_agent_does_not_speak_is_refused() -> None:
    detection = DETECTIONS["wan"]
    told = welcome_message(detection, NEWEST)
    assert read_welcome(told) == (detection, NEWEST, None)
    for other in (NEWEST + 1, OLDEST - 1):
        told.protocol = other
        with pytest.raises(ValueError, match=f"protocol: {other} was chosen, where this agent"):
            read_welcome(told)


def test_a_job_is_told_without_what_is_as_by_default() -> None:
    text = {
        "name": "demo",
        "model": {"kind": "gpt", "layers": 2, "hidden": 16, "heads": 2, "sequence_length": 8},
        "data": {"text": ["a.txt"]},
        "training": {"steps": 3, "global_batch": 4, "microbatch": 2, "seed": 0, "clip": 1.0},
        "checkpoint": {"path": "/saved", "every": 100},
        "resources": {"memory_per_worker": 1 << 30},
    }
    job = parse_job(json.dumps(text))
    told = json.loads(format_job(job, defaults=False))
    assert set(told) == set(text)
    assert "seed" not in told["training"]
    assert told["checkpoint"] == {"path": "/saved"}
    assert told["resources"] == {"memory_per_worker": 1 << 30}
    assert parse_job(json.dumps(told)) == job
