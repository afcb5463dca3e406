"""The table of time-outs: what is written down is what is used, and it agrees with itself."""

import re
from dataclasses import fields

import pytest

from oobleck.host.detection import DETECTIONS, MODES, Detection, Mode
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

#: Required ratios: first name, factor, second name (at least so many times the first), and the
#: reason.
ORDER: tuple[tuple[str, float, str, str], ...] = (
    ("heartbeat_s", 2, "lease_s", "one late heartbeat is no death"),
    ("longest_retry_s", 1, "lease_s", "an agent must be able to come back before it is given up"),
    ("witness_window_s", 1, "lease_s", "two witnesses are to be faster than the lease"),
    ("lag_limit_s", 2, "lease_s", "a pause of the master must show before it ends a lease"),
    ("lease_s", 1, "return_s", "a node silent by the master's fault gets longer"),
    ("longest_retry_s", 2, "return_s", "agents must be able to come back to a new master"),
    ("answer_s", 1, "return_s", "waiting for a silent master must not lose a node"),
    ("heartbeat_s", 2, "hang_s", "one late sign of life is no hang"),
    ("lease_s", 1, "hang_s", "a silent host must be told from a hang"),
    ("hang_s", 1, "stall_s", "a hang is to be found before the others meet anew"),
    ("regroup_s", 1, "longest_regroup_s", "intervals grow"),
    ("longest_regroup_s", 2, "fruitless_s", "a job has more than one meeting before it fails"),
    ("replacement_grace_s", 1, "meeting_s", "the others wait in the meeting for the new process"),
    ("gpu_grace_s", 1, "meeting_s", "the others wait in the meeting for the new process"),
    ("away_s", 1, "start_timeout_s", "the wait for one node is within the wait for all"),
    ("stall_s", 1, "meeting_s", "groups take longer to build than operations in them"),
    ("stall_s", 1, "first_step_s", "the first step may take longer than others"),
    ("hang_s", 1, "storage_s", "files may take longer than computing"),
)


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
@pytest.mark.parametrize(("small", "factor", "large", "why"), ORDER)
def test_time_outs_that_belong_together_fit(
    mode: Mode, small: str, factor: float, large: str, why: str
) -> None:
    chosen = DETECTIONS[mode]
    assert getattr(chosen, large) >= factor * getattr(chosen, small), why


@pytest.mark.parametrize("mode", MODES)
def test_an_agent_notices_a_cut_connection_before_it_is_given_up(mode: Mode) -> None:
    chosen = DETECTIONS[mode]
    assert chosen.lease_s >= chosen.ping_every_s + chosen.ping_timeout_s


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
