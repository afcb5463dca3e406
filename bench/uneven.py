"""What each answer to slow workers costs, relative to a step without them: the second table of
`python -m bench.policies`.

3 pipelines of 4 equal stages compute 8 micro-batches each under ZB-H1, links free; a stage has 12
layers. Each worker has room for twice what the first stage keeps.

- `nothing`: the plan stays.
- `reshare`, `partial reroute`, `recut`: the candidates of `oobleck.planner.recovery.uneven`; those
  that are not there do not change the plan.
- `bound`: all work shared by the workers' rates.
"""

from collections.abc import Iterator, Sequence

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import LayerProfile, Links, Profile
from oobleck.core.routes import Hold
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.recovery.answer import Situation
from oobleck.planner.recovery.uneven.candidates import candidates, staying_s

PIPELINES, STAGES, MICROBATCHES, LAYERS = 3, 4, 8, 12
RULES = ("reshare", "partial reroute", "recut")
#: Description, and the slow workers: pipeline, stage, rate.
CASES: Sequence[tuple[str, Sequence[tuple[int, int, float]]]] = (
    ("one at 1/2", [(1, 1, 0.5)]),
    ("three at 1/2", [(0, 0, 0.5), (1, 1, 0.5), (2, 2, 0.5)]),
    ("one at 1/4", [(1, 1, 0.25)]),
)


def profile() -> Profile:
    """Return a profile in which a stage's forward, input gradient and weight gradients each take a
    second."""
    layers = tuple(
        LayerProfile(
            name=f"layer{number}",
            forward_s={1: 1 / LAYERS},
            backward_s={1: 2 / LAYERS},
            backward_input_s={1: 1 / LAYERS},
            parameter_bytes=0,
            state_bytes=0,
            activation_bytes=1,
            output_bytes=0,
        )
        for number in range(STAGES * LAYERS)
    )
    return Profile(
        microbatch=1,
        gpus_per_node=1,
        gpu_memory_bytes=2 * STAGES * LAYERS,
        layers=layers,
        links=Links(intra_node_bytes_per_s=1e18, inter_node_bytes_per_s=1e18, latency_s=0.0),
    )


def pipelines() -> Plan:
    made = []
    for pipeline in range(PIPELINES):
        nodes = tuple(NodeName(f"p{pipeline}s{stage}") for stage in range(STAGES))
        stages = tuple(
            Hold(
                first_layer=stage * LAYERS,
                last_layer=(stage + 1) * LAYERS - 1,
                workers=(WorkerId(node, 0),),
            )
            for stage, node in enumerate(nodes)
        )
        made.append(Pipeline(nodes=nodes, stages=stages, microbatches=MICROBATCHES))
    return Plan.of_pipelines(made, generation=Generation(1), schedule="zb-h1")


def relative(slow: Sequence[tuple[int, int, float]]) -> tuple[dict[str, float], float]:
    """Return the step of each answer, including `nothing`, relative to one without slow workers;
    and the bound."""
    plan, costs = pipelines(), profile()
    now = Situation(
        running=plan,
        base=plan,
        rates={WorkerId(NodeName(f"p{p}s{s}"), 0): rate for p, s, rate in slow},
        profile=costs,
        tied=False,
    )
    healthy_s = estimate_step(plan, costs).step_s
    steps = {"nothing": staying_s(now) / healthy_s}
    steps |= {each.rule: each.step_s / healthy_s for each in candidates(now)}
    workers = PIPELINES * STAGES
    return steps, workers / (workers - sum(1 - rate for *_, rate in slow))


def row(name: str, slow: Sequence[tuple[int, int, float]]) -> Iterator[str]:
    steps, bound = relative(slow)
    yield name
    yield f"{steps['nothing']:.2f}"
    for rule in RULES:
        yield f"{steps.get(rule, steps['nothing']):.2f}"
    yield f"{bound:.2f}"


def table() -> Iterator[str]:
    heads = ("slow workers", "nothing", *RULES, "bound")
    yield "".join(f"{cell:>17}" for cell in heads)
    for name, slow in CASES:
        yield "".join(f"{cell:>17}" for cell in row(name, slow))
