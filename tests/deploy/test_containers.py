"""The image's file: what it is made of, and as whom it runs. That it builds is not tested here."""

import re
import tomllib

from support.folders import ROOT

CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()


def test_the_image_is_made_of_all_packages_and_of_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {*project["tool"]["setuptools"]["package-dir"].values()}
    wanted |= {"pyproject.toml", "constraints.txt", "requirements.txt", "LICENSE"}
    wanted |= {project["project"]["readme"], "deploy/oobleck-agent.service"}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == wanted


def test_pods_run_as_the_images_user() -> None:
    (user,) = re.findall(r"--uid (\d+)", CONTAINERFILE)
    assert f"\nUSER {user}:{user}\n" in CONTAINERFILE
    for name in ("agents/pod.yaml", "master/statefulset.yaml"):
        text = (ROOT / "deploy" / "kubernetes" / name).read_text()
        assert re.findall(r"runAsUser: (\d+)", text) == [user]
