"""Decision whether a voluntary change is worth it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.compiler.schedule import splits_backward
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.reconfigure import HORIZON_S
from oobleck.planner.search.choose import TIE

#: Seconds of a change of generation beside moving state.
CHANGE_S = 0.5
#: Least share of a step's time that a change must save: estimates are not more exact.
LEAST_GAIN = 0.03
#: Least ratio of the time saved until the expected next loss to the cost of a change.
_LEAST_RETURN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """Candidate to replace the running plan."""

    step_s: float
    stall_s: float
    #: Factor on the step time for splitting backwards, whose cost profiles lack.
    weight: float = 1.0

    @property
    def until_next_loss(self) -> float:
        """Steps until the expected next loss."""
        step_s = self.step_s * self.weight
        return (HORIZON_S - self.stall_s - CHANGE_S) / step_s if step_s else 0.0

    def why_not(self, staying_s: float) -> str:
        """Return why staying, at so many seconds a step, is better; empty if it is not."""
        step_s = self.step_s * self.weight
        if step_s > staying_s * (1 - LEAST_GAIN):
            told = f"a step would take {self.step_s:.4g} s in place of {staying_s:.4g} s"
            return told if self.weight <= 1 else f"{told}, with backwards split"
        saved_s = HORIZON_S * (1 - step_s / staying_s)
        cost_s = self.stall_s + CHANGE_S
        if saved_s < _LEAST_RETURN * cost_s:
            return (
                f"it would save {saved_s:.3g} s until the next loss is expected and cost "
                f"{cost_s:.3g} s"
            )
        return ""


def splitting_weight(plan: Plan) -> float:
    """Return the factor for splitting the backward, a cost that profiles lack. A first plan's
    schedule has to gain as much."""
    listed = listed_routes(plan) and (plan.listing is None or plan.listing.split)
    return 1 + TIE if listed or splits_backward(plan.schedule) else 1.0


def worth_a_change(offers: Sequence[Answer], running: Plan, staying_s: float) -> Answer:
    """Return the best of `offers` (not empty) that is worth it, proven free of deadlock. Raises
    PlanInfeasible where staying, at so many seconds a step, is better than each."""
    now = splitting_weight(running)

    def prospect(offer: Answer) -> Prospect:
        # No gain is known for no longer splitting.
        weight = max(1.0, splitting_weight(offer.found.plan) / now)
        return Prospect(step_s=offer.step_s, stall_s=offer.stall_s, weight=weight)

    by_steps = sorted(offers, key=lambda offer: -prospect(offer).until_next_loss)
    problems = [prospect(offer).why_not(staying_s) for offer in by_steps]
    if all(problems):
        raise PlanInfeasible(f"{problems[0]}: not worth a change")
    best = by_steps[problems.index("")]
    if listed_routes(best.found.plan):
        prove(best.found.plan)
    return best
