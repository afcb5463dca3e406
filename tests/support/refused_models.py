"""Data sets and models that users bring and that cannot be trained as they are, and some that look
like it and can: what is said of each is in tests/worker/data/test_samples.py and
tests/worker/models/test_refusals.py.
"""

import dataclasses
import random
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.cpp_extension import load_inline
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, random_split

from oobleck.model import Model

SIZE, FEATURES, CLASSES = 64, 8, 4
POINTS = torch.randn(SIZE, FEATURES, generator=torch.Generator().manual_seed(1))
#: The one sample that is unlike the others, where one is.
ODD = SIZE - 1

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: Tensor


class Marked(Tensor):
    """A subclass that stays one when it is stacked."""


class Image(Tensor):
    """A subclass that does not, as those of torchvision."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(Tensor) if isinstance(found, cls) else found


class Wrapped(Tensor):
    """A subclass that computes nothing."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapped":
        made: Wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("it computes nothing")


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.view(FEATURES // 2, 2))


#: (point, number) to the inputs of a sample.
INPUTS: dict[str, Callable[[Tensor, int], Any]] = {
    "uint16": lambda x, i: np.arange(FEATURES, dtype=np.uint16),
    "uint32": lambda x, i: torch.arange(FEATURES).to(torch.uint32),
    "uint64": lambda x, i: {"ids": [np.uint64(i)]},
    "float8": lambda x, i: x.to(torch.float8_e4m3fn),
    "sparse": lambda x, i: x.to_sparse(),
    "rows": lambda x, i: x.view(2, -1).to_sparse_csr(),
    "nested": lambda x, i: torch.nested.as_nested_tensor([x, x[:3]], layout=torch.jagged),
    "elsewhere": lambda x, i: x.to("meta"),
    "marked": lambda x, i: x.as_subclass(Marked),
    "wrapped": lambda x, i: Wrapped(x),
    "masked": lambda x, i: np.ma.masked_array(x.numpy(), mask=[True] + [False] * 7),
    "objects": lambda x, i: np.array([[1.0, 2.0], [3.0]], dtype=object),
    "dates": lambda x, i: np.array(["2026-01-01"], dtype="datetime64[D]"),
    "text": lambda x, i: {"label": "cat"},
    "texts": lambda x, i: np.array(["cat", "dog"]),
    "nothing": lambda x, i: (x, None),
    "named": lambda x, i: Pair(x, x),
    "record": lambda x, i: Record(x),
    "mapping": lambda x, i: UserDict(x=x),
    "numbered": lambda x, i: {1: x},
    "huge": lambda x, i: 2**70,
    "generator": lambda x, i: (number for number in x),
    "empty": lambda x, i: {},
    "ragged": lambda x, i: x[: FEATURES - (i == ODD)],
    "other_key": lambda x, i: {"a": x} if i < ODD else {"a": x, "b": x},
    "other_type": lambda x, i: x if i < ODD else x.double(),
    # Good ones.
    "plain": lambda x, i: x,
    "big_endian": lambda x, i: x.numpy().astype(">f4"),
    "image": lambda x, i: x.as_subclass(Image),
    "parameter": lambda x, i: nn.Parameter(x),
    "with_history": lambda x, i: x.clone().requires_grad_() * 1,
    "expanded": lambda x, i: x[:1].expand(FEATURES),
    "backwards": lambda x, i: x.numpy()[::-1],
    "conjugate": lambda x, i: _complex(x).conj(),
    "negative": lambda x, i: _complex(x).conj().imag,
    "number": lambda x, i: i + 2j,
}


class Samples:
    """`of`: which kind of inputs it has; `size`: how many samples."""

    def __init__(self, of: str, size: int = SIZE) -> None:
        self._inputs = INPUTS[of]
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._inputs(POINTS[index], index), np.array(index % CLASSES, dtype=">i8")


class Records(Samples):
    """Whose samples are no pairs."""

    def __init__(self) -> None:
        super().__init__("plain")

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"pixels": inputs, "label": targets}


class Triples(Records):
    def __getitem__(self, index: int) -> Any:
        return (*Samples.__getitem__(self, index), 1.0)


class Unlabelled(Records):
    def __getitem__(self, index: int) -> Any:
        return Samples.__getitem__(self, index)[0], ()


def loader() -> Any:
    return DataLoader(TensorDataset(POINTS, POINTS), batch_size=4)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(POINTS)


DATA = Samples("plain")


class OneFile:
    """Reads all samples from one open file, slowly, as a lazily opened HDF5 file is read."""

    def __init__(self, folder: str) -> None:
        place = Path(folder) / "points"
        place.write_bytes(POINTS.numpy().tobytes())
        self._file = place.open("rb")

    def __del__(self) -> None:
        self._file.close()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._file.seek(index * FEATURES * 4)
        time.sleep(0.001)  # where another reader may move it
        read = bytearray(self._file.read(FEATURES * 4))
        return torch.frombuffer(read, dtype=torch.float32), index % CLASSES


@cache
def _tape(path: str) -> BinaryIO:
    return open(path, "rb")


