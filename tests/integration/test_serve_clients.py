"""The benchmarks that people point at servers, against this one, at tiny size; each where it is installed.

`.ci/clients` installs them in environments of their own and names their programs: GUIDELLM, AIPERF, VLLM."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cacheblend.nano import model_path
from cacheblend.serve.settings import ServeSettings
from campaign import rotating
from serving import running

REQUESTS, INPUT, OUTPUT = 3, 24, 6
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM_HERE = Path(__file__).parents[2] / ".venv-vllm/bin/python"
VLLM_BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""  # `vllm bench serve`: wheels for CPUs have another name, under which vLLM's own program does not find itself


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ServeSettings(active=4, waiting=32, drain_s=1)) as address:
        yield address


def program(name: str) -> str:
    """Where a client is, for vLLM a Python that has it; skips where it is not."""
    found = os.environ.get(name.upper()) or (None if name == "vllm" else shutil.which(name))
    if found is None and name == "vllm" and VLLM_HERE.exists():
        found = str(VLLM_HERE)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(command: list[str], folder: Path, env: dict[str, str] = OFFLINE) -> str:
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=1800, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return ended.stdout


def values(found: Any, name: str) -> Iterator[Any]:
    """All values of this name in a JSON value."""
    if isinstance(found, dict):
        yield from (value for key, value in found.items() if key == name)
    for inner in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from values(inner, name)


@pytest.mark.parametrize(
    ("endpoint", "model"),
    rotating(
        [(path, told) for path in ("/v1/completions", "/v1/chat/completions") for told in ([], ["--model", "nano"])]
    ),
)
def test_vllm_bench_serve(url: str, tmp_path: Path, endpoint: str, model: list[str]) -> None:
    command = [program("vllm"), "-c", VLLM_BENCH, "--base-url", url, "--endpoint", endpoint, *model]
    command += ["--backend", "openai-chat" if "chat" in endpoint else "openai", "--tokenizer", str(model_path())]
    command += ["--dataset-name", "random", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    command += ["--num-prompts", str(REQUESTS), "--ignore-eos", "--save-result", "--result-filename", "found.json"]
    run(command, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found
    assert found["total_output_tokens"] == REQUESTS * OUTPUT and found["mean_ttft_ms"] > 0


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_guidellm(url: str, tmp_path: Path, endpoint: str) -> None:
    command = [program("guidellm"), "run", "--disable-console", "--profile", "kind=synchronous"]
    command += ["--backend", f"kind=openai_http,target={url},request_format={endpoint}"]
    command += ["--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={model_path()}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}"]
    command += ["--output", f"kind=json,path={tmp_path / 'found.json'}"]
    run(command, tmp_path)
    [benchmark] = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == REQUESTS and not requests["errored"], requests["errored"]
    assert all(each["output_metrics"]["text_tokens"] == OUTPUT for each in requests["successful"])


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses"])
def test_aiperf(url: str, tmp_path: Path, endpoint: str) -> None:
    command = [program("aiperf"), "profile", "--model", "nano", "--url", url, "--endpoint-type", endpoint]
    command += ["--streaming", "--tokenizer", str(model_path()), "--request-count", str(REQUESTS), "--concurrency", "1"]
    command += ["--synthetic-input-tokens-mean", str(INPUT), "--output-tokens-mean", str(OUTPUT)]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(tmp_path / "found"), "--ui-type", "none"]
    run(command, tmp_path, {})  # offline it takes a tokenizer's folder for a name to look up
    [file] = (tmp_path / "found").rglob("profile_export_aiperf.json")
    found = json.loads(file.read_text())
    assert found["request_count"]["avg"] == REQUESTS and not found.get("error_summary"), found
