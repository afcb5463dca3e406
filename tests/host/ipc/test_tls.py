"""Whether gRPC is told which TLS it speaks before it is loaded."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["agent", "cli", "master"])
def test_a_package_that_comes_too_late_to_refuse_older_tls_says_so(package: str) -> None:
    def run(code: str) -> subprocess.CompletedProcess[str]:
        unset = {name: value for name, value in os.environ.items() if "GRPC" not in name}
        return subprocess.run(
            [sys.executable, "-c", code], env=unset, capture_output=True, text=True, check=False
        )

    late = run(f"import grpc, oobleck.{package}")
    assert "import oobleck's packages first" in late.stderr.splitlines()[-1]
    in_time = run(f"import oobleck.{package}, grpc; import oobleck.master")
    assert in_time.returncode == 0, in_time.stderr
