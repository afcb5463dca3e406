"""The profile of a model on a machine: measured or estimated time and bytes per layer; its file."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from oobleck.core.units import count

#: Limits of all times but 0: the unit of planning, and some 30 years.
LEAST_S, MOST_S = 1e-15, 1e9
#: Limits of a layer or a GPU, and of the state or the activations of all layers.
MOST_BYTES, MOST_BYTES_IN_ALL = 2**60 - 1, 2**62 - 1
LEAST_RATE, MOST_RATE = 1.0, 1e18
MOST_LAYERS = 1024
#: Most nodes that are planned for: more take too long to be of use.
MOST_NODES = 1 << 16
#: Fields of a layer in bytes.
OPTIONAL_BYTES = (
    "moved_bytes",
    "gradient_bytes",
    "sum_bytes",
    "tied_bytes",
    "working_bytes",
    "mapped_bytes",
    "exchange_bytes",
)
BYTES = ("parameter_bytes", "state_bytes", "activation_bytes", "output_bytes", *OPTIONAL_BYTES)
_MOST = {"microbatch": 2**31 - 1, "gpus_per_node": 1024, "gpu_memory_bytes": MOST_BYTES}


class InvalidProfile(ValueError):
    """Error of a wrong value in a profile, with the field and the fix."""

    def __init__(self, owner: str, field_path: str, problem: str) -> None:
        super().__init__(f"{owner}{field_path}: {problem}")
        self.field_path = field_path
        self.problem = problem


def _problem_of_time(seconds: float) -> str:
    """Return the fault of `seconds` and its fix; empty where it has none."""
    if seconds == 0 or LEAST_S <= seconds <= MOST_S:
        return ""
    return f"{seconds} is not a time; give seconds, 0 or {LEAST_S:g} to {MOST_S:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Profile of a layer. Times are seconds for one micro-batch, keyed by the GPUs sharing the
    layer.

    Raises InvalidProfile, a ValueError.
    """

    name: str
    #: A layer cannot be shared by a number of GPUs that is missing here.
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    parameter_bytes: int
    #: Weights, gradients, optimizer moments, and any other memory of the layer that stays.
    state_bytes: int
    #: Kept per micro-batch from its forward to its backward.
    activation_bytes: int
    #: Sent to the next stage per micro-batch.
    output_bytes: int
    #: The part of `state_bytes` that is sent when the layer moves to another worker; 0: all.
    moved_bytes: int = 0
    #: Bytes of the layer's gradient as sent to be summed; 0: `parameter_bytes`.
    gradient_bytes: int = 0
    #: Gradient sums over all workers that hold the layer, where several do.
    sum_bytes: int = 0
    #: The part of `sum_bytes` that the layer shares with another: summed in every plan.
    tied_bytes: int = 0
    #: Most memory of computing one micro-batch beside all that: intermediate results of its
    #: operations, and the messages at the stage's borders.
    working_bytes: int = 0
    #: The same in single blocks that the allocator returns one by one (`MAPPED_BYTES` in
    #: `oobleck.planner.profile.memory`). One layer's blocks are taken while another's
    #: `working_bytes` are still held.
    mapped_bytes: int = 0
    #: Bytes of a worker that shares the layer with others of its node, beside its share, while it
    #: computes the layer (`oobleck.core.sharing`).
    exchange_bytes: int = 0
    #: The part of `backward_s` that makes the gradient of the layer's input, where it was measured
    #: apart from that of the weights.
    backward_input_s: Mapping[int, float] = field(default_factory=dict)
    #: Time of the optimizer's update of the layer, once per step.
    update_s: Mapping[int, float] = field(default_factory=dict)

    def __hash__(self) -> int:
        # Equality distinguishes layers that differ in their times alone.
        return hash((self.name, self.state_bytes, self.activation_bytes, len(self.forward_s)))

    def __post_init__(self) -> None:
        if not self.forward_s:
            raise self._wrong("forward_s", 'is empty; give at least the time on one GPU, {"1": s}')
        for name in ("forward_s", "backward_s", "backward_input_s", "update_s"):
            self._check_times(name, getattr(self, name))
        for name in ("backward_s", "backward_input_s", "update_s"):
            self._check_keys(name, getattr(self, name), optional=name != "backward_s")
        for gpus, seconds in self.backward_input_s.items():
            if seconds > self.backward_s[gpus]:
                raise self._wrong(
                    f'backward_input_s["{gpus}"]',
                    f"{seconds} is more than the whole backward ({self.backward_s[gpus]}), of "
                    "which it is a part; correct one of them or leave backward_input_s out",
                )
        for name in BYTES:
            value = getattr(self, name)
            if value < 0:
                raise self._wrong(name, f"{value} is negative; give bytes >= 0")
            if value > MOST_BYTES:
                raise self._wrong(name, "is too large; give bytes < 2^60")
        for part, whole in (("tied_bytes", "sum_bytes"), ("moved_bytes", "state_bytes")):
            if getattr(self, part) > getattr(self, whole):
                raise self._wrong(
                    part,
                    f"{getattr(self, part)} is more than {whole} ({getattr(self, whole)}), of "
                    f"which it is a part; correct one of them or leave {part} out",
                )

    @property
    def travelling_bytes(self) -> int:
        """Bytes that are sent when the layer moves to another worker."""
        return self.moved_bytes or self.state_bytes

    @property
    def summed_bytes(self) -> int:
        """Bytes of the layer's gradient as sent to be summed."""
        return self.gradient_bytes or self.parameter_bytes

    def _wrong(self, field_path: str, problem: str) -> InvalidProfile:
        return InvalidProfile(f"layer {self.name}: ", field_path, problem)

    def _check_times(self, name: str, times: Mapping[int, float]) -> None:
        for gpus, seconds in times.items():
            if gpus < 1:
                raise self._wrong(f'{name}["{gpus}"]', "keys are numbers of GPUs, from 1")
            if problem := _problem_of_time(seconds):
                raise self._wrong(f'{name}["{gpus}"]', problem)
        if name in ("backward_input_s", "update_s"):
            return
        fewest, *others = sorted(times) or [0]
        for gpus in others:
            if times[gpus] > times[fewest]:
                raise self._wrong(
                    f'{name}["{gpus}"]',
                    f"{times[gpus]} is more than with {count(fewest, 'GPU')} "
                    f"({times[fewest]}); leave out the entry for {gpus} GPUs (in all of the "
                    "layer's times): a layer may not be shared by a number that is missing",
                )
            fewest = gpus

    def _check_keys(self, name: str, times: Mapping[int, float], *, optional: bool) -> None:
        if optional and not times:
            return
        missing = sorted(set(self.forward_s) - set(times))
        more = sorted(set(times) - set(self.forward_s))
        if missing:
            raise self._wrong(
                f'{name}["{missing[0]}"]', "is missing; forward_s has that number of GPUs: give it"
            )
        if more:
            raise self._wrong(
                f'{name}["{more[0]}"]', "forward_s lacks that number of GPUs; give it there too"
            )


