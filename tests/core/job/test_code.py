"""Which functions of a job a node runs, by its agent's flags."""

import pytest

from oobleck.core.job.code import NO_ARGUMENTS, Code, CodePolicy, is_allowed


def code(name: str, path: str | None = None, group: str | None = None) -> Code:
    return Code(name=name, group=group, path=path, arguments=NO_ARGUMENTS)


@pytest.mark.parametrize(
    ("prefix", "name", "path", "allowed"),
    [
        ("*", "mine:make", None, True),
        ("*", "mine:make", "/srv/mine", True),
        ("mine", "mine:make", None, True),
        ("mine", "mine.models:make", None, True),
        ("mine", "mines:make", None, False),
        ("mine.models", "mine:make", None, False),
        ("mine", "mine:make", "/srv/mine", False),
        ("/srv/mine", "mine:make", "/srv/mine", True),
        ("/srv", "mine:make", "/srv/mine", True),
        ("/srv/min", "mine:make", "/srv/mine", False),
        ("/srv/mine", "mine:make", None, False),
        ("other", "torch.optim:NAdam", None, True),
        ("other", "torch.optim:NAdam", "/srv", False),
    ],
)
def test_a_prefix_allows_a_package_or_a_folder(
    prefix: str, name: str, path: str | None, allowed: bool
) -> None:
    assert is_allowed(code(name, path), [prefix]) == allowed


def test_installed_plugins_are_allowed_everywhere() -> None:
    assert is_allowed(code("mine", group="oobleck.models"), [])


def test_why_a_node_does_not_run_a_job_names_the_flag() -> None:
    functions = (code("torch.optim:NAdam"), code("mine:make"), code("mine:rows", "/srv/mine"))
    why = CodePolicy(accepts=False, allows=("*",)).why_not(functions, brought=True)
    assert "start the agent with --accept-code" in why
    why = CodePolicy(accepts=True, allows=()).why_not(functions, brought=True)
    assert "jobs may not load mine:rows there; start the agent with --allow-code /srv/mine," in why
    assert CodePolicy(accepts=True, allows=("/srv",)).why_not(functions, brought=True) == ""
    why = CodePolicy(accepts=True, allows=("/srv",)).why_not(functions, brought=False)
    assert "start the agent with --allow-code mine," in why
    assert CodePolicy(allows=("/srv", "mine")).why_not(functions, brought=False) == ""
    assert CodePolicy().why_not((), brought=False) == ""


@pytest.mark.parametrize(
    ("allows", "refused"), [((), True), (("mine",), True), (("/srv",), False), (("*",), False)]
)
def test_a_node_refuses_a_path_only_if_it_allows_no_folder(
    allows: tuple[str, ...], refused: bool
) -> None:
    """On the node a link may lead from the path to a folder that it allows."""
    why = CodePolicy(allows=allows).why_not([code("mine:make", "/home/u/mine")], brought=False)
    assert ("start the agent with --allow-code /home/u/mine," in why) == refused
