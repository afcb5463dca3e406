"""What a profile may hold, and how each wrong value is refused: the field's path and the fix."""

import copy
import json
import math
from typing import Any

import pytest

from oobleck.core.profile import (
    LEAST_RATE,
    LEAST_S,
    MOST_BYTES,
    MOST_RATE,
    MOST_S,
    LayerProfile,
    Profile,
    format_profile,
    parse_profile,
)
from oobleck.planner.profile.memory import LEAST_MARGIN_BYTES, budget_bytes, usable_bytes
from oobleck.planner.report.report import make_report

LAYER: dict[str, Any] = {
    "forward_s": {"1": 0.2, "2": 0.1},
    "backward_s": {"1": 0.4, "2": 0.3},
    "backward_input_s": {"1": 0.2, "2": 0.1},
    "update_s": {"1": 0.01, "2": 0.02},
    "parameter_bytes": 100,
    "state_bytes": 400,
    "activation_bytes": 10,
    "output_bytes": 5,
}
TREE: dict[str, Any] = {
    "microbatch": 2,
    "gpus_per_node": 2,
    "gpu_memory_bytes": 1000,
    "layers": [{"name": f"layer{number}", **copy.deepcopy(LAYER)} for number in range(4)],
    "links": {"intra_node_bytes_per_s": 1e10, "inter_node_bytes_per_s": 1e9, "latency_s": 1e-5},
}


def parse(tree: object) -> Profile:
    return parse_profile(json.dumps(tree))


def changed(*path: str | int, value: object = ...) -> dict[str, Any]:
    """The tree with another value at `path`; without one, the key is left out."""
    tree = copy.deepcopy(TREE)
    place: Any = tree
    for key in path[:-1]:
        place = place[key]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return tree


def test_a_whole_profile_is_read() -> None:
    profile = parse(TREE)
    assert profile.layers[3].forward_s == {1: 0.2, 2: 0.1}
    assert profile.layers[3].backward_input_s == {1: 0.2, 2: 0.1}
    assert parse_profile(format_profile(profile)) == profile


def test_notes_and_unknown_keys_are_passed_over() -> None:
    profile = parse(TREE | {"comment": "mine"})
    text = format_profile(profile, {"device": "abacus"})
    assert json.loads(text)["measured"] == {"device": "abacus"}
    assert parse_profile(text) == profile


def test_split_and_update_times_may_be_left_out() -> None:
    tree = changed("layers", 1, "backward_input_s")
    del tree["layers"][1]["update_s"]
    layer = parse(tree).layers[1]
    assert layer.backward_input_s == layer.update_s == {}
    assert "update_s" not in json.loads(format_profile(parse(tree)))["layers"][1]


def test_all_of_the_state_moves_where_nothing_else_is_said() -> None:
    assert parse(TREE).layers[1].travelling_bytes == 400
    layer = parse(changed("layers", 1, "moved_bytes", value=300)).layers[1]
    assert (layer.state_bytes, layer.travelling_bytes) == (400, 300)