def working_bytes(layers: Sequence[LayerProfile]) -> int:
    """Return the bytes that a stage of these layers needs beside its state and kept activations."""
    return max(la.working_bytes for la in layers) + max(la.mapped_bytes for la in layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Speeds of links: bytes per second inside and between nodes, seconds per message."""

    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s"):
            value = getattr(self, name)
            if not LEAST_RATE <= value <= MOST_RATE:
                raise InvalidProfile(
                    "links.",
                    name,
                    f"{value} is not a rate; give bytes per second, {LEAST_RATE:g} to "
                    f"{MOST_RATE:g}",
                )
        if problem := _problem_of_time(self.latency_s):
            raise InvalidProfile("links.", "latency_s", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Profile of the model and the machines: all that planning knows of them.

    Raises InvalidProfile.
    """

    microbatch: int
    gpus_per_node: int
    #: Memory of one GPU that training may use, without the margin of
    #: `oobleck.planner.profile.memory`.
    gpu_memory_bytes: int
    layers: tuple[LayerProfile, ...]
    links: Links

    def __post_init__(self) -> None:
        if not self.layers:
            raise InvalidProfile("", "layers", "is empty; give at least one layer")
        if len(self.layers) > MOST_LAYERS:
            raise InvalidProfile(
                "", "layers", f"has {len(self.layers)} layers; give at most {MOST_LAYERS}"
            )
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value < 1:
                raise InvalidProfile("", name, f"{value} is below 1; give at least 1")
            if value > most:
                raise InvalidProfile("", name, f"is too large; give at most {most}")
        for name in ("state_bytes", "activation_bytes"):
            whole = sum(getattr(layer, name) for layer in self.layers)
            if whole > MOST_BYTES_IN_ALL:
                raise InvalidProfile(
                    "", "layers", f"{name} of all add up to {whole}, 2^62 or more; check the unit"
                )
        first: dict[str, int] = {}
        for number, layer in enumerate(self.layers):
            before = first.setdefault(layer.name, number)
            if before != number:
                raise InvalidProfile(
                    "",
                    f"layers[{number}].name",
                    f"{layer.name!r} is the name of layers[{before}] too; give each its own",
                )


def message_s(count: int, *, same_node: bool, links: Links) -> float:
    """Return the time of one message of `count` bytes from worker to worker."""
    rate = links.intra_node_bytes_per_s if same_node else links.inter_node_bytes_per_s
    return links.latency_s + count / rate


def all_reduce_s(count: int, *, workers: int, same_node: bool, links: Links) -> float:
    """Return the time to sum `count` bytes over `workers` in a ring; 0 for one worker."""
    if workers == 1:
        return 0.0
    rate = links.intra_node_bytes_per_s if same_node else links.inter_node_bytes_per_s
    return 2 * (workers - 1) * (links.latency_s + count / workers / rate)


def exchange_s(count: int, *, gpus: int, links: Links) -> float:
    """Return the time to gather `count` bytes whose parts `gpus` workers of a node hold, or to sum
    that many into parts; 0 for one worker."""
    return all_reduce_s(count, workers=gpus, same_node=True, links=links) / 2


Scope = Literal["intra_node", "inter_node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement by one worker: each kind of layer once, since layers of a kind are alike.

    Times for several GPUs are of one worker's part of the work, without exchanges.
    """

    #: Ordered by kind; see `oobleck.core.job.model.AnyModel.order`.
    kinds: tuple[LayerProfile, ...]
    #: Measured device, such as `cpu Xeon, 1 thread`, and its version of torch.
    device: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """Measurement of a link: a message between two workers takes latency_s + bytes /
    bytes_per_s."""

    scope: Scope
    latency_s: float
    bytes_per_s: float


# ---- the profile file: JSON text to a Profile and back


_OPTIONAL_TIMES = ("backward_input_s", "update_s")
#: Digits of an integer that may be beyond every float.
_MOST_DIGITS = 309
#: The parts of msgspec's errors: the problem, and the path of the value.
_AT = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISTYPED = re.compile(r"Expected `(\w+)`, got `(\w+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a text",
}


def parse_profile(text: str | bytes) -> Profile:
    """Parse a profile; raises ValueError with the field and the fix. Unknown keys are ignored:
    profiles also record how they were measured."""
    try:
        tree = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        return msgspec.convert(tree, Profile, str_keys=True)
    except RecursionError:
        raise ValueError("not a valid profile: it is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"not a valid profile: {_refusal(error)}") from error
    except ValueError as error:
        raise ValueError(f"not a valid profile: it is not JSON text: {error}") from error


def format_profile(profile: Profile, notes: Mapping[str, object] | None = None) -> str:
    """Return `profile` as JSON text that `parse_profile` reads back equal.

    `notes` say how it was made; they go under the key `measured`, which parsing ignores.
    """
    tree = msgspec.to_builtins(profile, str_keys=True)
    for layer in tree["layers"]:
        for name in (*_OPTIONAL_TIMES, *OPTIONAL_BYTES):
            if not layer[name]:
                del layer[name]
    if notes:
        tree["measured"] = dict(notes)
    return json.dumps(tree, indent=2) + "\n"


def _integer(digits: str) -> int | float:
    """Parse an integer; one with more digits than a float can have becomes infinity."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {json.dumps(twice)} is given twice in one object; keep one")
    return found


def _refusal(error: msgspec.ValidationError) -> str:
    """Return msgspec's error as a line: the path in the file, the problem and the fix."""
    match = _AT.fullmatch(str(error))
    assert match is not None, "everything matches"
    path, problem = match["path"] or "", match["problem"]
    if isinstance(error.__cause__, InvalidProfile):
        path, problem = f"{path}.{error.__cause__.field_path}", error.__cause__.problem
    elif missing := _MISSING.fullmatch(problem):
        path, problem = f"{path}.{missing[1]}", "is missing; add it"
    elif match["key"]:
        problem = "keys are numbers of GPUs, from 1"
    elif types := _MISTYPED.match(problem):
        wanted, given = (_WORDS.get(name, name) for name in types.groups())
        problem = f"must be {wanted}, not {given}"
        if types.groups() == ("int", "float"):
            problem = "must be a whole number, without a fraction and not too large"
    return f"{path.lstrip('.') or 'the profile'}: {problem}"
