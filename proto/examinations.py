"""Conversion of a doctor's orders, answers and findings to messages and back."""

from typing import get_args

import msgspec

from oobleck.core.orders import Answer, Finding, Level, Order
from oobleck.proto import control_pb2 as pb
from oobleck.proto.bounds import check_bounds
from oobleck.proto.checks import in_field, message_of, one_of, struct_of

#: Most bytes of an answer; the largest come from hosts with hundreds of folders.
MOST_ANSWER_BYTES = 448 << 10

_order: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answer: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def examine_message(number: int, order: Order) -> pb.Examine:
    return pb.Examine(number=number, order=msgspec.json.encode(order))


def read_order(message: pb.Examine) -> Order:
    """Read an order; raises ValueError, also for an order of a later version."""
    return _order.decode(message.order)


def examined_message(number: int, answer: Answer) -> pb.Examined:
    return pb.Examined(number=number, answer=msgspec.json.encode(answer))


def read_answer(message: pb.Examined) -> Answer:
    """Read an answer; raises ValueError that names the field."""
    with in_field("answer"):
        if len(message.answer) > MOST_ANSWER_BYTES:
            raise ValueError(f"{len(message.answer)} bytes are more than {MOST_ANSWER_BYTES}")
        try:
            answer = _answer.decode(message.answer)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a valid answer: {error}") from error
        check_bounds(answer)
        return answer


def finding_message(finding: Finding) -> pb.Finding:
    return message_of(pb.Finding, finding, figures=finding.figures)


def read_finding(message: pb.Finding) -> Finding:
    """Read a finding; raises ValueError."""
    one_of(message.level, get_args(Level))
    return struct_of(Finding, message, figures=dict(message.figures))
