"""Checks of two devices that CPUs can stand for: two processes connect and sum."""

import os
import subprocess
import sys

import msgspec

from oobleck.host.device import worker_environment
from oobleck.host.finding import Finding


def test_two_processes_connect_and_sum() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "oobleck.worker.doctor", "sums", "cpu", "cpu"],
        env={**os.environ, **worker_environment("cuda")},
        capture_output=True,
        check=True,
        timeout=150,
    )
    found = msgspec.json.decode(result.stdout, type=Finding)
    assert (found.check, found.level) == ("sums", "pass")
    assert "a sum is right" in found.what
