"""How a worker's step can end early. Each is handled in one place: the session loop."""

from oobleck.planner.ids import Generation


class TransportError(Exception):
    """An operation with a peer failed: its process or the way to it is gone. Recoverable."""


class Superseded(Exception):
    """A newer generation was pushed; what this one was doing is no longer wanted."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(f"superseded by generation {generation}")
        self.generation = generation


class InvariantViolation(Exception):
    """Ours: a state that must not exist. The worker crashes with it rather than train on."""
