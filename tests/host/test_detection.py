"""The table of time-outs: what is written down is what is used, and it agrees with itself."""

import re
from dataclasses import fields

import pytest

from oobleck.host import detection
from oobleck.host.detection import DETECTIONS, MODES, Detection, choose
from support.folders import ROOT

#: The words of the tables for the fields' names.
FIELDS = {
    "return": "return_s",
    "ping time-out": "ping_timeout_s",
    "lag limit": "lag_limit_s",
    "grace": "replacement_grace_s",
    "settle": "join_settle_s",
    "ping every": "ping_every_s",
    "longest retry": "longest_retry_s",
    "witness window": "witness_window_s",
    "longest regroup": "longest_regroup_s",
}


def rows(text: str) -> dict[str, tuple[float, ...]]:
    """Of a table: the numbers by field."""
    line = re.compile(r"^[ |`]*([a-z][a-z -]*?)[`| ]+([0-9.]+)[| ]+([0-9.]+)[| ]+([0-9.]+)[ |]")
    found = [match for match in map(line.match, text.splitlines()) if match]
    return {
        FIELDS.get(m.group(1), f"{m.group(1)}_s"): tuple(float(m.group(i)) for i in (2, 3, 4))
        for m in found
    }


def differing() -> dict[str, tuple[float, ...]]:
    """The spans in which the modes differ; one of them follows from others."""
    names = (*(field.name for field in fields(Detection)), "silence_s")
    found = {name: tuple(getattr(DETECTIONS[m], name) for m in MODES) for name in names}
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def test_the_manual_tells_the_numbers() -> None:
    assert rows((ROOT / "docs" / "faults.md").read_text()) == differing()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("small", "factor", "large"), [rule[:3] for rule in detection._ORDER])
def test_each_contradiction_is_told_by_both_names(
    mode: str, small: str, factor: float, large: str
) -> None:
    base = DETECTIONS[mode]  # type: ignore[index]
    with pytest.raises(ValueError, match="must be at least") as refused:
        choose(mode, {large: factor * getattr(base, small) * 0.9})  # type: ignore[arg-type]
    # One that is made smaller may contradict several others; the first is told.
    assert large in str(refused.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e6])
def test_what_is_no_span_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        Detection(lease_s=value)


def test_the_default_tells_a_silent_host_within_three_to_five_seconds() -> None:
    chosen = DETECTIONS["balanced"]
    assert chosen == Detection()
    assert chosen.lease_s - chosen.heartbeat_s >= 3.0
    assert chosen.lease_s + chosen.heartbeat_s <= 5.0
    assert max(chosen.hang_s, chosen.stall_s) + chosen.heartbeat_s <= 10.0
