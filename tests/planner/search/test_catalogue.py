"""Templates at hand, and what they were made for."""

from dataclasses import replace

import pytest

from oobleck.planner.cost.stages import pipeline_cost
from oobleck.planner.search import catalogue
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.demand import Instantiation
from oobleck.planner.search.templates import generate_templates, shortlisted_templates
from support.profiles import profile_of


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The ranges of sizes that templates are generated for, which really happens."""
    asked: list[range] = []

    def generate(profile, sizes):
        asked.append(sizes)
        return shortlisted_templates(profile, sizes)

    monkeypatch.setattr(catalogue, "shortlisted_templates", generate)
    return asked


def test_only_what_is_missing_is_made(made: list[range]) -> None:
    profile = profile_of([1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    kept = Catalogue(tied=False)
    first = kept.offer(profile, range(2, 4))
    assert kept.offer(profile, range(2, 4)) is first
    more = kept.offer(profile, range(1, 6))
    assert made == [range(2, 4), range(1, 2), range(4, 6)]
    assert dict(more.templates) == dict(generate_templates(profile, range(1, 6)))
    assert more.costs == {n: pipeline_cost(t, profile) for n, t in more.templates.items()}


def test_templates_survive_a_change_of_memory_that_they_fit(made: list[range]) -> None:
    profile = profile_of([1.0, 5.0, 1.0, 1.0], state=[40, 30, 5, 5], activation=1, memory=80)
    kept = Catalogue(tied=False)
    first = kept.offer(profile, range(2, 4))
    assert kept.offer(replace(profile, gpu_memory_bytes=90), range(2, 4)).templates == (
        first.templates
    )
    assert made == [range(2, 4)]
    tight = replace(profile, gpu_memory_bytes=60)
    now = kept.offer(tight, range(2, 4))
    assert dict(now.templates) == dict(generate_templates(tight, range(2, 4)))
    assert now.templates[2] != first.templates[2], "the even cut does not fit any more"


def test_the_judge_prefers_what_a_replay_finds_faster() -> None:
    profile = profile_of([1.0, 1.0, 1.0, 1.0])
    offer = Catalogue(tied=False).offer(profile, range(1, 3))
    even = Instantiation(sizes=(2, 2), shares=(4, 4), step=0)
    uneven = Instantiation(sizes=(2, 2), shares=(7, 1), step=0)
    fast, slow = offer.judge([even, uneven])
    assert fast < slow
