"""Instructions as text, one word each, for people and messages.

A word names the layers, the kind with the micro-batch, and the peer: `2-3:RECV_F3<n0/0`.

  LOAD3  F3  B3                 tokens, forward, backward of micro-batch 3
  BI3  BW3                      the backward in two: gradient of the input, then of the weights
  RECV_F3<peer  SEND_F3>peer    activation from / to
  RECV_B3<peer  SEND_B3>peer    gradient from / to
  SYNC2[3,4,tied:4]@n0/0,n1/0   bucket 2: own parts of layers 3 and 4, the tied one of layer 4
  VOTE[0,1,tied:0]  STEP        parts that this worker's norm counts; optimizer step

Where hops have several workers, a share follows what it is of: `SEND_F3(1:2/4)>peer` sends the
second quarter of the rows, `SYNC2[3(0:1/2)]@...` sums the first half of layer 3.
"""

from collections.abc import Iterable, Mapping

from oobleck.core.instructions import (
    WHOLE,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    LayerPart,
    LoadTokens,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    Share,
    SyncGradient,
    Vote,
)

NAMES: Mapping[type[Action], str] = {
    LoadTokens: "LOAD",
    Forward: "F",
    Backward: "B",
    BackwardInput: "BI",
    BackwardWeight: "BW",
    ReceiveActivation: "RECV_F",
    SendActivation: "SEND_F",
    ReceiveGradient: "RECV_B",
    SendGradient: "SEND_B",
}


def format_instruction(instruction: Instruction) -> str:
    """Return the word for an instruction."""
    match instruction:
        case Message():
            arrow = "<" if isinstance(instruction, ReceiveActivation | ReceiveGradient) else ">"
            share = _format_share(instruction.share)
            return f"{_action(instruction)}{share}{arrow}{instruction.peer}"
        case Action():
            return _action(instruction)
        case SyncGradient():
            owners = ",".join(map(str, instruction.owners))
            return f"SYNC{instruction.bucket}[{_format_parts(instruction.parts)}]@{owners}"
        case Vote():
            return f"VOTE[{_format_parts(instruction.norm_parts)}]"
        case _:
            return "STEP"


def _action(action: Action) -> str:
    layers = f"{action.first_layer}-{action.last_layer}"
    return f"{layers}:{NAMES[type(action)]}{action.microbatch}"


def _format_share(share: Share) -> str:
    return "" if share == WHOLE else f"({share.start}:{share.stop}/{share.of})"


def _format_parts(parts: Iterable[LayerPart]) -> str:
    return ",".join(
        f"{'tied:' if p.part == 'tied' else ''}{p.layer}{_format_share(p.share)}" for p in parts
    )
