"""Layers through torch's compiler, where the job wants it (`training.compile`).

All layers go through one compiled function that has the module as an argument. So weights are
inputs of the compiled code. Layers of the same code share it, however many there are and whichever
a plan puts here. All of a model is compiled before its worker is ready
(`oobleck.worker.profiling.preflight`), and nothing from then on. No step waits for the compiler,
and layers that nothing compiled fits run as they are. Must not know which layers are compiled.

`Compilation` finds out which layers torch takes, where a job is submitted. It traces a layer whole,
forward and backward, on the numbers or shapes that the layer was described by. No machine code is
made of it, so no C++ compiler is needed.
"""

import errno
import fcntl
import importlib
import logging
import os
import re
import stat
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.worker.models.tree import Tree, map_tensors
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import NodeError

#: Most codes that a model is compiled into. More means that each layer has its own, for example
#: because of a number in it. Each code has variants: for training, for evaluation, for each number
#: of workers that share a layer.
MOST_CODES = 16
_VARIANTS = 16
#: Place in the user's code where torch gave up: the last one in its message.
_PLACE = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')
_COMPILER = (
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
)


class Prepared(nn.Module):
    """A layer that may have a part that is never compiled, and comes first."""

    def prepare(self, x: Any) -> Any:
        """Return what `compute` takes, from the layer's input: by default that itself."""
        return x

    def compute(self, prepared: Any) -> Any:
        raise NotImplementedError


#: Function that runs a module on a tree.
Call = Callable[[nn.Module, Tree], Tree]


def compiled(**options: Any) -> Call:
    """Return a function that calls a module by compiled code: one code for all that are alike.
    `options` are torch.compile's."""

    def whole(module: nn.Module, x: Any) -> Any:
        return module.compute(x) if isinstance(module, Prepared) else module(x)

    # This loads the compiler.
    made: Call = torch.compile(whole, fullgraph=True, dynamic=False, **options)

    def call(module: nn.Module, x: Tree) -> Tree:
        x = map_tensors(_in_order, x)
        given = module.prepare(x) if isinstance(module, Prepared) else x
        with _without_gradients(module):
            return made(module, given)

    return call


@contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Detach the gradients from the weights of `module` within the context: the compiler refuses a
    weight whose gradient has another type. No backward, which adds to them, runs within."""
    held = [(weight, weight.grad) for weight in module.parameters() if weight.grad is not None]
    for weight, _ in held:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in held:
            weight.grad = gradient


@cache
def _compiled() -> Call:
    return compiled()


def run_compiled(module: nn.Module, x: Tree) -> Tree:
    """Run `module` on `x` by compiled code; return what it gives."""
    return _compiled()(module, x)


def _in_order(tensor: Tensor) -> Tensor:
    """Return `tensor` with the strides of a new tensor. Code is compiled for given strides, and
    received tensors have these."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            # Via one dimension, which resets the arbitrary strides of dimensions of size 1.
            return tensor.reshape(-1).view(tensor.shape)
        expected *= max(size, 1)
    return tensor


