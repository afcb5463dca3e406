"""Decision whether a change that nobody is forced to make is worth it. Pure."""

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

#: What a change of generation takes beside the state that moves.
CHANGE_S = 0.5
#: Part of a step's time that a change must save at least: estimates are not more exact.
LEAST_GAIN = 0.03
#: What it saves until the next loss is expected is at least so many times what it costs.
_LEAST_RETURN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A plan that could take the running one's place."""

    step_s: float
    stall_s: float
    #: A step counts as so many times as long, by what splits its backward now and then.
    weight: float = 1.0

    @property
    def until_next_loss(self) -> float:
        """Steps that are made until then."""
        step_s = self.step_s * self.weight
        return (HORIZON_S - self.stall_s - CHANGE_S) / step_s if step_s else 0.0

    def why_not(self, staying_s: float) -> str:
        """Why staying, at so many seconds a step, is better; empty: it is not."""
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
    """Splitting the backward costs a part of the step that profiles do not tell, and that a first
    plan's schedule has to gain as well."""
    listed = listed_routes(plan) and (plan.listing is None or plan.listing.split)
    return 1 + TIE if listed or splits_backward(plan.schedule) else 1.0


def worth_a_change(offers: Sequence[Answer], running: Plan, staying_s: float) -> Answer:
    """The best of `offers`, of which there are some, that is worth it, proved to run to its end.
    Raises PlanInfeasible where staying, at so many seconds a step, is better than each."""
    now = splitting_weight(running)

    def prospect(offer: Answer) -> Prospect:
        # Who stops splitting has gained nothing that is known.
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
