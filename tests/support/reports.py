"""Examples of all that workers report, and agents of them."""

from oobleck.core.ids import Generation
from oobleck.core.messages import (
    CheckpointSaved,
    Evaluated,
    EvaluationRecord,
    Failed,
    LinkMeasured,
    Measured,
    PeerLost,
    PhaseReached,
    Restored,
    SaveFailed,
)
from oobleck.proto.types import Happening, Hung, WorkerExited

#: One of each report, as bad as can be for a job that it is not about any more.
ONE = Generation(1)
REPORTS: tuple[Happening, ...] = (
    WorkerExited(pid=1, exit_code=None, signal=9),
    Hung(reason="stopped", seconds=9.0),
    PhaseReached(generation=ONE, phase="transferred", received_bytes=1),
    PeerLost(generation=ONE, step=1, detail="connection closed by peer"),
    Failed(kind="user", message="out of memory"),
    Measured(attempt=1, measurement=None, problem="it failed"),
    LinkMeasured(attempt=1, scope="inter_node", link=None, problem="it failed"),
    CheckpointSaved(step=1, path="/saved/1", bytes=1, seconds=0.1),
    SaveFailed(what="checkpoint", step=1, reason="disk full"),
    Restored(generation=ONE, step=1, path="/saved/1"),
    Evaluated(
        record=EvaluationRecord(step=1, loss=1.0, samples=8, generation=ONE, seconds=0.1, time=1.0)
    ),
)
