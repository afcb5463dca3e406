"""Thousands of wrong messages, and the master and what it guards are as they were.

`make soak` sends more than a hundred thousand. OOBLECK_FUZZ=SEED:FIRST-LAST repeats those cases.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import grpc
import pytest
from fuzz.fuzzer import Fuzzer, memory, witnessed
from fuzz.mutation import REQUESTS

from oobleck.proto import control_pb2 as pb
from support import loops
from support.masters import master

#: Long enough for a machine that does much else.
PATIENT = ("--detection", "wan")
#: Bytes that allocators may keep.
SLACK = 48 << 20


async def fuzz(folder: Path, seed: int, warm: Iterable[int], cases: Iterable[int]) -> Fuzzer:
    with master(folder / "state", spans=PATIENT) as running:
        fuzzer = Fuzzer(running, seed)
        async with witnessed(running):
            await fuzzer.run(warm)
            before = memory(running)
            await fuzzer.run(cases)
            grown = memory(running) - before
        assert grown < SLACK, f"seed {seed}: memory grew by {grown >> 20} MiB"
    return fuzzer


def test_every_call_is_tried_with_its_own_message() -> None:
    wanted = {
        f"/{service.full_name}/{method.name}": method.input_type.full_name
        for service in pb.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if not method.client_streaming
    }
    assert {path: made.DESCRIPTOR.full_name for path, made in REQUESTS.items()} == wanted


def test_wrong_messages_change_nothing(tmp_path: Path) -> None:
    again = os.environ.get("OOBLECK_FUZZ")
    seed, first, last = 5, 0, 1000
    if again:
        text, _, span = again.partition(":")
        seed, first, last = int(text), *map(int, span.split("-"))
        last += 1
    fuzzer = loops.run(fuzz(tmp_path, seed, (), range(first, last)))
    if not again:
        assert fuzzer.mutations > 2500
        # Neither is all of it refused at the door, nor all of it taken.
        assert fuzzer.answers[grpc.StatusCode.INVALID_ARGUMENT] > 100
        assert fuzzer.answers[grpc.StatusCode.OK] > 30, fuzzer.answers


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 104))
def test_a_hundred_thousand_wrong_messages(tmp_path: Path, seed: int) -> None:
    fuzzer = loops.run(fuzz(tmp_path, seed, range(2000), range(2000, 10_000)))
    assert fuzzer.mutations > 25_000
