"""What is kept for all layers does not depend on what is going on where it is first asked for."""

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import oobleck.worker.models
from oobleck.core.job.model import OwnModelSpec
from oobleck.worker.models import own, tree
from oobleck.worker.models.huggingface.architecture import choose
from oobleck.worker.models.huggingface.unsplit import handed, take_apart
from support import causal
from support.folders import ROOT

#: Keep what torch has no part in: a parsed text, and the compiler itself.
PURE = {("tree.py", "_parse"), ("compiled.py", "_compiled"), ("tree.py", "decorate")}


def test_whatever_is_kept_is_made_outside_modes() -> None:
    found = set()
    for path in Path(oobleck.worker.models.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                name in ast.unparse(part)
                for part in (*node.decorator_list, *node.body)
                for name in ("lru_cache", "functools.cache")
            ):
                found.add((path.name, node.name))
            if isinstance(node, ast.FunctionDef) and "cache" in map(
                ast.unparse, node.decorator_list
            ):
                found.add((path.name, node.name))
    assert found - PURE - {("tree.py", "cached")} == set()


@contextlib.contextmanager
def everything() -> Iterator[None]:
    """All that a worker has going on somewhere while it builds or runs a layer."""
    with (
        torch.device("meta"),
        own.without_draws(),
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        yield


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    take_apart.cache_clear()
    handed.cache_clear()


def seen(function: Callable[[], Any]) -> Any:
    with everything():
        return tree.cached(1)(function)()


def test_within_torch_is_as_at_the_top_of_a_program() -> None:
    a = torch.ones(2, 2)
    tensor = seen(lambda: torch.empty(3).normal_() @ torch.ones(3, requires_grad=True))
    assert (tensor.device.type, tensor.is_inference()) == ("cpu", False)
    assert tensor.requires_grad
    assert seen(lambda: a @ a).dtype == torch.float32
    with everything():
        assert torch.empty(1).is_meta, "what is around is there again"
        assert (a @ a).dtype == torch.bfloat16
        assert torch.is_inference_mode_enabled()


def test_what_a_failure_leaves_behind_is_what_was_there() -> None:
    with everything():
        with pytest.raises(ZeroDivisionError):
            tree.cached(1)(lambda: 1 // 0)()
        assert torch.empty(1).is_meta


# Tables of positions are beside its layers, and the proof gives them values.
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MistralForCausalLM", "BertForMaskedLM"])
def test_what_layers_are_handed_is_the_same_wherever_it_is_first_asked_for(name: str) -> None:
    architecture = choose(name, causal.keys_of(name), None)
    place = (causal.LENGTH, torch.device("cpu"), torch.float64)
    with everything():
        first = handed(architecture, *place)
    take_apart.cache_clear()
    handed.cache_clear()
    for one, other in zip(first, handed(architecture, *place), strict=True):
        tensors = [*one.to(2).named.values(), *one.to(2).positional]
        others = [*other.to(2).named.values(), *other.to(2).positional]
        for mine, theirs in zip(flat(tensors), flat(others), strict=True):
            assert not mine.is_inference()
            assert torch.equal(mine, theirs)


def flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in flat(value)] if isinstance(values, list | tuple) else []


def test_a_users_function_is_called_outside_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes itself is real, whichever layer asks first."""
    monkeypatch.syspath_prepend(ROOT / "tests" / "support")
    spec = OwnModelSpec(python="own_models:projected", path=str(ROOT / "tests" / "support"))
    own.code.allow((own.code.ANY,))
    with everything():
        table = own.user_model(spec).layers[1].args[0]  # type: ignore[index,union-attr]
    assert (table.device.type, table.dtype) == ("cpu", torch.float32)
    own.user_model.cache_clear()
    torch.manual_seed(9)
    assert torch.equal(own.user_model(spec).layers[1].args[0], table)  # type: ignore[index,union-attr]
