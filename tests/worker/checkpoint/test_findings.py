"""What workers find at the checkpoints' place, and whose fault that is."""

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.worker.checkpoint.location import (
    Finding,
    at_fault,
    distinct_reasons,
    second_readers,
)


def found(*kinds: str) -> list[Finding]:
    """By workers of a, b and so on."""
    return [
        Finding(worker=WorkerId(NodeName(node), 0), kind=kind, reason=kind)  # type: ignore[arg-type]
        for node, kind in zip("abcd", kinds, strict=False)
    ]


@pytest.mark.parametrize(
    ("kinds", "nodes"),
    [
        ("fine unreadable", "b"),
        ("unreadable fine", "a"),
        ("fine unseen", ""),
        ("fine unseen fine", "b"),
        ("unseen fine fine", "a"),
        ("fine unseen unseen", ""),
        ("fine unreadable unreadable", ""),
        ("fine fine unseen unreadable", "cd"),
        ("fine unreadable damaged fine", ""),
        ("fine unfit fine", ""),
        ("unreadable", ""),
    ],
)
def test_a_node_is_at_fault_where_as_many_others_are_right(kinds: str, nodes: str) -> None:
    assert at_fault(found(*kinds.split())) == frozenset(nodes)


def test_a_node_is_at_fault_with_all_its_workers() -> None:
    a, b = (Finding(worker=WorkerId(NodeName(name), 0)) for name in "ab")
    both = [Finding(worker=WorkerId(NodeName("c"), slot), kind="unreadable") for slot in (0, 1)]
    assert at_fault([a, b, *both]) == {"c"}


def test_who_reads_a_damaged_file_too_is_on_another_node() -> None:
    def accused(*layers: tuple[WorkerId, int | None]) -> list[Finding]:
        return [
            Finding(worker=worker, kind="fine" if layer is None else "damaged", layer=layer)
            for worker, layer in layers
        ]

    a, a_too, b, c = (
        WorkerId(NodeName(name[0]), int(name[1])) for name in ("a0", "a1", "b0", "c0")
    )
    assert second_readers(accused((a, 4), (a_too, None), (b, None), (c, 2))) == {4: b, 2: a}
    assert second_readers(accused((a, 4), (b, 4), (c, None))) == {4: b}
    assert second_readers(accused((a, 4), (a_too, None))) == {}
    assert second_readers(accused((a, None), (b, None))) == {}


def test_why_a_checkpoint_is_passed_over_is_said_once_for_all_who_say_so() -> None:
    told = found("damaged", "fine", "unseen", "damaged")
    assert distinct_reasons(told) == ["damaged (on a, d)", "unseen (on c)"]
