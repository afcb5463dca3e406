"""What would become of a job if nodes were lost, and what is sent for that question."""

from dataclasses import replace

import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, WorkerRate, place
from oobleck.planner.recovery.outlook import expecting
from oobleck.planner.report.planning import Planning
from oobleck.planner.report.what_if import what_if
from oobleck.planner.search.templates import generate_templates
from support.plans import worker
from support.profiles import profile_of

#: Of the model that `planning` has, which one node cannot hold.
SIZES = range(2, 5)


def planning(*sizes: int) -> Planning:
    """Pipelines of these sizes on n0, n1, ... with 8 micro-batches each, and a spare node."""
    costs = profile_of([1.0] * 8, state=[10] * 8, activation=[1] * 8)
    profile = replace(costs, gpu_memory_bytes=70)
    templates, nodes = generate_templates(profile, SIZES), iter(range(99))
    pipelines = [
        place(
            templates[size],
            tuple(NodeName(f"n{next(nodes)}") for _ in range(size)),
            microbatches=8,
        )
        for size in sizes
    ]
    plan = Plan.of_pipelines(pipelines, generation=Generation(3))
    return Planning(
        plan=plan,
        base=plan,
        profile=profile,
        least_nodes=SIZES.start,
        most_nodes=SIZES.stop - 1,
        fault_tolerance=1,
        tied=((0, 7),),
        nodes=(*plan.nodes, NodeName("spare")),
        rates=(WorkerRate(worker=worker(0), rate=0.5),),
    )


def names(text: str) -> list[NodeName]:
    return [NodeName(name) for name in text.split()]


def test_it_is_what_would_answer_the_loss() -> None:
    found = what_if(planning(2, 2), names("n1")).data()
    assert (found["hit"], found["gone_layers"]) == (["n1"], [])
    assert found["before"]["plan"] == "2 pipelines of 2 nodes"
    assert found["before"]["can_lose"] == 1
    after = found["after"]
    assert (after["policy"], after["plan"]) == ("templates", "2 pipelines of 2 nodes")
    assert after["can_lose"] == 1
    assert after["moved_bytes"] > 0
    assert set(found["policies"]) == {"templates", "reroute"}
    assert found["reason"].startswith("n1")


def test_layers_that_nobody_would_hold_are_named() -> None:
    found = what_if(planning(2, 2), names("n1 n3")).data()
    assert found["gone_layers"] == [[4, 7]]


def test_a_loss_beyond_all_plans_has_a_reason() -> None:
    found = what_if(planning(2, 2), names("n1 n2 n3 spare"))
    assert found.taken is None
    assert found.data()["after"] is None
    assert "node" in found.reason


def test_nodes_that_the_plan_does_not_have_change_nothing() -> None:
    found = what_if(planning(2, 2), names("spare")).data()
    assert found["hit"] == []
    assert found["after"]["plan"] == found["before"]["plan"]
    assert found["after"]["moved_bytes"] == 0


def test_a_step_of_now_is_that_of_slow_workers_too() -> None:
    asked = planning(2, 2)
    slow = what_if(asked, names("n0")).step_s
    assert slow > what_if(replace(asked, rates=()), names("n0")).step_s


@pytest.mark.parametrize(
    ("lost", "told"),
    [("n9 n1", "no such node in the job's plan: n9"), ("n0 n1 n2 n3 spare", "leave one")],
)
def test_questions_without_an_answer(lost: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        what_if(planning(2, 2), names(lost))


def test_what_is_sent_is_what_is_read() -> None:
    asked = planning(2, 3)
    assert decode(Planning, encode(asked)) == asked
    taken = what_if(replace(asked, policy="reroute"), names("n2")).taken
    assert taken is not None
    rerouted = taken.found.plan
    assert rerouted.listing is not None
    read = decode(Planning, encode(replace(asked, plan=rerouted)))
    assert read == replace(asked, plan=rerouted)
    assert what_if(read, names("n3")).step_s > 0
    with pytest.raises(ValueError, match="'hope'"):
        decode(Planning, encode(asked).replace(b'"auto"', b'"hope"'))


def test_the_answer_goes_by_what_the_cluster_has_learned() -> None:
    """State takes minutes to move, which pays where the next loss is far."""
    asked = planning(3, 3)
    layers = tuple(replace(layer, state_bytes=5 * 10**10) for layer in asked.profile.layers)
    links = replace(asked.profile.links, inter_node_bytes_per_s=1e9)
    profile = replace(asked.profile, layers=layers, links=links, gpu_memory_bytes=10**12)
    asked = replace(asked, profile=profile, fault_tolerance=0, rates=())
    taken = {}
    for wait_s in (60.0, 1e6):
        outlook = expecting(wait_s, len(asked.nodes))
        found = what_if(replace(asked, outlook=outlook), names("n1"))
        assert found.taken is not None
        taken[wait_s] = (found.taken.policy, found.taken.then)
    assert taken == {60.0: ("reroute", None), 1e6: ("templates", None)}


def test_the_answer_is_the_policys() -> None:
    wanted = replace(planning(2, 2), policy="reroute")
    found = what_if(wanted, names("n1")).data()
    assert found["after"]["policy"] == "reroute"
    assert found["after"]["moved_bytes"] == 0
    assert "refused" not in found["policies"]["templates"]
