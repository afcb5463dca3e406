"""The manifests by Kubernetes' published schemas, and what they promise of probes, drains, rights.

That a cluster does with them what docs/deploy/kubernetes.md says is not shown here.
"""

import functools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import click
import jsonschema
import pytest
import yaml

from oobleck.agent.__main__ import agent
from oobleck.host.address import split_address
from oobleck.master.__main__ import master
from oobleck.proto.health import ALIVE, READY

HERE = Path(__file__).parent
BASES = HERE.parent.parent / "deploy" / "kubernetes"
SCHEMAS = json.loads((HERE / "kubernetes-1.33.json").read_text())
#: What can be given to `kubectl apply -k`.
BUILT = ("master", "daemonset", "jobset")
#: Of a JobSet, whose schema is not Kubernetes' own: what is above the template of its Jobs.
JOBSET = {"apiVersion", "kind", "metadata", "spec"}

Resource = dict[str, Any]


def read(text: str) -> list[Resource]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


def sources() -> dict[str, list[Resource]]:
    paths = [path for path in BASES.rglob("*.yaml") if path.name != "kustomization.yaml"]
    return {str(path.relative_to(BASES)): read(path.read_text()) for path in sorted(paths)}


def check(resource: Resource) -> None:
    """Raises jsonschema.ValidationError."""
    kind, group = resource["kind"], resource["apiVersion"].replace("/", ".")
    if kind == "JobSet":
        assert resource["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        assert resource.keys() == JOBSET
        for job in resource["spec"]["replicatedJobs"]:
            assert job.keys() == {"name", "replicas", "template"}
            validate(job["template"], "io.k8s.api.batch.v1.JobTemplateSpec")
        return
    group = {"v1": "core.v1"}.get(group, group.replace(".k8s.io", ""))
    validate(resource, f"io.k8s.api.{group}.{kind}")


def validate(resource: Resource, name: str) -> None:
    schema = {"$ref": f"#/$defs/{name}", "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(resource)


@functools.cache
def build(folder: Path) -> list[Resource]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed, which has kustomize")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr
    return read(done.stdout)


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """The kind of what starts them, and their templates."""
    for resource in resources:
        spec = resource.get("spec", {})
        jobs = [job["template"]["spec"] for job in spec.get("replicatedJobs", ())]
        yield from (
            (resource["kind"], each["template"]) for each in (spec, *jobs) if "template" in each
        )


def containers(pod: Resource) -> list[Resource]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


@pytest.mark.parametrize("name", sources())
def test_every_manifest_is_as_kubernetes_says(name: str) -> None:
    for resource in sources()[name]:
        check(resource)


def test_a_wrong_manifest_is_found() -> None:
    (wrong,) = sources()["agents/pod.yaml"]
    wrong["template"]["spec"]["containers"][0]["livenessProbe"]["grpc"]["prot"] = 1
    with pytest.raises(jsonschema.ValidationError, match="prot"):
        check(wrong)


@pytest.mark.parametrize("name", BUILT)
def test_what_kustomize_makes_of_them_is_whole(name: str) -> None:
    built = build(BASES / name)
    for resource in built:
        check(resource)
    kinds = [kind for kind, _ in pods(built)]
    others = {"master": [], "daemonset": ["DaemonSet"], "jobset": ["JobSet"]}
    assert sorted(kinds) == sorted(["StatefulSet", *others[name]])
    assert not [one for one in built if one["kind"] == "PodTemplate"], "it is a part of the others"
    for _, pod in pods(built):
        restricted(pod)
        probed(pod)
        known_flags(pod)
        # Policies let in by it, and kustomize knows not where each kind has its pods.
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "oobleck"
        mounted = {m["name"] for c in containers(pod) for m in c["volumeMounts"]}
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | {"state"}
        assert mounted <= volumes


def restricted(pod: Resource) -> None:
    """As the Pod Security Standard of that name wants it, which the namespace enforces."""
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    allowed = {"emptyDir", "persistentVolumeClaim", "secret", "configMap", "projected", "ephemeral"}
    assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])
    for container in containers(pod):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True


def probed(pod: Resource) -> None:
    """By gRPC, where the daemon answers without a certificate, for what it knows."""
    for container in pod["spec"]["containers"]:
        (listen,) = [arg for arg in container["args"] if arg.startswith("--health-listen=")]
        _, port = split_address(listen.partition("=")[2])
        for probe, service in (("livenessProbe", ALIVE), ("readinessProbe", READY)):
            assert container[probe]["grpc"]["port"] == port
            assert container[probe]["grpc"].get("service", "") == service


def known_flags(pod: Resource) -> None:
    for container in pod["spec"]["containers"]:
        command: click.Command = {"master": master, "agent": agent}[container["name"]]
        known = {option for parameter in command.params for option in parameter.opts}
        used = {arg.partition("=")[0] for arg in container["args"] if arg.startswith("--")}
        assert used <= known