@pytest.mark.parametrize("number", [2**31 + 1, 2**53 + 1, 2**60 - 1])
def test_large_byte_counts_just_work(number: int) -> None:
    tree = changed("gpu_memory_bytes", value=number)
    for name in ("parameter_bytes", "state_bytes", "activation_bytes", "output_bytes"):
        tree["layers"][2][name] = number
    profile = parse(tree)
    assert profile.gpu_memory_bytes == number
    assert profile.layers[2].output_bytes == profile.layers[2].state_bytes == number
    assert parse_profile(format_profile(profile)) == profile


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "the profile: must be an object, not a list"),
        (changed("microbatch"), "microbatch: is missing; add it"),
        (changed("microbatch", value="2"), "microbatch: must be a whole number, not a text"),
        (changed("microbatch", value=True), "microbatch: must be a whole number, not true"),
        (changed("microbatch", value=0), "microbatch: 0 is below 1; give at least 1"),
        (changed("gpus_per_node", value=0), "gpus_per_node: 0 is below 1; give at least 1"),
        (changed("gpu_memory_bytes", value=-5), "gpu_memory_bytes: -5 is below 1"),
        (changed("gpu_memory_bytes", value=1e9), "gpu_memory_bytes: must be a whole number"),
        (changed("layers"), "layers: is missing; add it"),
        (changed("layers", value=[]), "layers: is empty; give at least one layer"),
        (changed("layers", value={}), "layers: must be a list, not an object"),
        (changed("layers", 2, value=None), "layers[2]: must be an object, not null"),
        (changed("layers", 2, "name"), "layers[2].name: is missing; add it"),
        (
            changed("layers", 2, "name", value="layer0"),
            "layers[2].name: 'layer0' is the name of layers[0] too; give each its own",
        ),
        (changed("layers", 3, "forward_s"), "layers[3].forward_s: is missing; add it"),
        (changed("layers", 3, "forward_s", value={}), "layers[3].forward_s: is empty; give"),
        (changed("layers", 3, "forward_s", value=0.1), "must be an object, not a number"),
        (changed("layers", 3, "backward_s", "2"), 'layers[3].backward_s["2"]: is missing'),
        (changed("layers", 3, "forward_s", "2"), 'layers[3].backward_s["2"]: forward_s lacks'),
        (changed("layers", 3, "update_s", "2"), 'layers[3].update_s["2"]: is missing'),
        (
            changed("layers", 3, "forward_s", "2", value="0.1"),
            "layers[3].forward_s[...]: must be a number, not a text",
        ),
        (
            changed("layers", 3, "forward_s", "2", value=False),
            "layers[3].forward_s[...]: must be a number, not true or false",
        ),
        (
            changed("layers", 3, "forward_s", "2", value=-0.1),
            'layers[3].forward_s["2"]: -0.1 is not a time; give seconds, 0 or 1e-15',
        ),
        (
            changed("layers", 3, "backward_s", "1", value=math.nan),
            'layers[3].backward_s["1"]: nan is not a time',
        ),
        (
            changed("layers", 3, "update_s", "1", value=math.inf),
            'layers[3].update_s["1"]: inf is not a time',
        ),
        (changed("layers", 3, "forward_s", "1", value=10**400), "inf is not a time"),
        (
            changed("layers", 3, "forward_s", "2", value=0.3),
            'layers[3].forward_s["2"]: 0.3 is more than with 1 GPU (0.2); leave out the entry for '
            "2 GPUs (in all of the layer's times): a layer may not be shared by a number that is "
            "missing",
        ),
        (
            changed("layers", 1, "backward_s", "2", value=0.5),
            'layers[1].backward_s["2"]: 0.5 is more than with 1 GPU (0.4); leave out the entry',
        ),
        (
            changed("layers", 1, "backward_input_s", "1", value=0.5),
            'layers[1].backward_input_s["1"]: 0.5 is more than the whole backward (0.4)',
        ),
        (
            changed("layers", 0, "forward_s", "0", value=1.0),
            'layers[0].forward_s["0"]: keys are numbers of GPUs, from 1',
        ),
        (
            changed("layers", 0, "forward_s", "-1", value=1.0),
            'layers[0].forward_s["-1"]: keys are numbers of GPUs, from 1',
        ),
        (
            changed("layers", 0, "forward_s", "two", value=1.0),
            "layers[0].forward_s: keys are numbers of GPUs, from 1",
        ),
        (
            changed("layers", 0, "forward_s", "02", value=0.1),
            "layers[0].forward_s: keys are numbers of GPUs, from 1",
        ),
        (
            changed("layers", 2, "state_bytes", value=-1),
            "layers[2].state_bytes: -1 is negative; give bytes >= 0",
        ),
        (
            changed("layers", 2, "activation_bytes", value=1.5),
            "layers[2].activation_bytes: must be a whole number, without a fraction",
        ),
        (changed("layers", 2, "output_bytes"), "layers[2].output_bytes: is missing; add it"),
        (changed("links"), "links: is missing; add it"),
        (changed("links", "latency_s"), "links.latency_s: is missing; add it"),
        (changed("links", "latency_s", value=math.nan), "links.latency_s: nan is not a time"),
        (
            changed("links", "inter_node_bytes_per_s", value=0),
            "links.inter_node_bytes_per_s: 0.0 is not a rate; give bytes per second, 1 to 1e+18",
        ),
        (changed("links", "inter_node_bytes_per_s", value=1e-300), "1e-300 is not a rate"),
        (changed("links", "inter_node_bytes_per_s", value=1e300), "1e+300 is not a rate"),
        (
            changed("links", "latency_s", value=1e308),
            "links.latency_s: 1e+308 is not a time; give seconds, 0 or 1e-15 to 1e+09",
        ),
        (
            changed("layers", 3, "forward_s", "1", value=1e300),
            'layers[3].forward_s["1"]: 1e+300 is not a time; give seconds, 0 or 1e-15 to 1e+09',
        ),
        (
            changed("layers", 3, "forward_s", "2", value=1e-300),
            'layers[3].forward_s["2"]: 1e-300 is not a time',
        ),
        (
            changed("layers", 2, "moved_bytes", value=401),
            "layers[2].moved_bytes: 401 is more than state_bytes (400), of which it is a part; "
            "correct one of them or leave moved_bytes out",
        ),
        (
            changed("layers", 3, "state_bytes", value=2**60),
            "layers[3].state_bytes: is too large; give bytes < 2^60",
        ),
        (
            TREE | {"layers": [LAYER | {"name": str(n), "state_bytes": 2**59} for n in range(8)]},
            f"layers: state_bytes of all add up to {2**62}, 2^62 or more; check the unit",
        ),
        (
            TREE | {"layers": [LAYER | {"name": str(n)} for n in range(1025)]},
            "layers: has 1025 layers; give at most 1024",
        ),
        (changed("gpu_memory_bytes", value=2**1100), "gpu_memory_bytes: must be a whole number"),
        (changed("gpus_per_node", value=1025), "gpus_per_node: is too large; give at most 1024"),
        (
            changed("links", "intra_node_bytes_per_s", value=math.nan),
            "links.intra_node_bytes_per_s: nan is not a rate",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_the_fix(tree: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"^not a valid profile: ") as caught:
        parse(tree)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON text"),
        ('{"microbatch": 1', "it is not JSON text"),
        (b"\xff\xfe\xfa", "it is not JSON text"),
        ('{"microbatch": 1, "microbatch": 2}', 'key "microbatch" is given twice'),
        ('{"layers": [{"forward_s": {"1": 0, "1": 1}}]}', 'key "1" is given twice'),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"layers": [], "microbatch": 1' + "0" * 5000 + "}", "and not too large"),
        ('{"layers": [], "microbatch": -1' + "0" * 5000 + "}", "and not too large"),
    ],
)
def test_wrong_syntax_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=r"^not a valid profile: ") as caught:
        parse_profile(text)
    assert message in str(caught.value)