def load_compiler() -> bool:
    """Import the compiler, which takes 2 s and 150 MB, and starts no thread. Return whether it was
    not loaded before."""
    new = any(name not in sys.modules for name in _COMPILER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the modules of torch warn about each other
        for name in _COMPILER:
            importlib.import_module(name)
    settings: Any = importlib.import_module("torch._inductor.config")
    # Otherwise the compiler's own processes would outlive their use.
    settings.compile_threads = 1
    return new


@contextmanager
def compiling(device: torch.device) -> Iterator[None]:
    """Compile the code that runs within for the first time; nothing is compiled any more
    afterwards.

    The first worker of a host does this alone: what it has compiled, the others read from the disk,
    all at once. Raises NodeError where this host cannot compile.
    """
    load_compiler()
    dynamo: Any = importlib.import_module("torch._dynamo.config")
    if device.type == "cpu":
        _check_compiler()
    variants = MOST_CODES * _VARIANTS
    with (
        _after_the_first(_folder()),
        dynamo.patch(recompile_limit=variants, accumulated_recompile_limit=variants),
        torch.compiler.set_stance("default"),
    ):
        yield
    torch.compiler.set_stance("eager_on_recompile")


@contextmanager
def _after_the_first(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`: exclusively if no process of this host holds it. Otherwise wait
    for that process, then share the lock with all others that waited."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield


def _check_compiler() -> None:
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    errors: Any = importlib.import_module("torch._inductor.exc")
    try:
        builder.get_cpp_compiler()
    except errors.InvalidCxxCompiler as error:
        raise NodeError(
            "training.compile: this machine has no C++ compiler (the variable CXX names one, else "
            "it is g++); install it on every node, as by apt-get install g++, or leave the key out"
        ) from error


def _folder() -> Path:
    """Make and return the folder of torch's compiled code. Raises NodeError if it cannot be made,
    or if others could put code there."""
    places: Any = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(given or places.default_cache_dir())
    try:
        if given and given.startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "the agent's user has no home directory")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "lock").touch()
        found = folder.stat()
    except OSError as error:
        raise NodeError(
            f"training.compile: {folder}, where torch keeps what it has compiled: "
            f"{error.strerror}; start the agent with a HOME, or a TORCHINDUCTOR_CACHE_DIR, that it "
            "may write to, or leave the key out"
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NodeError(
            f"training.compile: {folder}, where torch keeps what it has compiled, is not a folder "
            "that only the agent's user can write to; remove it on this machine"
        )
    return folder


class Compilation:
    """Codes that the layers seen so far are compiled into."""

    def __init__(self) -> None:
        # This loads the compiler, which takes seconds.
        self._dynamo: Any = importlib.import_module("torch._dynamo.config")
        registry: Any = importlib.import_module("torch._dynamo.backends.registry")
        self._traced = registry.lookup_backend("aot_eager")
        self._count = 0
        #: Number of the code that ran last.
        self._ran: int | None = None
        self._run = compiled(backend=self._backend)

    def look(self, module: nn.Module, x: Tree, *, draws: bool) -> tuple[int | None, str]:
        """Return the number of the code that `module` runs for `x`, or the reason why there is
        none."""
        if draws:
            return None, "it draws random numbers, which are other ones in compiled code"
        full = self._count == MOST_CODES
        self._ran = None
        # Silence torch, whose reports of a failure are pages long.
        quiet = logging.getLogger("torch._dynamo"), logging.getLogger("torch._functorch")
        before = [logger.level for logger in quiet]
        for logger in quiet:
            logger.setLevel(logging.CRITICAL)
        try:
            with (
                self._dynamo.patch(recompile_limit=_ANY, accumulated_recompile_limit=_ANY),
                torch.compiler.set_stance("fail_on_recompile" if full else "default"),
                code.running(f"model: {type(module).__name__}", passing=(Exception,)),
            ):
                self._run(module, x)
        except Exception as error:  # noqa: BLE001  # torch, or a user's layer, may raise anything
            if full:
                return None, f"other layers have {MOST_CODES} codes already, and it fits none"
            return None, _reason(error)
        finally:
            for logger, level in zip(quiet, before, strict=True):
                logger.setLevel(level)
        if self._ran is None:
            return None, "it computes nothing"
        return self._ran, ""

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Trace the forward and the backward, and return a function that notes that this code
        ran."""
        traced = self._traced(graph, inputs)
        number, self._count = self._count, self._count + 1

        def run(*args: Any) -> Any:
            self._ran = number
            return traced(*args)

        return run


#: Limit that is never reached.
_ANY = 1 << 20


#: Name in torch's error when it traces a call of `oobleck.model.step`.
_STEP = "oobleck.model.step()"


def _reason(error: Exception) -> str:
    """Reduce torch's error of many lines to one."""
    text = str(error).strip()
    if _STEP in text:
        return f"it asks for the step ({_STEP}), another number in each"
    what = text.partition("\n")[0].rstrip(".") or type(error).__name__
    places = _PLACE.findall(text)
    return f"{what} ({places[-1][0]}:{places[-1][1]})" if places else what