@pytest.mark.parametrize("name", BUILT)
def test_no_image_is_anybodys_before_it_is_named(name: str) -> None:
    """Without a registry `oobleck` would be whatever Docker's has by that name, at its latest."""
    images = {one["image"] for _, pod in pods(build(BASES / name)) for one in containers(pod)}
    assert images == {"oobleck.invalid/oobleck"}


@pytest.mark.parametrize("name", ["daemonset", "jobset"])
def test_a_pod_has_its_own_nodes_certificate_and_token_alone(name: str) -> None:
    (pod,) = [pod for kind, pod in pods(build(BASES / name)) if kind != "StatefulSet"]
    volumes = {volume.pop("name"): volume for volume in pod["spec"]["volumes"]}
    assert not [volume for volume in volumes.values() if "secret" in volume], "of all pods"
    claims = {
        name: volume["persistentVolumeClaim"]["claimName"]
        for name, volume in volumes.items()
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"shared": "oobleck-shared", "credentials": "oobleck-credentials"}
    assert "emptyDir" in volumes["token"]
    for container in containers(pod):
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "credentials"]
        assert mount["subPathExpr"] == "$(NODE_NAME)"
        environment = {one["name"]: one for one in container["env"]}
        node, number = environment["NODE_NAME"], environment.get("INDEX")
        if name == "daemonset":
            assert node["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
        else:
            assert (node["value"], "completion-index" in str(number)) == ("agent-$(INDEX)", True)
    (container,) = pod["spec"]["containers"]
    (credentials,) = [arg for arg in container["args"] if arg.startswith("--credentials=")]
    assert credentials == f"--credentials={mount['mountPath']}/node"


def test_a_pod_waits_for_its_token_or_a_certificate_and_hands_the_token_on(tmp_path: Path) -> None:
    """The scripts of the pod, in other folders."""
    (manifest,) = sources()["agents/pod.yaml"]
    spec = manifest["template"]["spec"]

    def script(container: Resource) -> str:
        text: str = container["command"][container["command"].index("-c") + 1]
        for folder in ("credentials", "token"):
            text = text.replace(f" /{folder}/", f" {tmp_path}/{folder}/")
            text = text.replace(f"cat /{folder}/", f"cat {tmp_path}/{folder}/")
        assert " /" not in text.replace(f" {tmp_path}", ""), text
        return text

    waits, starts = script(spec["initContainers"][0]), script(spec["containers"][0])
    (tmp_path / "token").mkdir()
    (tmp_path / "credentials" / "node").mkdir(parents=True)
    agent = tmp_path / "oobleck-agent"
    agent.write_text('#!/bin/sh\necho "$OOBLECK_JOIN_TOKEN:$*"\n')
    agent.chmod(0o755)

    def run(text: str, **how: Any) -> str:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["sh", "-c", text, "agent", "--name=n1"]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, **how
        ).stdout

    with pytest.raises(subprocess.TimeoutExpired):
        run(waits, timeout=1)
    (tmp_path / "token" / "token").write_text("hunter2\n")
    run(waits, timeout=60)
    assert run(starts) == "hunter2:--name=n1\n"
    (tmp_path / "token" / "token").unlink()
    (tmp_path / "credentials" / "node" / "client.crt").touch()
    run(waits, timeout=60)
    assert run(starts) == ":--name=n1\n"


AGENT, MASTER, KUBE_DNS, ELSEWHERE = "oobleck-agent", "oobleck-master", "kube-dns", "elsewhere"


def allowed(policies: list[Resource], way: str, pod: str, other: str, port: int | str) -> bool:
    """Whether the policies let the pod have this `way`, Ingress or Egress, with the other."""
    labels = {
        AGENT: {"app.kubernetes.io/name": AGENT, "app.kubernetes.io/part-of": "oobleck"},
        MASTER: {"app.kubernetes.io/name": MASTER, "app.kubernetes.io/part-of": "oobleck"},
        KUBE_DNS: {"k8s-app": KUBE_DNS},
        ELSEWHERE: {},
    }
    chosen = [
        policy["spec"]
        for policy in policies
        if way in policy["spec"]["policyTypes"]
        and policy["spec"]["podSelector"].get("matchLabels", {}).items() <= labels[pod].items()
    ]
    assert chosen, "no policy chooses the pod, so all is allowed"

    def meets(peer: Resource) -> bool:
        if "ipBlock" in peer:
            return other == ELSEWHERE
        namespace = peer.get("namespaceSelector", {}).get("matchLabels")
        assert namespace in (None, {"kubernetes.io/metadata.name": "kube-system"})
        wanted = peer["podSelector"]["matchLabels"]
        same = wanted.items() <= labels[other].items()
        return same and (namespace is not None) == (other == KUBE_DNS)

    def has(given: Resource) -> bool:
        if "endPort" in given:
            return isinstance(port, int) and given["port"] <= port <= given["endPort"]
        named = {"control": 4600}
        return named.get(given["port"], given["port"]) == port

    peers, rules = {"Ingress": ("from", "ingress"), "Egress": ("to", "egress")}[way]
    return any(
        any(map(meets, rule[peers])) and any(map(has, rule["ports"]))
        for spec in chosen
        for rule in spec.get(rules, ())
    )


