"""The rules on sizes (Oobleck §5), and all ways to combine them."""

from oobleck.planner.recovery.rules import (
    Group,
    Groups,
    borrow,
    enlarge,
    found_pipelines,
    mend,
    merge,
    refill,
    reinstantiate,
)

SIZES = range(3, 8)


def groups(*sizes: int, hit: tuple[int, ...] = (), lost: int = 1) -> Groups:
    """Pipelines of these sizes after the hit ones have lost nodes."""
    return tuple(
        Group(
            name=f"pipeline {number}",
            template=size,
            size=size - lost if number in hit else size,
            kept=None,
            origin=None,
            hit=number in hit,
        )
        for number, size in enumerate(sizes)
    )


def sizes_of(result: tuple[Groups, str] | None) -> list[int] | None:
    return None if result is None else [group.size for group in result[0]]


def test_reinstantiate_needs_enough_nodes() -> None:
    assert sizes_of(reinstantiate(groups(4, 3, hit=(0,)), 0, SIZES)) == [3, 3]
    assert reinstantiate(groups(4, 3, hit=(1,)), 1, SIZES) is None


def test_borrow_asks_the_largest_that_stays_large_enough() -> None:
    assert sizes_of(borrow(groups(3, 4, 5, hit=(0,)), 0, SIZES)) == [3, 4, 4]
    assert sizes_of(borrow(groups(3, 4, 5, hit=(0,), lost=2), 0, SIZES)) == [3, 3, 4] or sizes_of(
        borrow(groups(3, 4, 5, hit=(0,), lost=2), 0, SIZES)
    ) == [3, 4, 3]
    assert borrow(groups(3, 3, 3, hit=(0,)), 0, SIZES) is None, "nobody can spare a node"
    assert borrow(groups(4, 5, hit=(0,)), 0, SIZES) is None, "nothing to borrow for"


def test_merge_takes_the_smallest_other_one() -> None:
    assert sizes_of(merge(groups(3, 5, 4, hit=(0,)), 0, SIZES)) == [6, 5]
    assert merge(groups(3, hit=(0,)), 0, SIZES) is None
    assert merge(groups(6, 3, hit=(0,)), 0, SIZES) is None, "no template is that large"


def test_the_papers_way_comes_first_and_others_follow() -> None:
    ways = list(mend(groups(4, 3, 5, hit=(0, 1)), SIZES, most=32))
    found = [(way.rule, [group.size for group in way.groups]) for way in ways]
    assert found[0] == ("borrow", [3, 3, 4])
    assert ("merge", [5, 5]) in found, "both hit ones in one"
    assert all(not group.hit for way in ways for group in way.groups)
    assert all(len(way.stories) >= 1 for way in ways)
    assert {sum(sizes) for _, sizes in found} == {10}
    assert len(list(mend(groups(4, 3, 5, hit=(0, 1)), SIZES, most=2))) == 2


def test_newcomers_take_lost_places_then_found_pipelines_or_enlarge_the_smallest() -> None:
    hit = groups(4, 5, 3, hit=(0, 1))
    filled, left = refill(hit, 4)
    assert ([group.size for group in filled], left) == ([4, 5, 3], 2)
    assert found_pipelines(filled, 2, SIZES) is None, "too few for a pipeline"
    own = found_pipelines(filled, 7, SIZES)
    assert own is not None
    assert [group.size for group in own] == [4, 5, 3, 4, 3]
    larger = enlarge(filled, 2, SIZES)
    assert larger is not None
    assert [group.size for group in larger] == [5, 5, 4] or [g.size for g in larger] == [4, 5, 5]
    assert enlarge(groups(7, 7), 1, SIZES) is None
