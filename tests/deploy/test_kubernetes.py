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


def sources() -> dict[str, Resource]:
    paths = [path for path in BASES.rglob("*.yaml") if path.name != "kustomization.yaml"]
    return {str(path.relative_to(BASES)): read(path.read_text())[0] for path in sorted(paths)}


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
    check(sources()[name])


def test_a_wrong_manifest_is_found() -> None:
    wrong = sources()["agents/pod.yaml"]
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
    assert images == {"registry.example.org/oobleck:0.1.0"}
    (claim,) = [one for one in built if one["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["storageClassName"] == "shared-files"
    (agents,) = [pod for kind, pod in pods(built) if kind == "DaemonSet"]
    assert "--device=cuda" in agents["spec"]["containers"][0]["args"]
