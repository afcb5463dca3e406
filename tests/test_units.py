"""The service units: what they shut, and what training needs open."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parent.parent / "deploy"
#: The most that `systemd-analyze security` may say.
EXPOSURE = {"oobleck-master": 2.0, "oobleck-agent": 2.5}
SHUT = {
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "RestrictSUIDSGID": "yes",
    "RestrictNamespaces": "yes",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectKernelLogs": "yes",
    "ProtectControlGroups": "yes",
    "ProtectProc": "invisible",
    "SystemCallArchitectures": "native",
}
#: With any of these an agent's workers have no GPU, or cannot compile kernels.
BREAKS_WORKERS = {
    "PrivateDevices",
    "DevicePolicy",
    "DeviceAllow",
    "ProtectClock",
    "MemoryDenyWriteExecute",
    "PrivateNetwork",
    "PrivateUsers",
    "ProcSubset",
}


def settings(unit: str) -> list[tuple[str, str]]:
    text = (DEPLOY / f"{unit}.service").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and line[0] not in "#["]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


@pytest.mark.parametrize("unit", EXPOSURE)
def test_a_daemon_has_no_more_of_its_host_than_it_needs(unit: str) -> None:
    assert SHUT.items() <= dict(settings(unit)).items()
    filters = [value for key, value in settings(unit) if key == "SystemCallFilter"]
    assert filters == ["@system-service", "~@privileged"], "@resources is needed: open files, cores"
    assert dict(settings(unit))["User"] == "oobleck"


def test_an_agents_unit_leaves_its_workers_what_they_need() -> None:
    found = dict(settings("oobleck-agent"))
    assert not BREAKS_WORKERS & found.keys()
    assert found["ProtectHome"] == "read-only", "data may stand there"
    assert found["OOMPolicy"] == "continue", "a worker's end is the agent's to answer"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("unit", EXPOSURE)
def test_what_systemd_says_of_a_unit(unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    result = subprocess.run(
        [*command, str(DEPLOY / f"{unit}.service")], capture_output=True, text=True, check=False
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", result.stdout)
    assert found is not None, result.stdout + result.stderr
    assert float(found[1]) <= EXPOSURE[unit]
    assert "Unknown" not in result.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    """But that the programs, which the reader installs, are not there."""
    wrong = tmp_path / "wrong.service"
    wrong.write_text("[Service]\nExecStart=/bin/true\nRestarts=always\n")
    paths = [*(str(DEPLOY / f"{unit}.service") for unit in EXPOSURE), str(wrong)]
    command = ["systemd-analyze", "verify", "--man=no", *paths]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    mine = [line for line in result.stderr.splitlines() if "oobleck" in line or "wrong" in line]
    found = [line for line in mine if "is not executable: No such file" not in line]
    assert len(found) == 1, result.stderr
    assert "'Restarts'" in found[0], "it would have told"
