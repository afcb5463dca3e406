"""Journals and snapshots whose plans are pipelines are read as those whose plans have routes."""

import base64
import contextlib
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.plan import Plan
from oobleck.master.storage import snapshot as snapshots
from oobleck.master.storage.journal import Journal, with_routes
from support.folders import ROOT
from support.plans import plan_of_cuts
from support.scenario import Player, durable

SCENARIO = ROOT / "tests/master/scenarios/overtaken.txt"
WRITTEN = (
    '{"generation":1,"pipelines":['
    '{"nodes":["n0","n1"],"stages":['
    '{"first_layer":0,"last_layer":0,'
    '"workers":[{"node":"n0","slot":0},{"node":"n0","slot":1}],"resident":false},'
    '{"first_layer":1,"last_layer":1,"workers":[{"node":"n1","slot":0}],"resident":false}],'
    '"first_microbatch":0,"microbatches":2},'
    '{"nodes":["n2"],"stages":['
    '{"first_layer":0,"last_layer":1,"workers":[{"node":"n2","slot":0}],"resident":false}],'
    '"first_microbatch":2,"microbatches":1}],"schedule":"zb-h1"}'
)


def with_pipelines(value: Any) -> Any:
    """The other way round."""
    if isinstance(value, list):
        return [with_pipelines(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not {"holds", "routes"} <= value.keys():
        return {name: with_pipelines(item) for name, item in value.items()}
    plan = decode(Plan, encode(value))
    pipelines = [
        decode(dict[str, Any], encode(pipeline)) | {"first_microbatch": share.start}
        for pipeline, share in zip(plan.pipelines, plan.shares, strict=True)
    ]
    return {
        "generation": plan.generation,
        "pipelines": pipelines,
        "schedule": plan.schedule,
    }


def test_a_plan_of_pipelines_is_one_of_routes() -> None:
    plan = decode(Plan, encode(with_routes(decode(object, WRITTEN))))
    assert plan == plan_of_cuts(([(1, 2), 1], 2), ([2], 1), schedule="zb-h1")
    assert encode(with_pipelines(decode(object, encode(plan)))).decode() == WRITTEN.replace(
        '"first_microbatch":0,"microbatches":2', '"microbatches":2,"first_microbatch":0'
    ).replace('"first_microbatch":2,"microbatches":1', '"microbatches":1,"first_microbatch":2')


def test_what_is_no_plan_is_told() -> None:
    for pipelines in ([{}], [1], 1):
        with pytest.raises(ValueError, match="not a plan of pipelines"):
            with_routes({"generation": 1, "pipelines": pipelines})


def test_a_journal_is_read(tmp_path: Path) -> None:
    player, path = Player(), tmp_path / "journal.log"
    player.play(SCENARIO.read_text())
    with contextlib.closing(Journal(path)) as journal:
        for unix, event in player.journal:
            journal.append(event, unix)
        journal.commit()
    header, *lines = path.read_bytes().splitlines(keepends=True)
    changed = []
    for line in lines:
        mark, payload = line[9:11], line[11:]
        body = mark + encode(with_pipelines(decode(object, payload)))
        changed.append(b"%08x %b\n" % (zlib.crc32(body), body))
    assert changed != lines
    assert any(b'"pipelines"' in line and b'"routes"' not in line for line in changed)
    path.write_bytes(header + b"".join(changed))
    with contextlib.closing(Journal(path)) as journal:
        assert list(journal.replay()) == player.journal


def test_a_snapshot_is_read() -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    packed = zlib.decompress(base64.b64decode(snapshots.take(player.state, {})))
    whole = msgspec.msgpack.decode(packed)
    changed = msgspec.msgpack.encode(with_pipelines(whole))
    assert changed != msgspec.msgpack.encode(whole)
    restored, _ = snapshots.restore(base64.b64encode(zlib.compress(changed)).decode(), 0.0)
    assert durable(restored) == durable(player.state)


def test_a_snapshot_with_fields_that_are_asked_for_no_more_is_read() -> None:
    player = Player()
    player.play(SCENARIO.read_text())
    packed = zlib.decompress(base64.b64decode(snapshots.take(player.state, {})))
    whole = msgspec.msgpack.decode(packed)
    whole["state"]["found"] = 7
    for job in whole["jobs"].values():
        del job["adopted_in"]
        job["adopted"] = True
    changed = base64.b64encode(zlib.compress(msgspec.msgpack.encode(whole))).decode()
    restored, _ = snapshots.restore(changed, 0.0)
    assert {job.adopted_in for job in restored.jobs.values()} == {0}
    whole["state"]["unheard_of"] = 7
    changed = base64.b64encode(zlib.compress(msgspec.msgpack.encode(whole))).decode()
    with pytest.raises(ValueError, match="ClusterState has no unheard_of"):
        snapshots.restore(changed, 0.0)