class Tape:
    """Big-endian numbers from a file that all data sets of a process have open together."""

    def __init__(self, path: str) -> None:
        self._path = path

    @staticmethod
    def write(path: Path) -> None:
        path.write_bytes(POINTS.numpy().astype(">f4").tobytes())

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Any, int]:
        tape = _tape(self._path)
        tape.seek(index * FEATURES * 4)
        time.sleep(0.001)
        return np.frombuffer(tape.read(FEATURES * 4), dtype=">f4"), index % CLASSES


class Reused(Samples):
    """Gives the same memory each time, with other numbers."""

    def __init__(self) -> None:
        super().__init__("plain")
        self._memory = torch.empty(FEATURES)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._memory.copy_(POINTS[index]), index % CLASSES


def drawn_split() -> Any:
    """Half of the samples, as numpy, random and torch draw them."""
    first = np.random.permutation(SIZE)[: SIZE // 2]
    second = random.sample(range(SIZE // 2), 16)
    points = TensorDataset(POINTS, torch.arange(SIZE))
    chosen = Subset(Subset(points, first.tolist()), second)
    return random_split(chosen, [8, 8])[0]


def no_data() -> None:
    """Forgets to return it."""


def splits() -> Any:
    return {"train": Samples("plain"), "test": Samples("plain")}


def two_tensors() -> Any:
    return POINTS, torch.arange(SIZE)


# Models.


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(scores, labels, reduction="none")


FIRST, LAST = partial(nn.Linear, FEATURES, FEATURES), partial(nn.Linear, FEATURES, CLASSES)


class Doubled(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = FIRST()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


def built() -> Model:
    return Model(layers=[FIRST(), nn.ReLU(), LAST()], loss=loss)


def one_built() -> Model:
    return Model(layers=[FIRST, Block(), LAST], loss=loss)


def module_list() -> Model:
    return Model(layers=nn.ModuleList([FIRST(), LAST()]), loss=loss)  # type: ignore[arg-type]


def missing() -> Model:
    return Model(layers=[FIRST, None, LAST], loss=loss)  # type: ignore[list-item]


def no_list() -> Model:
    return Model(layers=nn.Linear(FEATURES, CLASSES), loss=loss)  # type: ignore[arg-type]


def mapping() -> Model:
    return Model(layers={"first": FIRST, "last": LAST}, loss=loss)  # type: ignore[arg-type]


def class_of_loss() -> Model:
    return Model(layers=[FIRST, LAST], loss=nn.CrossEntropyLoss)


def name_of_loss() -> Model:
    return Model(layers=[FIRST, LAST], loss="cross_entropy")  # type: ignore[arg-type]


def tied_without_pairs() -> Model:
    tied: Any = ("0.weight", "1.weight")
    return Model(layers=[FIRST, FIRST, LAST], loss=loss, tied=tied)


def doubled() -> Model:
    return Model(layers=Doubled(FIRST(), LAST()), loss=loss)


def hooked() -> Model:
    layers = nn.Sequential(FIRST(), LAST())
    layers.register_forward_hook(lambda module, x, output: 2 * output)
    return Model(layers=layers, loss=loss)


def no_model() -> Any:
    return nn.Sequential(FIRST(), LAST())


def from_generator() -> Model:
    """A good one: the builders come one after the other."""
    layers: Any = (build for build in (FIRST, Block, LAST))
    return Model(layers=layers, loss=loss)


def with_extension(folder: str) -> Model:
    """Compiles C++ when it is called."""
    Path(folder).mkdir(exist_ok=True)
    source = "int three() { return 3; }"
    load_inline("extension", source, functions=["three"], build_directory=folder)
    return from_generator()


class Growing(nn.Module):
    """Makes its parameter when it knows the width."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(x.shape[-1], device=x.device, dtype=x.dtype))
        out: Tensor = x * self.scale
        return out


class Freezing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.requires_grad_(not self.training)
        return super().forward(x)


class Inference(Block):
    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnBackward(Block):
    """Adds a penalty by itself."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.enable_grad():
                self.inner.weight.square().sum().backward()
        return super().forward(x)


def growing() -> Model:
    return Model(layers=[FIRST, Growing, LAST], loss=loss)


def freezing() -> Model:
    return Model(layers=[FIRST, Freezing, LAST], loss=loss)


def inference() -> Model:
    return Model(layers=[FIRST, Inference, LAST], loss=loss)


def own_backward() -> Model:
    return Model(layers=[FIRST, OwnBackward, LAST], loss=loss)


def learned_loss() -> Model:
    temperature = nn.Parameter(torch.ones(()))
    return Model(
        layers=[FIRST, LAST], loss=lambda scores, labels: loss(scores * temperature, labels)
    )


def writing_loss() -> Model:
    """Hides the last class, in the targets themselves."""
    return Model(
        layers=[FIRST, LAST],
        loss=lambda scores, labels: loss(scores, labels.clamp_(max=CLASSES - 2)),
    )


def same_data() -> Model:
    """Two layers whose weights lie in one memory."""
    layers = nn.Sequential(FIRST(), FIRST(), LAST())
    layers[1].weight.data = layers[0].weight.data
    return Model(layers=layers, loss=loss)


class Wide(Block):
    def __init__(self) -> None:
        torch.set_default_dtype(torch.float64)
        super().__init__()


class Blind(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        return super().forward(x)


def wide() -> Model:
    return Model(layers=[FIRST, Wide, LAST], loss=loss)


def blind() -> Model:
    return Model(layers=[FIRST, Blind, LAST], loss=loss)
