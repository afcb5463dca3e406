"""The master's log: one line per journaled event, its name and the fields that say most."""

import logging

from oobleck.master.events.jobs import MeasuringStarted
from oobleck.master.events.nodes import NodeRegistered
from oobleck.master.events.plans import PlanMade
from oobleck.master.events.trust import TokenCreated
from oobleck.master.events.unions import JournalCut, Journaled

log = logging.getLogger(__name__)

#: The fields that are told of any event that has them, and their names in the log.
_FIELDS = {
    "job_id": "job",
    "node": "node",
    "worker": "worker",
    "cause": "cause",
    "rule": "rule",
    "source": "source",
    "role": "role",
    "name": "holder",
    "fingerprint": "token",
    "reason": "reason",
    "force": "force",
    "bytes": "bytes",
    "kept_as": "kept_as",
    "records": "records",
}


def tell(event: Journaled) -> None:
    found = ((told, getattr(event, name, None)) for name, told in _FIELDS.items())
    fields = {told: value for told, value in found if value not in (None, "")}
    match event:
        case NodeRegistered(facts=facts):
            fields |= {"node": facts.node, "pid": facts.pid}
        case PlanMade(plan=plan):
            fields["generation"] = plan.generation
        case MeasuringStarted(wish=wish, passed_over=passed_over):
            fields["attempt"] = wish.attempt
            if passed_over:
                log.warning("stored profile passed over", extra={**fields, "reason": passed_over})
        case TokenCreated(maker=maker):
            fields["by"] = "/".join(maker or ())
        case JournalCut():
            log.warning("the end of the journal was not whole and is cut off", extra=fields)
            return
        case _:
            pass  # the fields say all
    log.info(type(event).__name__, extra=fields)
