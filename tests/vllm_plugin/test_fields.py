"""The fields of vLLM's requests that `cacheblend serve` knows are those of the vLLM that is installed."""

import ast
import importlib.util
from pathlib import Path

import pytest

from request_fields import KINDS, VLLM, openai_fields

CLASSES = {"chat": "ChatCompletionRequest", "completions": "CompletionRequest", "responses": "ResponsesRequest"}


def vllm_fields(kind: str) -> set[str]:
    """Read from its sources: importing them takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    for file in (Path(spec.origin).parent / "entrypoints").rglob("protocol.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == CLASSES[kind]:
                named = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                return {each.id for each in named if isinstance(each, ast.Name) and not each.id.startswith("_")}
    raise AssertionError(f"vllm has no {CLASSES[kind]}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_is_unknown(kind: str) -> None:
    known = VLLM | openai_fields(kind) | {*KINDS[kind][0].model_fields} | {*KINDS[kind][0].refused}
    assert vllm_fields(kind) <= known