@pytest.mark.parametrize("name", ["daemonset", "jobset"])
def test_pods_reach_what_they_need_and_nothing_else(name: str) -> None:
    policies = [one for one in build(BASES / name) if one["kind"] == "NetworkPolicy"]
    ports = (53, 443, 4600, 4601, 32768, 60999)
    everybody = (AGENT, MASTER, KUBE_DNS, ELSEWHERE)

    def found(way: str, pod: str) -> set[tuple[str, int]]:
        pairs = [(other, port) for other in everybody for port in ports]
        return {pair for pair in pairs if allowed(policies, way, pod, *pair)}

    links = {(AGENT, 32768), (AGENT, 60999)}
    assert found("Ingress", AGENT) == links, "health is for kubelets, whom no policy stops"
    assert found("Egress", AGENT) == {*links, (MASTER, 4600), (KUBE_DNS, 53)}
    assert found("Ingress", MASTER) == {(AGENT, 4600), (MASTER, 4600)}
    assert found("Egress", MASTER) == set()
    assert found("Ingress", ELSEWHERE) == found("Egress", ELSEWHERE) == set()


def test_the_policy_that_the_page_offers_leads_out_and_not_to_metadata() -> None:
    page = (BASES.parent.parent / "docs" / "deploy" / "kubernetes.md").read_text()
    (text,) = [part for part in page.split("\n\n") if "kind: NetworkPolicy" in part]
    (policy,) = read(dedent(text))
    check(policy)
    assert allowed([policy], "Egress", AGENT, ELSEWHERE, 443)
    assert not allowed([policy], "Egress", AGENT, AGENT, 443)
    (rule,) = policy["spec"]["egress"]
    assert "169.254.0.0/16" in rule["to"][0]["ipBlock"]["except"]


@pytest.mark.parametrize("name", ["daemonset", "jobset"])
def test_the_end_of_an_agents_pod_is_a_drain_and_not_cut_off(name: str) -> None:
    (pod,) = [pod for kind, pod in pods(build(BASES / name)) if kind != "StatefulSet"]
    (container,) = pod["spec"]["containers"]
    (grace,) = [arg for arg in container["args"] if arg.startswith("--drain-grace=")]
    assert pod["spec"]["terminationGracePeriodSeconds"] > int(grace.partition("=")[2]) + 10
    # The kubelet sends SIGTERM behind any hook, and a second one ends an agent at once.
    assert "lifecycle" not in container
    assert container["command"][0] == "tini", "the first process of a pod gets no signal by default"


@pytest.mark.parametrize("name", ["daemonset", "jobset"])
def test_the_component_gives_agents_their_gpus(name: str, tmp_path: Path) -> None:
    paths = [os.path.relpath(BASES / each, tmp_path) for each in (name, "gpu")]
    text = yaml.safe_dump({"resources": paths[:1], "components": paths[1:]})
    (tmp_path / "kustomization.yaml").write_text(text)
    (pod,) = [pod for kind, pod in pods(build(tmp_path)) if kind != "StatefulSet"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["args"][-2:] == ["--device=cuda", "--workers=8"]


def test_what_the_page_has_you_write_builds(tmp_path: Path) -> None:
    page = (BASES.parent.parent / "docs" / "deploy" / "kubernetes.md").read_text()
    text = page.split("<<'END'\n")[1].split("    END\n")[0]
    text = re.sub(r"^    # ", "    ", text, flags=re.MULTILINE)  # with GPUs
    folder = os.path.relpath(BASES.parent.parent, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(dedent(text).replace("- ../", f"- {folder}/"))
    built = build(tmp_path)
    for resource in built:
        check(resource)
    images = {one["image"] for _, pod in pods(built) for one in containers(pod)}
    (image,) = images
    assert re.fullmatch("registry.example.org/oobleck@sha256:[0-9a-f]{64}", image)
    claims = [one["spec"] for one in built if one["kind"] == "PersistentVolumeClaim"]
    assert [claim["storageClassName"] for claim in claims] == ["shared-files"] * 2
    (agents,) = [pod for kind, pod in pods(built) if kind == "DaemonSet"]
    assert "--device=cuda" in agents["spec"]["containers"][0]["args"]
