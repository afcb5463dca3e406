"""The order of samples as docs/sample-order.md defines it, in plain Python: another program's view.

Written from that page alone; it shares no code with the product, and must not import it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

WORD = 1 << 64


def derive(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "little")


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def permute(x: int, size: int, seed: int, epoch: int) -> int:
    h = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [derive(seed, "order", epoch, i) for i in range(6)]
    while True:
        left, right = x >> h, x % (1 << h)
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) % (1 << h))
        x = (left << h) + right
        if x < size:
            return x


@dataclass(frozen=True)
class Samples:
    """The samples of a job on a corpus."""

    tokens: Sequence[int]
    sequence_length: int
    fraction: float | None = None

    @property
    def windows(self) -> int:
        return (len(self.tokens) - 1) // self.sequence_length

    @property
    def held_out(self) -> int:
        return max(1, round(self.fraction * self.windows)) if self.fraction else 0

    @property
    def trained(self) -> int:
        return self.windows - self.held_out

    def window_at(self, place: int) -> int:
        return permute(place, self.windows, 0, -1) if self.held_out else place

    def row(self, window: int) -> list[int]:
        begin = window * self.sequence_length
        return list(self.tokens[begin : begin + self.sequence_length + 1])

    def step(self, step: int, global_batch: int, seed: int) -> list[list[int]]:
        rows = []
        for position in range(global_batch):
            sample = (step - 1) * global_batch + position
            epoch, index = divmod(sample, self.trained)
            rows.append(self.row(self.window_at(permute(index, self.trained, seed, epoch))))
        return rows

    def evaluated(self, samples: int) -> list[list[int]]:
        places = range(self.trained, self.trained + min(samples, self.held_out))
        return [self.row(self.window_at(place)) for place in places]

    def digest(self, step: int, global_batch: int, seed: int) -> str:
        digests = [
            hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in row)).digest()
            for row in self.step(step, global_batch, seed)
        ]
        return hashlib.sha256(b"".join(digests)).hexdigest()
