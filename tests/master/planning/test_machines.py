"""What planning takes for nodes that differ: the weakest of them."""

from dataclasses import replace

import msgspec

from oobleck.core.profile import Profile
from oobleck.master.planning.requests import Machines, profile_on
from oobleck.master.state.node import Node
from support.trained import node, trained_job

H100, A100 = "cuda NVIDIA H100 80GB HBM3", "cuda NVIDIA A100-SXM4-80GB"


def test_an_estimate_is_for_the_slowest_kind_of_the_nodes() -> None:
    def profile(*kinds: str) -> Profile:
        nodes = [_of_kind(node(number), kind) for number, kind in enumerate(kinds, 1)]
        _, job = trained_job([node(number) for number in (1, 2, 3, 4)], 16)
        return profile_on(job.spec, Machines.of(job, nodes))

    slow, cpu = profile(A100, A100), profile("cpu AMD EPYC, 1 thread")
    assert profile(H100, A100, H100) == slow
    assert profile(H100, A100 + ", shared by 2") != slow
    assert profile(H100, H100) != slow
    assert profile(H100, "cpu AMD EPYC, 1 thread") == cpu != slow


def _of_kind(node: Node, kind: str) -> Node:
    return replace(node, facts=msgspec.structs.replace(node.facts, device_kind=kind))
