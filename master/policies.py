"""Recovery policies, as far as the master distinguishes them.

Names of the planner's policies appear here and where plans are made
(`oobleck.master.planning.solve`); rules ask by the purpose of a change. The planner chooses which
policy answers a loss, and when (`oobleck.planner.recovery.policies`).
"""

from typing import Literal

from oobleck.core.job.spec import JobSpec, RecoveryPolicy
from oobleck.planner.recovery.rules import OF_OTHER_NODES, Next

#: Policy of the wanted plan. `unforced`: templates, unless staying is better. `plain`: templates
#: alone, where another policy failed.
PlanWanted = RecoveryPolicy | Literal["shadow", "normalise", "unforced", "plain"]
#: Moves state to where it is best before the next step; answers any change of the nodes.
MOVING: RecoveryPolicy = "templates"
#: Moves state likewise where nothing forces a change: nodes have joined, or the running plan is
#: re-routed.
UNFORCED: PlanWanted = "unforced"
#: Gives slow workers less to do; answers a change of rates, never a loss.
AROUND_SLOW: RecoveryPolicy = "uneven"
#: Answers where another policy failed by an internal error.
PLAIN: PlanWanted = "plain"
#: Changes that are never forced.
VOLUNTARY: frozenset[PlanWanted] = frozenset({AROUND_SLOW, UNFORCED, "shadow", "normalise"})

#: Policy of records about a return to a checkpoint, whose state lets any plan be made.
MORPH = "morph"

_KEEPING = "reroute"
_ADDS_HOLDERS = "shadow"


def for_losses(spec: JobSpec) -> RecoveryPolicy:
    """Return the policy that answers losses in a job of this `spec`."""
    wanted = spec.recovery.policy
    return MOVING if wanted == AROUND_SLOW else wanted


def evens_out(spec: JobSpec) -> bool:
    """Return whether the job wants plans around slow workers."""
    return spec.recovery.policy in ("auto", AROUND_SLOW)


def keeps_state(policy: str) -> bool:
    """Return whether plans of this policy leave all state where it is."""
    return policy == _KEEPING


def adds_holders(policy: str) -> bool:
    """Return whether plans of this policy only give layers more holders."""
    return policy == _ADDS_HOLDERS


def is_base(policy: str, rule: str) -> bool:
    """Return whether later plans start from the pipelines of a plan made by `rule` of `policy`,
    rather than from those of an earlier plan."""
    return policy == MOVING or rule in {"recut", *OF_OTHER_NODES}


def takes_back(rule: str) -> bool:
    """Return whether plans of this rule give stand-by nodes a part again."""
    return rule == "take back"


def is_tried_again(follow_up: PlanWanted) -> bool:
    """Return whether an infeasible follow-up stays due: new nodes may make it possible."""
    return follow_up == MOVING


def follow_up_of(due: Next | Literal[""], rule: str, then: Next | None) -> Next | Literal[""]:
    """Return the follow-up of a plan around slow workers, made by `rule`; `then` is its default. A
    plan of templates that is `due` stays so until there is one; it brings shadows of its own."""
    return due if due == MOVING and rule not in OF_OTHER_NODES else then or ""


def of_adopted(spec: JobSpec, *, rerouted: bool, can_lose: int) -> tuple[str, Next | Literal[""]]:
    """Return the policy and the follow-up of a plan that the journal lacks."""
    if rerouted:
        return _KEEPING, "templates" if spec.recovery.policy == "auto" else ""
    few = spec.recovery.shadows == "auto" and can_lose < spec.fault_tolerance
    return MOVING, "shadow" if few else ""
