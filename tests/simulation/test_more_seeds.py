"""The second half of the seeds of `test_simulation`, where they are many."""

import pytest
from simulation.test_simulation import AT_A_TIME, FIRST, HALF, SEEDS, played


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.parametrize("first", range(HALF, FIRST + SEEDS, AT_A_TIME))
def test_every_invariant_holds_and_every_job_ends(first: int) -> None:
    for seed in range(first, min(first + AT_A_TIME, FIRST + SEEDS)):
        played(seed)