def test_a_profile_made_by_hand_is_checked_too() -> None:
    with pytest.raises(
        ValueError, match=r'layer x: forward_s\["2"\]: 2\.0 is more than with 1 GPU'
    ):
        LayerProfile(
            name="x",
            forward_s={2: 2.0, 1: 1.0},
            backward_s={1: 1.0, 2: 1.0},
            parameter_bytes=0,
            state_bytes=0,
            activation_bytes=0,
            output_bytes=0,
        )


def test_profiles_are_hashable_and_equal_by_value() -> None:
    assert hash(parse(TREE)) == hash(parse(TREE))
    other = parse(changed("layers", 0, "forward_s", "1", value=0.3))
    assert other != parse(TREE)
    assert len({parse(TREE), parse(TREE), other}) == 2


@pytest.mark.parametrize(
    ("physical", "usable"),
    [
        (80 << 30, (80 << 30) - (8 << 30)),
        (1 << 30, (1 << 30) - LEAST_MARGIN_BYTES),
        (100 << 20, 50 << 20),
        (1, 1),
    ],
)
def test_a_margin_of_the_device_stays_free(physical: int, usable: int) -> None:
    assert usable_bytes(physical) == usable
    assert budget_bytes(None, physical) == usable
    assert budget_bytes(12_345, physical) == 12_345


@pytest.mark.parametrize("seconds", [0.0, LEAST_S, MOST_S])
@pytest.mark.parametrize("number", [0, MOST_BYTES // 4])
@pytest.mark.parametrize("rate", [LEAST_RATE, MOST_RATE])
def test_whatever_a_profile_may_hold_can_be_planned(
    seconds: float, number: int, rate: float
) -> None:
    tree = changed("gpu_memory_bytes", value=MOST_BYTES)
    for layer in tree["layers"]:
        for name in ("parameter_bytes", "state_bytes", "activation_bytes", "output_bytes"):
            layer[name] = number
        for name in ("forward_s", "backward_s", "update_s"):
            layer[name] = {"1": seconds, "2": seconds}
        del layer["backward_input_s"]
    for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s"):
        tree["links"][name] = rate
    tree["links"]["latency_s"] = seconds
    report = make_report(parse(tree), nodes=5, fault_tolerance=1, global_batch=16, lost=1)
    assert json.loads(json.dumps(report.data()))["plan"]["step_s"] >= 0
    assert report.drawing()
