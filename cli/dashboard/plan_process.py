"""Process that asks the planner one question, which takes a core seconds for many nodes.

Standard input: a line of JSON, `{"lost": [node, ...]}`, and a Planning as JSON text. Standard
output: a line of JSON, what `WhatIf.data` gives or `{"refused": reason}`, and the bytes of the Plan
that would come, if there is one.
"""

import json
import os
import sys

from oobleck.core.codec import decode
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.planner.report.planning import Planning
from oobleck.planner.report.what_if import what_if
from oobleck.proto.plans import plan_message


def answer(asked: bytes) -> bytes:
    head, _, message = asked.partition(b"\n")
    lost = [NodeName(name) for name in json.loads(head)["lost"]]
    try:
        found = what_if(decode(Planning, message), lost)
    except (PlanInfeasible, ValueError) as refusal:
        return json.dumps({"refused": str(refusal)}).encode() + b"\n"
    plan = b"" if found.taken is None else plan_message(found.taken.found.plan).SerializeToString()
    return json.dumps(found.data()).encode() + b"\n" + plan


def main() -> None:
    os.nice(5)  # pages have priority
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
