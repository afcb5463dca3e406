"""Who sends what: against every assignment, and against the proven bound."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.planner.programs.balance import Task, balance, least_load


def workers(count: int) -> list[WorkerId]:
    return [WorkerId(NodeName(f"n{number}"), 0) for number in range(count)]


def most_sent(tasks: Sequence[Task], senders: Sequence[WorkerId]) -> int:
    load: Counter[WorkerId] = Counter()
    for task, sender in zip(tasks, senders, strict=True):
        assert sender in task.senders
        load[sender] += task.size
    return max(load.values(), default=0)


def random_tasks(rng: random.Random, *, count: int, sizes: Sequence[int]) -> list[Task]:
    everyone = workers(rng.randint(2, 4))
    return [
        Task(
            size=rng.choice(sizes),
            near=(),
            far=tuple(rng.sample(everyone, rng.randint(1, len(everyone)))),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_tasks_of_one_size_have_the_least_load_of_all_ways(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        tasks = random_tasks(rng, count=rng.randint(1, 6), sizes=[7])
        best = min(most_sent(tasks, w) for w in itertools.product(*(t.senders for t in tasks)))
        assert most_sent(tasks, balance(tasks)) == best
        assert least_load(tasks) <= best


@pytest.mark.parametrize("seed", range(60))
def test_mixed_sizes_stay_near_the_least_load_and_above_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        tasks = random_tasks(rng, count=rng.randint(1, 6), sizes=[0, 3, 5, 8, 13])
        best = min(most_sent(tasks, w) for w in itertools.product(*(t.senders for t in tasks)))
        found = most_sent(tasks, balance(tasks))
        assert least_load(tasks) <= best <= found
        assert found <= best + max(task.size for task in tasks)


def test_many_blocks_and_a_few_big_layers_are_close_to_the_bound() -> None:
    """300 nodes lack 30 layers each, of which 80 hold any: within one block of the bound."""
    rng = random.Random(1)
    everyone = workers(400)
    holders = [tuple(sorted(rng.sample(everyone, 80))) for _ in range(98)]
    size = [500, *[100] * 96, 500]
    tasks = [
        Task(size=size[layer], near=(), far=holders[layer])
        for first in (0, 33, 65)
        for _ in range(40)
        for layer in range(first, first + 33)
    ]
    assert most_sent(tasks, balance(tasks)) <= max(500, least_load(tasks) + 100)


def test_a_sender_on_the_same_node_is_taken() -> None:
    far, near = workers(2)
    task = Task(size=4, near=(near,), far=(far, near))
    assert balance([task, task]) == [near, near]
    assert balance([]) == []
