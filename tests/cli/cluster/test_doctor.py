"""`oobleck doctor --gpu`: a host without a GPU, checks that hang or die, and what findings say."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from oobleck.cli.cluster.doctor import run_check
from oobleck.core.orders import Finding
from oobleck.host.doctor.gpus import environment, health, locked_memory, shared_memory
from oobleck.host.gpu.sample import GpuProcess, GpuSample, Sample, Xid
from support.commands import refused, run

BUS = "0000:3b:00.0"


def test_a_host_without_a_gpu_is_told_so_and_what_can_be_looked_at_is() -> None:
    result = run("doctor", "--gpu", "--json")
    assert result.returncode == 1, result.stderr
    found = {each["check"]: each for each in json.loads(result.stdout)["findings"]}
    assert found["gpu"]["level"] == "fail"
    assert found["gpu"]["what"].startswith("no GPU can be used here (torch")
    assert found["gpu"]["fix"].startswith("check the driver")
    assert found["driver"]["level"] == "fail"
    assert not [name for name, each in found.items() if each["level"] != "pass" and not each["fix"]]


def test_wrong_usage_is_one_line() -> None:
    assert "--here: checks only this host" in refused(run("doctor", "--here", "--pairs"), 2)
    assert "--gpu: checks only" in refused(run("doctor", "--gpu", "--node", "n1"), 2)
    assert "--gpus: requires --gpu" in refused(run("doctor", "--gpus", "0"), 2)
    assert "0 is given twice" in refused(run("doctor", "--gpu", "--gpus", "0,0"), 2)


def test_this_host_alone_is_looked_at_without_a_master(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    data, saved = str(tmp_path / "none"), str(tmp_path / "file")
    result = run("doctor", "--here", "-o", "json", "--data", data, "--checkpoints", saved)
    assert result.returncode == 1, result.stderr
    failed = {f["what"] for f in json.loads(result.stdout)["findings"] if f["level"] == "fail"}
    assert failed == {f"{data}: no such file or directory", f"{saved}: is no folder"}
    well = run("doctor", "--here", "--checkpoints", str(tmp_path))
    assert (well.returncode, well.stdout.splitlines()[-1].split(",")[-2]) == (0, " 0 fail")


def test_a_master_that_is_named_has_to_be_there() -> None:
    assert "cannot reach a master" in refused(run("doctor", "--master", "127.0.0.1:1"), 4)


def check(code: str, limit_s: float = 60) -> list[Finding]:
    return list(run_check("it", [sys.executable, "-c", code], limit_s, os.environ))


def test_what_a_check_says_is_passed_on() -> None:
    said = '{"check": "it", "level": "slow", "what": "w", "fix": "f"}'
    (found,) = check(f"print('{said}')")
    assert str(found) == "SLOW  it: w; f"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("import time; time.sleep(99)", "no answer within 0.2 s: it hangs"),
        ("raise SystemExit('no kernel image')", "ends with exit code 1: no kernel image"),
        ("import os; os.abort()", "ends with exit code -6: no output"),
        ("print('what?')", "ends with exit code 0: what?"),
    ],
)
def test_a_check_that_hangs_or_dies_is_a_finding(code: str, what: str) -> None:
    (found,) = check(code, 0.2 if "sleep" in code else 60)
    assert (found.level, found.what) == ("fail", what)
    assert found.fix


def test_the_health_of_gpus_is_by_nvml() -> None:
    well = GpuSample(bus=BUS, name="H100")
    hot = GpuSample(bus=BUS, name="H100", clock_reasons=0x48, clock_mhz=1200, most_clock_mhz=1980)
    busy = GpuSample(bus=BUS, name="H100", processes=(GpuProcess(pid=2**22 + 1),))

    def levels(board: GpuSample, *codes: int) -> list[tuple[str, str]]:
        xids = tuple(Xid(bus=BUS, code=code) for code in codes)
        return [(f.level, f.what) for f in health(Sample(gpus=(board,), xids=xids))]

    assert levels(well) == [("pass", f"GPU {BUS} (H100) is well, and it is unused")]
    assert levels(well, 79)[0] == ("fail", f"GPU {BUS}: Xid 79, it has fallen off the bus")
    assert levels(well, 94)[0][0] == "warn"
    assert levels(hot) == [("slow", f"GPU {BUS} (H100) is held back: too hot, 1200 of 1980 MHz")]
    assert levels(busy) == [("warn", f"GPU {BUS} (H100) is used by another (process {2**22 + 1})")]
    (unknown,) = health(Sample(problem="NVML: Driver Not Loaded"))
    assert (unknown.level, "Driver Not Loaded" in unknown.what) == ("warn", True)


def test_limits_and_variables_that_stand_against_nccl(tmp_path: Path) -> None:
    assert shared_memory(tmp_path).check == "shared memory"
    assert list(locked_memory(64 << 10, tmp_path / "none")) == []
    (tmp_path / "mlx5_0").mkdir()
    (little,) = locked_memory(64 << 10, tmp_path)
    assert (little.level, "64.0 KiB" in little.what) == ("fail", True)
    (enough,) = locked_memory(resource.RLIM_INFINITY, tmp_path)
    assert enough.level == "pass"
    given = {"NCCL_NVLS_ENABLE": "1", "CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "8"}
    (against,) = environment(given)
    assert against.what == "NCCL_NVLS_ENABLE=1 conflicts with the 0 that workers need"
