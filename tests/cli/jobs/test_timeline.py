"""How `oobleck profile --timeline` may be called, and what it says of a file."""

import pytest
from click.testing import CliRunner

from oobleck.cli.jobs.timeline import summary
from oobleck.cli.planning.profile import profile


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'JOB.yaml'"),
        (("--timeline", "out.json"), "oobleck profile --timeline OUT.json --job ID"),
        (("job.yaml", "--timeline", "out.json", "--job", "demo-1"), "a timeline is of a running"),
        (("job.yaml", "--job", "demo-1"), "--job and --steps go with --timeline"),
        (("--timeline", "out.json", "--job", "demo-1", "--steps", "0"), "1<=x<=100"),
    ],
)
def test_wrong_usage_says_what_is_right(arguments: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(profile, arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_summary_names_steps_workers_and_clocks() -> None:
    trace = {
        "traceEvents": [
            {"name": "thread_name", "ph": "M"},
            {"name": "step 7", "cat": "step"},
            {"name": "transfer", "cat": "recovery"},
        ],
        "otherData": {"clocks": {"n1": {"within_us": 0.0}, "n2": {"within_us": 250.0}}},
    }
    assert summary(trace) == (
        "step 7 of 1 worker, clocks within 250 us; change of the plan before it: transfer"
    )
