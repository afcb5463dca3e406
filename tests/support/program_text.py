"""Programs as text, and the text that `format_instruction` writes back to instructions."""

import re
from collections.abc import Mapping
from typing import Literal

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.instructions import (
    WHOLE,
    Instruction,
    LayerPart,
    OptimizerStep,
    Program,
    Share,
    SyncGradient,
    Vote,
)
from oobleck.planner.programs.compiler.proof import NAMES, format_instruction

KINDS = {name: kind for kind, name in NAMES.items()}
ACTION = re.compile(r"(\d+)-(\d+):([A-Z_]+?)(\d+)(\(\d+:\d+/\d+\))?(?:([<>])(.+))?")
SYNC = re.compile(r"SYNC(\d+)\[(.*)\]@(.+)")
VOTE = re.compile(r"VOTE\[(.*)\]")
SHARE = re.compile(r"(.*)\((\d+):(\d+)/(\d+)\)")


def format_programs(programs: Mapping[WorkerId, Program]) -> str:
    """One line per worker: `n0/0: word word ...`."""
    return "".join(
        f"{worker}: {' '.join(map(format_instruction, program))}\n"
        for worker, program in sorted(programs.items())
    )


def parse_programs(text: str) -> Mapping[WorkerId, Program]:
    lines = (line.partition(": ") for line in text.splitlines())
    return {
        parse_worker(worker): tuple(map(parse_instruction, words.split()))
        for worker, _, words in lines
    }


def parse_instruction(word: str) -> Instruction:
    if word == "STEP":
        return OptimizerStep()
    if vote := VOTE.fullmatch(word):
        return Vote(norm_parts=parse_parts(vote[1]))
    if sync := SYNC.fullmatch(word):
        owners = tuple(parse_worker(owner) for owner in sync[3].split(","))
        return SyncGradient(bucket=int(sync[1]), parts=parse_parts(sync[2]), owners=owners)
    action = ACTION.fullmatch(word)
    assert action is not None, word
    first, last, microbatch = int(action[1]), int(action[2]), int(action[4])
    where = {"microbatch": microbatch, "first_layer": first, "last_layer": last}
    kind = KINDS[action[3]]
    if action[6] is None:
        return kind(**where)
    share = parse_share(action[5] or "")[1]
    return kind(**where, peer=parse_worker(action[7]), share=share)  # type: ignore[call-arg]


def parse_share(text: str) -> tuple[str, Share]:
    """What stands before the share at the end of `text`, and that share."""
    if match := SHARE.fullmatch(text):
        return match[1], Share(int(match[2]), int(match[3]), int(match[4]))
    return text, WHOLE


def parse_parts(text: str) -> tuple[LayerPart, ...]:
    return tuple(map(parse_part, text.split(","))) if text else ()


def parse_part(text: str) -> LayerPart:
    part: Literal["own", "tied"] = "tied" if text.startswith("tied:") else "own"
    layer, share = parse_share(text.removeprefix("tied:"))
    return LayerPart(layer=int(layer), part=part, share=share)


def parse_worker(text: str) -> WorkerId:
    node, _, slot = text.partition("/")
    return WorkerId(NodeName(node), int(slot))
