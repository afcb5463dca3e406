"""The shipped dashboard and alerts, and the page about metrics, name what is really served.

That all families are served is shown in `tests/cluster/test_lifecycle.py`, by a cluster that runs.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from oobleck.agent import metrics as of_agent
from oobleck.host.metrics import SHORT_S, Durations, Family, Reading, families_of, render
from oobleck.master import metrics as of_master
from support.metrics_page import PAGE, with_lists

DEPLOY = Path(__file__).parent.parent / "deploy"
FAMILIES = (*of_master.FAMILIES, *of_agent.FAMILIES)
_NAME = re.compile(r"\b((?:oobleck|process)_[a-z_]+)\b(?!-)")
_SELECTED = re.compile(r"(oobleck_\w+)\{([^}]*)\}")
#: Labels that Prometheus gives to all that it reads.
_OF_TARGETS = {"job", "instance"}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana" / "oobleck.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", ())]
    notes = board["annotations"]["list"]
    query = board["templating"]["list"][1]["query"]["query"]
    return [query, *(one["expr"] for one in (*rules(), *targets, *notes))]


def series(family: Family) -> set[str]:
    if family.kind != "histogram":
        return {family.name}
    return {f"{family.name}_{end}" for end in ("bucket", "sum", "count")}


def test_every_name_and_label_of_alerts_and_dashboard_is_served() -> None:
    served = {name: family for family in FAMILIES for name in series(family)}
    found = expressions()
    used = {name for text in found for name in _NAME.findall(text)}
    of_process = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
    assert len(used) > 40
    assert used - set(served) <= of_process
    selected = [pair for text in found for pair in _SELECTED.findall(text)]
    assert len(selected) > 10
    for name, matchers in selected:
        labels = set(re.findall(r"(\w+)\s*(?:=|!)", matchers))
        assert labels <= {*served[name].labels, "le", *_OF_TARGETS}, (name, matchers)


def test_names_follow_prometheus_conventions() -> None:
    names = [family.name for family in FAMILIES]
    assert len(of_master.FAMILIES) >= 40
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch("oobleck_[a-z_]+", family.name)
        assert re.fullmatch(r"[A-Z1].*\.", family.help), family
        # What Prometheus itself puts on every series would hide ours.
        assert not _OF_TARGETS & set(family.labels), family
        assert not re.search("_(ms|milli|percent|kb|mb)", family.name)


@pytest.mark.parametrize("families", [of_master.FAMILIES, of_agent.FAMILIES])
def test_both_formats_can_be_read(families: tuple[Family, ...]) -> None:
    """Of every family a value, by parsers that refuse what Prometheus does, and more."""
    took = Durations(SHORT_S).read()
    readings = [
        Reading(f, {tuple("x" * len(f.labels)): took if f.kind == "histogram" else 1})
        for f in families
    ]
    plain, with_units = (render(readings, openmetrics=wish).decode() for wish in (False, True))
    names = {family.base for family in families}
    assert names <= {found.name for found in text_string_to_metric_families(plain)}
    assert names <= {found.name for found in openmetrics.text_string_to_metric_families(with_units)}


def test_one_family_has_one_name_in_openmetrics() -> None:
    module = ModuleType("probe")
    module.__dict__.update(
        gauge=Family("gauge", "probe_steps", "A."),
        counter=Family("counter", "probe_steps_total", "B."),
    )
    with pytest.raises(ValueError, match="probe_steps in OpenMetrics; rename one"):
        families_of(module)


def test_every_alert_says_what_is_wrong_and_the_fix() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "fix"}, rule["alert"]


def test_the_page_has_all_metrics() -> None:
    page = PAGE.read_text()
    assert page == with_lists(page), "run: cd tests && python -m support.metrics_page"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("check rules", DEPLOY / "prometheus" / "alerts.yml"),
        ("check config", DEPLOY / "prometheus" / "prometheus.yml"),
        ("test rules", Path(__file__).parent / "alerts.yml"),
    ],
)
def test_promtool_takes_the_alerts_and_they_fire_when_they_should(task: str, path: Path) -> None:
    command = ["promtool", *task.split(), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
