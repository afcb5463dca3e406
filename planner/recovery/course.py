"""Course of a job through changes of its nodes: which plan to request after which event, and its
follow-up.

The master, the simulator and `oobleck plan --lost` all go by it. They name the purpose of a change;
the planner chooses which policy answers a loss (`oobleck.planner.recovery.policies`). Owns which
request answers which event, and from which plan the next one starts. Must not know how a plan is
made, nor how the master learns of an event.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from oobleck.core.ids import NodeName
from oobleck.core.job.spec import JobSpec, RecoveryPolicy
from oobleck.core.plan import Plan
from oobleck.planner.recovery.rules import OF_OTHER_NODES, Next

#: Policy of the wanted plan. `joined`, `settled`: templates, unless staying is better. `plain`:
#: templates alone, where another policy failed. `anew`: the shape of a first plan, if that is worth
#: it. `moved`: one stage moved behind a re-route. `copies`: shadows behind an answer. `drained`:
#: templates without nodes that train until then.
PlanWanted = (
    RecoveryPolicy | Literal["copies", "moved", "anew", "joined", "settled", "drained", "plain"]
)
#: Moves state to where it is best before the next step; answers any change of the nodes.
MOVING: RecoveryPolicy = "templates"
#: Moves state likewise where nothing forces a change: nodes have joined.
JOINED: PlanWanted = "joined"
#: The same behind a re-routed plan.
SETTLED: PlanWanted = "settled"
#: Leaves out nodes that are to be drained, in a job of any policy.
WITHOUT_DRAINED: PlanWanted = "drained"
#: Gives slow workers less to do; answers a change of rates, never a loss.
AROUND_SLOW: RecoveryPolicy = "uneven"
#: Plain templates, where another policy failed by an internal error.
PLAIN: PlanWanted = "plain"
#: Changes that are never forced.
VOLUNTARY: frozenset[PlanWanted] = frozenset(
    {AROUND_SLOW, JOINED, SETTLED, "copies", "moved", "anew"}
)

#: Policy of a return to a checkpoint: all state is loaded anyway, so the plan may have any shape.
MORPH: RecoveryPolicy = "morph"
#: Lets no plan be smaller than the running one.
WAITING: RecoveryPolicy = "wait"
#: Makes no change that nothing forces, but shadows.
STAYING: RecoveryPolicy = "stay"

_KEEPING = "reroute"
_MOVES_A_STAGE = "normalise"
_ADDS_HOLDERS = "shadow"
#: Seconds for which a join waits for further nodes, unless the master is told otherwise.
SETTLE_S = 1.0
#: Settle times for which further nodes may delay a join.
_MOST_SETTLES = 3
#: Least interval between plans around slow workers, seconds. A change costs a part of a second, and
#: an occasionally slow worker must not keep the job busy. The same pause follows an answer to a
#: loss and its follow-up: state that has just moved shall not move again.
REST_S = 60.0


def for_losses(policy: RecoveryPolicy, *, certain: bool = True) -> RecoveryPolicy:
    """Return the policy that answers losses in a job of this `policy`. `certain`: workers certainly
    hold the layers that the plan to change gives them; otherwise state has to move."""
    if policy == WAITING:
        return policy
    return policy if certain and policy != AROUND_SLOW else MOVING


def most_more(policy: RecoveryPolicy) -> int:
    """Return the most nodes beyond the fault tolerance for whose loss plans are candidates in a job
    of this `policy`: they are taken where events that take so many are likely."""
    return 2 if policy == "auto" else 0


def evens_out(policy: RecoveryPolicy) -> bool:
    """Return whether a job of this `policy` wants plans around slow workers."""
    return policy in ("auto", AROUND_SLOW)


def routes_losses(policy: RecoveryPolicy) -> bool:
    """Return whether a job of this `policy` wants losses answered by re-routing."""
    return policy in (_KEEPING, _MOVES_A_STAGE, _ADDS_HOLDERS, STAYING)


def takes_joins(policy: RecoveryPolicy) -> bool:
    """Return whether a job of this `policy` takes in nodes while its plan trains."""
    return policy != STAYING


def keeps_state(policy: str) -> bool:
    """Return whether plans of this policy leave all state where it is."""
    return policy == _KEEPING


def adds_holders(policy: str) -> bool:
    """Return whether plans of this policy only give layers more holders."""
    return policy == _ADDS_HOLDERS


def is_base(policy: str, rule: str) -> bool:
    """Return whether later plans start from the pipelines of a plan made by `rule` of `policy`,
    rather than from those of an earlier plan."""
    return policy in (MOVING, MORPH) or rule in {"recut", *OF_OTHER_NODES}


def takes_back(rule: str) -> bool:
    """Return whether plans of this rule take stand-by nodes into the plan again."""
    return rule == "take back"


def behind_answer(then: Next) -> PlanWanted:
    """Return the policy of the plan to ask for where `then` follows an answer."""
    if then == _ADDS_HOLDERS:
        return "copies"
    if then == _MOVES_A_STAGE:
        return "moved"
    return SETTLED if then == MOVING else then


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


def settled_at(ready: Collection[float], settle_s: float) -> float | None:
    """Return when nodes that were ready at these times join together; None: there are none."""
    if not ready:
        return None
    return min(max(ready) + settle_s, min(ready) + _MOST_SETTLES * settle_s)


def takes_in(plan: Plan, members: Iterable[NodeName]) -> bool:
    """Return whether `plan` is a join: it has all nodes of the running one, and more."""
    return set(plan.nodes) > set(members)


def base_behind(before: Plan, base: Plan | None, *, policy: str, rule: str) -> Plan | None:
    """Return the base of the plan that `rule` of `policy` made in place of `before`, which has this
    `base`. None: the plan itself is the base."""
    if is_base(policy, rule) or (adds_holders(policy) and base is None):
        return None
    return base or before
