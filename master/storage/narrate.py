"""The master's log: one line per journaled event, a constant message and fields."""

import logging

from oobleck.master.events.jobs import JobFailed, MeasuringStarted, ProfileChosen
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeDrainRequested,
    NodeKept,
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeReleased,
    NodeReset,
    NodeUndrained,
    WorkerLost,
)
from oobleck.master.events.plans import PlanMade
from oobleck.master.events.trust import (
    CredentialIssued,
    CredentialsRevoked,
    TokenCreated,
    TokenRevoked,
)
from oobleck.master.events.unions import JournalCut, Journaled, MasterStarted

log = logging.getLogger(__name__)


def tell(event: Journaled) -> None:
    """One log line per decision."""
    match event:
        case NodeRegistered():
            fields: dict[str, object] = {"node": event.facts.node, "pid": event.facts.pid}
        case NodeLost():
            fields = {"node": event.node, "cause": event.cause, "reason": event.reason}
        case WorkerLost():
            fields = {"worker": event.worker, "reason": event.reason}
        case NodeDrainRequested():
            fields = {"node": event.node, "reason": event.reason, "force": event.force}
        case NodeKept() | NodeDrained():
            fields = {"node": event.node, "job": event.job_id or "", "reason": event.reason}
        case NodeQuarantined() | NodeReleased():
            fields = {"node": event.node, "reason": event.reason}
        case NodeUndrained():
            fields = {"node": event.node}
        case NodeLeftOut() | NodeReset():
            fields = {"job": event.job_id, "node": event.node, "reason": event.reason}
        case PlanMade():
            fields = {
                "job": event.job_id,
                "generation": event.plan.generation,
                "rule": event.rule,
                "reason": event.reason,
            }
        case MeasuringStarted():
            fields = {"job": event.job_id, "attempt": event.wish.attempt}
            if event.passed_over:
                why = {"job": event.job_id, "reason": event.passed_over}
                log.warning("stored profile passed over", extra=why)
        case ProfileChosen():
            fields = {
                "job": event.job_id,
                "source": event.source,
                "key": event.key,
                "reason": event.reason,
            }
        case JobFailed():
            fields = {"job": event.job_id, "reason": event.reason}
        case MasterStarted():
            fields = {}
        case TokenCreated():
            by = "/".join(event.maker or ())
            fields = {"role": event.role, "holder": event.name or "any", "by": by}
        case TokenRevoked():
            fields = {"token": event.fingerprint}
        case CredentialIssued() | CredentialsRevoked():
            fields = {"role": event.role, "holder": event.name}
        case JournalCut():
            fields = {"bytes": event.bytes, "kept_as": event.kept_as, "records": event.records}
            log.warning("the end of the journal was not whole and is cut off", extra=fields)
            return
        case _:
            fields = {"job": getattr(event, "job_id", "")}
    log.info(type(event).__name__, extra=fields)
