"""Programs as text and back: one word per instruction, for people, logs and scenarios.

A word names pipeline.stage, the kind with the micro-batch, and the peer: `0.1:RECV_F3<n0/0`.

    LOAD3  F3  B3                 tokens, forward, backward of micro-batch 3
    BI3  BW3                      the backward in two: gradient of the input, then of the weights
    RECV_F3<peer  SEND_F3>peer    activation from / to
    RECV_B3<peer  SEND_B3>peer    gradient from / to
    SYNC2[3,4,tied:4]@n0/0,n1/0   bucket 2: own parts of layers 3 and 4, the tied one of layer 4
    VOTE[0,1,tied:0]  STEP        parts that this worker's norm counts; optimizer step

Where stages have several workers, a share stands behind what it is of: `SEND_F3(1:2/4)>peer` sends
the second quarter of the rows, `SYNC2[3(0:1/2)]@...` sums the first half of layer 3.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from oobleck.planner.ids import NodeName, WorkerId
from oobleck.planner.programs.instructions import (
    WHOLE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    OptimizerStep,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Vote,
)

_ALONE: Mapping[str, type[LoadTokens] | type[Compute]] = {
    "LOAD": LoadTokens,
    "F": Forward,
    "B": Backward,
    "BI": BackwardInput,
    "BW": BackwardWeight,
}
_TALKING: Mapping[
    str,
    type[ReceiveActivation] | type[SendActivation] | type[ReceiveGradient] | type[SendGradient],
] = {
    "RECV_F": ReceiveActivation,
    "SEND_F": SendActivation,
    "RECV_B": ReceiveGradient,
    "SEND_B": SendGradient,
}
_NAMES = {kind: name for name, kind in (*_ALONE.items(), *_TALKING.items())}
_SHARE = re.compile(r"(.*)\((\d+):(\d+)/(\d+)\)")
_ACTION = re.compile(r"(\d+)\.(\d+):([A-Z_]+?)(\d+)(\(\d+:\d+/\d+\))?(?:([<>])(.+))?")
_SYNC = re.compile(r"SYNC(\d+)\[(.*)\]@(.+)")
_VOTE = re.compile(r"VOTE\[(.*)\]")


def format_instruction(instruction: Instruction) -> str:
    """The word that `parse_instruction` reads."""
    match instruction:
        case LoadTokens() | Forward() | Backward() | BackwardInput() | BackwardWeight():
            return _action(instruction)
        case ReceiveActivation() | ReceiveGradient():
            return f"{_action(instruction)}{_format_share(instruction.share)}<{instruction.peer}"
        case SendActivation() | SendGradient():
            return f"{_action(instruction)}{_format_share(instruction.share)}>{instruction.peer}"
        case SyncGradient():
            owners = ",".join(map(str, instruction.owners))
            return f"SYNC{instruction.bucket}[{_format_parts(instruction.parts)}]@{owners}"
        case Vote():
            return f"VOTE[{_format_parts(instruction.norm_parts)}]"
        case OptimizerStep():
            return "STEP"


def parse_instruction(word: str) -> Instruction:
    """The instruction that `word` stands for; raises ValueError."""
    if word == "STEP":
        return OptimizerStep()
    if vote := _VOTE.fullmatch(word):
        return Vote(norm_parts=_parse_parts(vote[1]))
    if sync := _SYNC.fullmatch(word):
        owners = tuple(_parse_worker(owner) for owner in sync[3].split(","))
        return SyncGradient(bucket=int(sync[1]), parts=_parse_parts(sync[2]), owners=owners)
    if action := _ACTION.fullmatch(word):
        pipeline, stage, microbatch = int(action[1]), int(action[2]), int(action[4])
        name, share, arrow, peer = action[3], action[5], action[6], action[7]
        if name in _ALONE and share is None and peer is None:
            return _ALONE[name](pipeline=pipeline, stage=stage, microbatch=microbatch)
        if name in _TALKING and arrow == ("<" if name.startswith("RECV") else ">"):
            return _TALKING[name](
                pipeline=pipeline,
                stage=stage,
                microbatch=microbatch,
                peer=_parse_worker(peer),
                share=_parse_share(share or "")[1],
            )
    raise ValueError(f"{word!r} is not an instruction")


def format_programs(programs: Mapping[WorkerId, Program]) -> str:
    """One line per worker: `n0/0: word word ...`."""
    return "".join(
        f"{worker}: {' '.join(map(format_instruction, program))}\n"
        for worker, program in sorted(programs.items())
    )


def parse_programs(text: str) -> Mapping[WorkerId, Program]:
    """The programs that `format_programs` wrote; raises ValueError."""
    programs = {}
    for line in text.splitlines():
        worker, colon, words = line.partition(": ")
        if not colon:
            raise ValueError(f"{line!r} is not a worker's program")
        programs[_parse_worker(worker)] = tuple(map(parse_instruction, words.split()))
    return programs


def _action(action: Action) -> str:
    name = _NAMES[type(action)]  # type: ignore[index]  # every kind of action is in the tables
    return f"{action.pipeline}.{action.stage}:{name}{action.microbatch}"


def _format_share(share: Share) -> str:
    return "" if share == WHOLE else f"({share.start}:{share.stop}/{share.of})"


def _parse_share(text: str) -> tuple[str, Share]:
    """What stands before the share at the end of `text`, and that share."""
    if match := _SHARE.fullmatch(text):
        return match[1], Share(int(match[2]), int(match[3]), int(match[4]))
    return text, WHOLE


def _format_parts(parts: Iterable[LayerPart]) -> str:
    return ",".join(
        f"{'tied:' if p.part == 'tied' else ''}{p.layer}{_format_share(p.share)}" for p in parts
    )


def _parse_parts(text: str) -> tuple[LayerPart, ...]:
    return tuple(map(_parse_part, text.split(","))) if text else ()


def _parse_part(text: str) -> LayerPart:
    part: Literal["own", "tied"] = "tied" if text.startswith("tied:") else "own"
    layer, share = _parse_share(text.removeprefix("tied:"))
    return LayerPart(layer=int(layer), part=part, share=share)


def _parse_worker(text: str) -> WorkerId:
    node, slash, slot = text.partition("/")
    if not slash:
        raise ValueError(f"{text!r} is not a worker (node/slot)")
    return WorkerId(NodeName(node), int(slot))
