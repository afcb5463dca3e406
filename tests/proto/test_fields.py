"""Structs whose fields stand in a message of their own lose none on the way."""

from typing import Any

import msgspec
import pytest
from google.protobuf.message import Message

from oobleck.core.ids import Generation
from oobleck.core.messages import EvaluationRecord, StepRecord
from oobleck.host.versions import Versions
from oobleck.proto import control_pb2 as pb
from oobleck.proto.checks import message_of, struct_of
from oobleck.proto.types import NodeFacts, NodeStatus, WorkerStatus

#: What is not carried: the master counts it, the envelope or the job's status has it.
ELSEWHERE = {
    StepRecord: {"skipped_steps", "told_by"},
    NodeFacts: {"incarnation"},
    EvaluationRecord: {"generation", "metrics", "told_by"},
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WorkerStatus, pb.WorkerStatus),
        (NodeStatus, pb.NodeStatus),
        (NodeFacts, pb.Register),
        (Versions, pb.Versions),
        (StepRecord, pb.StepRecord),
        (EvaluationRecord, pb.Evaluation),
    ],
)
def test_every_field_has_its_place(kind: type[msgspec.Struct], message: type[Message]) -> None:
    lacking = set(kind.__struct_fields__) - set(message.DESCRIPTOR.fields_by_name)
    assert lacking == ELSEWHERE.get(kind, set())


@pytest.mark.parametrize("absent", [{}, {"loss": None, "grad_norm": None}])
def test_a_record_comes_back_as_it_was(absent: dict[str, Any]) -> None:
    values: dict[str, Any] = {
        "step": 3,
        "loss": 0.0,
        "grad_norm": -0.0,
        "tokens": 64,
        "samples_digest": "ab",
        "generation": Generation(2),
        "step_seconds": 0.5,
        "time": 1.7e9,
        "skipped": True,
    }
    record = StepRecord(**{**values, **absent})
    assert struct_of(StepRecord, message_of(pb.StepRecord, record)) == record
