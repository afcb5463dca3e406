"""What others wrote moves no cursor: escapes, controls and direction marks are shown as text."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from oobleck.cli.main import oobleck
from oobleck.cli.output import text
from oobleck.cli.output.events import event_line, incident_block
from oobleck.cli.output.text import progress_line
from oobleck.cli.reading.show import logs as logs_command
from oobleck.core.checkpoint import LayerFile, Manifest, format_manifest, layer_file
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import TrainingSpec
from oobleck.host.log import FieldFormatter
from oobleck.proto import control_pb2 as pb
from support.operators_master import answering

#: Title, colour by one byte, overwriting, right to left, two sorts of line end, delete.
HOSTILE = "\x1b]0;owned\x07\x9b31m\r\x08\u202e\u2028\x85\nforged\x7f\u2066"
EVENT_FIELDS = (
    *("reason", "node", "path", "summary", "instead", "source", "cause", "passed_over", "rule"),
    *("outcome", "to_generation", "from_generation", "strange"),
)


def is_shown(output: str) -> bool:
    return all(line.isprintable() and line != "forged" for line in output.split("\n"))


def spoil(message: Message) -> Message:
    """Every text of the message, and of those in it."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_STRING:
            if field.is_repeated:
                getattr(message, field.name).append(HOSTILE)
            else:
                setattr(message, field.name, HOSTILE)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            below = getattr(message, field.name)
            spoil(below.add() if field.is_repeated else below)
    return message


def test_status_and_nodes() -> None:
    job, node = spoil(pb.JobStatus()), spoil(pb.NodeInfo())
    shown = (
        text.job_text(job),
        text.jobs_table([job]),
        text.nodes_table([node]),
        progress_line(job),
    )
    assert all(map(is_shown, shown)), shown
    assert is_shown(text.dump(text.plain(job)))
    assert is_shown(text.dump_line(text.plain(node)))


@pytest.mark.parametrize(
    "event",
    [
        *("node_left_out", "node_lost", "waiting", "profile", "checkpoint_saved", "failed"),
        *("put_back", "resumed", HOSTILE),
    ],
)
def test_events(event: str) -> None:
    numbers = {"step": 1, "bytes": 1, "seconds": 1.0, "detect_s": 0.1, "time": 1.0}
    texts = {**dict.fromkeys(EVENT_FIELDS, HOSTILE), "passed_over": [HOSTILE]}
    assert is_shown(event_line({"event": event, **numbers, **texts}))


def test_an_incident() -> None:
    seen = {"by": HOSTILE, "observer": HOSTILE, "about": HOSTILE, "saw": HOSTILE, "time": 1.0}
    record: dict[str, Any] = {
        "incident": 1,
        "outcome": HOSTILE,
        "total_s": 1.0,
        "opened_at": 1.0,
        "root_cause": {"summary": HOSTILE, "log_tail": [HOSTILE]},
        "first_seen": seen,
        "witnesses": [seen, seen],
        "also_lost": [{"time": 1.0, "summary": HOSTILE, "consequence": True}],
        "phases": {HOSTILE: 1.0},
        "attempts": [{"generation": 2, "rule": HOSTILE, "phases": {HOSTILE: 1.0}, "total_s": 1.0}],
        "redo_steps": [],
        "steps_redone": 0,
        "rolled_forward": False,
        "received_bytes": 0,
        "from_generation": HOSTILE,
        "to_generation": 2,
        "can_lose": 1,
    }
    assert is_shown(incident_block(record, width=60))


def test_logs_are_raw_for_who_asks() -> None:
    line = pb.LogLine(node="n1", slot=0, line=HOSTILE, time="t")
    with answering(Logs=lambda request: iter([line])) as address:

        def logs(*flags: str) -> str:
            asked = ["demo-1", "--master", address, *flags]
            return CliRunner().invoke(logs_command, asked).output

        assert is_shown(logs())
        assert r"\x1b]0;owned\x07\x9b31m" in logs()
        assert logs("--raw") == f"n1/0  {HOSTILE}\n"
        assert is_shown(logs("--json"))
        assert json.loads(logs("--json"))["line"] == HOSTILE
        assert is_shown(logs("-o", "yaml"))
        assert yaml.safe_load(logs("-o", "yaml"))["line"] == HOSTILE


def test_a_checkpoint_whose_manifest_names_escapes(tmp_path: Path) -> None:
    folder = tmp_path / "step-000000003-0123abcd"
    folder.mkdir()
    manifest = Manifest(
        job="demo-1",
        step=3,
        created=1.0,
        model=ModelSpec(layers=1, hidden=4, heads=1, sequence_length=4),
        training=TrainingSpec(steps=3, global_batch=2),
        data="da7a",
        files=tuple(
            LayerFile(name=layer_file(layer), layer=layer, bytes=1, sha256="0" * 64)
            for layer in range(3)
        ),
    )
    text = format_manifest(replace(manifest)).decode()
    hostile = json.dumps(HOSTILE)[1:-1]
    for name in ("layer-00001.safetensors", '"gpt"'):
        spoiled = text.replace(name, f'"{hostile}"' if name[0] == '"' else hostile)
        (folder / "manifest.json").write_text(spoiled)
        for command in ("list", "verify"):
            result: Result = CliRunner().invoke(oobleck, ["checkpoint", command, str(tmp_path)])
            assert is_shown(result.output), result.output
            assert "owned" in result.output or command == "list"


def test_log_lines_of_daemons() -> None:
    record = logging.makeLogRecord({"msg": HOSTILE, "name": "x", "node": HOSTILE, "levelname": "I"})
    line = FieldFormatter().format(record)
    assert line.isprintable()
    assert "\\u001b" in line
    assert "\\x1b" in line
