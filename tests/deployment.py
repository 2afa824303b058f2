"""What deploy/ holds, read as Kubernetes and compose would."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
KUSTOMIZED = ("base", "overlays/cpu", "overlays/replicas", "overlays/vllm")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="manifests are rendered by kubectl")


def rendered(place: str) -> list[dict[str, Any]]:
    """The objects of a base or overlay."""
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes" / place)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


@dataclass
class Container:
    """A container of a rendered Deployment: its variables from ConfigMaps, and its arguments with them put in."""

    pod: dict[str, Any]
    spec: dict[str, Any]
    env: dict[str, str]

    @property
    def args(self) -> list[str]:
        """As the kubelet expands them: a name that is not known stays as it is."""
        return [re.sub(r"\$\((\w+)\)", lambda f: self.env.get(f[1], f[0]), each) for each in self.spec["args"]]


def containers(objects: list[dict[str, Any]]) -> dict[str, Container]:
    """The containers of all Deployments, by name."""
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    found = {}
    for deployment in (each for each in objects if each["kind"] == "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        for spec in pod["containers"]:
            env: dict[str, str] = {}
            for source in spec.get("envFrom", []):
                env |= maps.get(source.get("configMapRef", {}).get("name"), {})
            found[spec["name"]] = Container(pod, spec, env)
    return found


def compose() -> dict[str, Any]:
    """The compose file with its variables put in, as without an environment but for the password that it asks for."""

    def value(found: re.Match[str]) -> str:
        name, _, default = found[1].partition(":")
        return default.removeprefix("-") if default.startswith("-") else f"<{name}>"

    return yaml.safe_load(re.sub(r"\$\{([^}]*)\}", value, (DEPLOY / "compose.yaml").read_text()))


def image_command() -> list[str]:
    """CMD of the server's image."""
    found = re.search(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert found is not None
    return [str(each) for each in yaml.safe_load(found[1])]
