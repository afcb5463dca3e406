"""Nothing that is read can run code: no pickle, no eval, in any package, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("core", "planner", "proto", "host", "master", "agent", "worker", "cli", "bench")

#: Modules that turn data into code or into objects of any class.
MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "multiprocessing.reduction",
    "torch.package",
    "torch.multiprocessing",
}
#: Functions that do, whatever they are called on.
CALLS = {
    "eval",
    "exec",
    "compile",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "unsafe_load",
    "full_load",
    "load_all",
    "unsafe_load_all",
}
#: `module.load`, safe only with this argument.
LOADS = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}
LOADS |= {("numpy", "load"): LOADS["np", "load"]}
#: `module.save` and the like that pickle.
SAVES = {("torch", "save")}
BUILT_IN = {"eval", "exec", "compile"}


def sources() -> list[Path]:
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 150
    return found


def violations(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name in MODULES or alias.name.split(".")[0] in MODULES:
                        yield node.lineno, alias.name
            case ast.ImportFrom(module=str(module), names=names):
                full = {module, *(f"{module}.{alias.name}" for alias in names)}
                for name in sorted(full):
                    if name in MODULES or name.split(".")[0] in MODULES:
                        yield node.lineno, name
            case ast.Call():
                yield from _of_call(node)
            case _:
                pass


def _of_call(call: ast.Call) -> Iterator[tuple[int, str]]:
    match call.func:
        case ast.Name(id=name):
            owner = None
        case ast.Attribute(attr=name, value=ast.Name(id=owner)):
            pass
        case ast.Attribute(attr=name):
            owner = ""
        case _:
            return
    # A method of one's own may be called like a built-in, which has no owner.
    if name in CALLS and (owner is None or name not in BUILT_IN):
        yield call.lineno, name
    if (owner, name) in SAVES:
        yield call.lineno, f"{owner}.{name}"
    if (owner, name) in LOADS:
        argument, wanted = LOADS[owner, name]  # type: ignore[index]
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        match given.get(argument):
            case ast.Constant(value=value) if value is wanted:
                pass
            case _:
                yield call.lineno, f"{owner}.{name} without {argument}={wanted}"
    if name == "load" and owner == "yaml":
        yield call.lineno, "yaml.load"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_reads_code_from_data(package: str) -> None:
    paths = [path for path in sources() if path.relative_to(ROOT).parts[0] == package]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in paths
        for line, what in violations(ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "import torch.multiprocessing as mp",
        "from multiprocessing import reduction",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(found, mine)",
        "torch.distributed.broadcast_object_list(things)",
        "eval(text)",
        "yaml.load(text)",
        "torch.save(state, path)",
    ],
)
def test_the_search_finds_it(line: str) -> None:
    assert list(violations(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=True)",
        "np.load(path, allow_pickle=False)",
        "re.compile(text)",
        "model.eval()",
        "json.load(file)",
    ],
)
def test_the_search_knows_what_is_harmless(line: str) -> None:
    assert not list(violations(ast.parse(line)))
