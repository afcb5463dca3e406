"""What --help prints on a terminal of 80 columns."""

import os
import re
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from oobleck.cli.main import oobleck
from oobleck.cli.tracking.track import TRACKERS

WIDTH = 80


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command below this one, itself first."""
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*words, name))


def shown(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((WIDTH, 24)))
    done = CliRunner().invoke(oobleck, [*words, "--help"])
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("words", list(commands(oobleck)), ids="-".join)
def test_lines_about_commands_are_whole(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (
        shown(words, monkeypatch).partition("\nCommands:\n")[2].partition("\n\n")[0].splitlines()
    )
    assert not [line for line in listed if line.endswith("...")], "cut off"


def test_every_program_that_draws_metrics_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = [one for one in shown((), monkeypatch).splitlines() if one.startswith("  track ")]
    names = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow"}
    assert all(names[tracker] in line for tracker in TRACKERS)


def test_a_spec_to_copy_is_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"^ *mtbf=\S+,seed=1$", shown(("simulate",), monkeypatch), re.M)
