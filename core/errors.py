"""Refusals of the planner; each says as data why, and what would help."""

from collections.abc import Iterable


class PlanInfeasible(ValueError):
    """No plan exists under the given limits. Each cause is one readable clause with its fix."""

    def __init__(self, *causes: str) -> None:
        super().__init__("; ".join(causes))
        self.causes = causes


class ModelTooLarge(PlanInfeasible):
    """No number of such nodes is enough."""


class LayerLost(PlanInfeasible):
    """Loss of layers that no live worker holds: only a checkpoint or a returning node can help."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers = tuple(sorted(layers))
        names = ", ".join(map(str, self.layers))
        super().__init__(f"no live worker holds the state of layer {names}")


class ProgramDeadlock(Exception):
    """The programs of a plan wait for each other; `waiting` says who waits at what."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = tuple(waiting)
        super().__init__("programs wait for each other: " + "; ".join(self.waiting))


class InvalidJob(ValueError):
    """The job file is wrong; the text is one line with the place and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
