"""What passes between layers is taken apart and put together again as it was, or is refused."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from oobleck.worker.models.tree import flatten, map_tensors, structure, unflatten

A, B, C = (torch.tensor([float(number)]) for number in range(3))
Pair = namedtuple("Pair", "left right")


@dataclass
class Masked:
    values: torch.Tensor


TREES = [
    (A, "null", [A]),
    ((A,), '["tuple",null]', [A]),
    ([A], '["list",null]', [A]),
    ((), '["tuple"]', []),
    ({}, "{}", []),
    ({"b": A, "a": B}, '{"b":null,"a":null}', [A, B]),
    ((A, [B, {"tuple": C}]), '["tuple",null,["list",null,{"tuple":null}]]', [A, B, C]),
    ({"list": (A,), "x": []}, '{"list":["tuple",null],"x":["list"]}', [A]),
    ((A, A), '["tuple",null,null]', [A, A]),
]


@pytest.mark.parametrize(("tree", "text", "tensors"), TREES, ids=[text for _, text, _ in TREES])
def test_a_tree_is_its_tensors_and_its_structure(tree, text, tensors):
    assert structure(tree) == text
    found = flatten(tree)
    assert all(one is other for one, other in zip(found, tensors, strict=True))
    for _ in range(2):  # the second time from what was read before
        again = unflatten(text, found)
        assert repr(again) == repr(tree), "kinds and the order of keys too"
        assert structure(again) == text


def test_what_is_made_is_made_anew():
    """One result must not be changed through another one."""
    text = structure([A, {"a": B}])
    first = unflatten(text, [A, B])
    first.append(C)
    first[1]["c"] = C
    assert structure(unflatten(text, [A, B])) == text


@pytest.mark.parametrize(("tree", "text", "tensors"), TREES, ids=[text for _, text, _ in TREES])
def test_every_tensor_is_mapped_once(tree, text, tensors):
    given = []

    def double(tensor):
        given.append(tensor)
        return tensor * 2

    doubled = map_tensors(double, tree)
    assert all(one is other for one, other in zip(given, tensors, strict=True))
    assert structure(doubled) == text
    assert [one.item() for one in flatten(doubled)] == [2 * one.item() for one in tensors]


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (3, "an int where a tensor was expected"),
        (None, "None where a tensor was expected"),
        ((A, [B, 1.5]), r"a float at \[1\]\[1\] where a tensor was expected"),
        ({"a": {"b": "text"}}, r"a str at \['a'\]\['b'\] where a tensor was expected"),
        ((A, Pair(A, B)), r"a Pair at \[1\] where a tensor was expected.*plain tuples"),
        (Masked(A), "a Masked where a tensor was expected.*plain tuples"),
        (OrderedDict(a=A), "an OrderedDict where a tensor was expected.*plain tuples"),
        ((A, {1: B}), r"the dict at \[1\] has the key 1; use text"),
        ({"a": A, "b": (x for x in ())}, r"a generator at \['b'\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "tree",
)
@pytest.mark.parametrize(
    "what",
    [flatten, structure, lambda tree: map_tensors(torch.neg, tree)],
    ids=["flatten", "structure", "map"],
)
def test_what_is_no_tree_is_named(what, tree, why):
    with pytest.raises(TypeError, match=why):
        what(tree)


@pytest.mark.parametrize("text", ["1", '["set",null]', "[]", '["tuple",true]', '{"a":"null"}', "{"])
def test_what_is_no_structure_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own, or ours
        unflatten(text, [A])


@pytest.mark.parametrize(
    ("text", "tensors"),
    [("null", []), ("null", [A, B]), ('["tuple",null,null]', [A]), ('["tuple",null]', [A, B])],
)
def test_the_number_of_tensors_must_be_right(text, tensors):
    with pytest.raises(ValueError, match=r"(fewer|more) tensors than were given"):
        unflatten(text, tensors)
