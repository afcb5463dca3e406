"""Replays with the artifact's measured steps in place of plans give its published figures."""

import json
from pathlib import Path

import pytest

from bench import papers


def test_a_loss_at_intervals_gives_the_figures_of_the_paper_within_two_per_cent() -> None:
    models = json.loads(Path(papers.__file__).with_suffix(".json").read_text())
    ratios = {
        (one["model"], name): papers.oobleck(one, interval_s) / one["published"]["oobleck"][name]
        for one in models
        for name, interval_s in papers.INTERVALS_S.items()
    }
    assert len(ratios) == 25
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=0.02)


def test_returns_to_checkpoints_give_varunas_figures_where_losses_are_rare() -> None:
    models = json.loads(Path(papers.__file__).with_suffix(".json").read_text())
    for one in models:
        published = one["published"]["varuna"]["6h"]
        own = papers.varuna(one, papers.INTERVALS_S["6h"])
        assert own == pytest.approx(published, rel=0.02)


def test_plans_around_slow_workers_are_within_a_tenth_of_the_bound() -> None:
    assert all(1 <= each["of_bound"] <= 1.10 for each in papers.malleus())
