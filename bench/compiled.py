"""What torch.compile gains for a layer on this machine's CPU: forward and backward, in turns.

    python -m bench.compiled [--rounds N]

Each shape is computed by one thread, as it is and as `training: {compile: true}` has a worker do
it, which needs a C++ compiler; torch's cache of what was compiled before is not used.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

from oobleck.worker.models.compiled import compiled

#: (width, tokens, rows) of a micro-batch.
SHAPES = ((64, 64, 4), (256, 128, 2), (512, 256, 2))


class Block(nn.Module):
    """Transformer block like those of the built-in GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, width = x.shape
        heads = self.qkv(self.norms[0](x)).view(rows, tokens, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, width))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return hidden


class Sums(nn.Module):
    """Layer of many cheap operations on each number, limited by memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x * self.scale + 1 - x * 0.5 + x * 0.25
        return x


class Gates(nn.Module):
    """Layer of several functions of each number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + torch.tanh(x * self.scale) * torch.sigmoid(x)
        return x


def seconds(layer: Callable[[Tensor], Any], x: Tensor) -> float:
    began = time.perf_counter()
    layer(x).sum().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    config.compile_threads = 1
    for kind in (Block, Sums, Gates):
        for width, tokens, rows in SHAPES:
            layer = kind(width)
            torch.compiler.reset()  # all layers share one function
            fast = partial(compiled(), layer)
            x = torch.randn(rows, tokens, width, requires_grad=True)
            first = seconds(fast, x)
            with torch.compiler.set_stance("eager_on_recompile"):
                times = [(seconds(layer, x), seconds(fast, x)) for _ in range(rounds)]
            as_is, by_code = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
            print(
                f"{kind.__name__} {width} wide, {rows} x {tokens}: {as_is:.2f} ms as it is, "
                f"{by_code:.2f} ms compiled ({as_is / by_code:.2f}x), compiled in {first:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    with config.patch(force_disable_caches=True):
        main()
