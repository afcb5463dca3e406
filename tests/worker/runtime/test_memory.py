"""What a worker's memory is held against: what training takes, without what was there before."""

from bench.support.preloaded import Preloaded
from support.script import run_script

#: As a worker does: what its libraries keep and what measuring the model has freed comes first.
SCRIPT = """
import torch
from oobleck.worker.runtime.memory import MemoryMeter, give_back, keep_freed_memory

def mebibytes(count):
    return [torch.ones(1 << 18) for _ in range(count)]

keep_freed_memory()
meter = MemoryMeter(torch.device("cpu"))
measured = mebibytes(48)
kept = mebibytes(48)
del measured
give_back()
meter.begin()
meter.restart()
layers = mebibytes(64)
use = meter.read()
print((use.peak_bytes - use.base_bytes) >> 20)
"""


def test_the_peak_without_the_base_is_what_the_layers_take(preloaded: Preloaded) -> None:
    told, _ = run_script(preloaded, SCRIPT)
    assert 62 <= int(told) <= 72
