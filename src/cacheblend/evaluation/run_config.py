"""What makes one run another one: all that shapes its cells. Knows nothing of how they are reported."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import cacheblend
from cacheblend.core.plan.prompt import Prompt
from cacheblend.data import QuestionRow
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation.methods import Arm

if TYPE_CHECKING:
    from cacheblend.evaluation.runner import Settings

CODE = (
    *("core", "store", "engines"),
    *(
        f"evaluation/{name}.py"
        for name in ("methods", "choices", "compute", "run_config", "records", "runner", "templates")
    ),
)
"""The source that makes cells. What only reports them is not in it: rows may be reported anew by later code."""
LIBRARIES = ("python", "torch", "transformers", "tokenizers")


def describe(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    arms: Sequence[Arm],
    settings: "Settings",
    prompts: Iterable[Prompt],
) -> dict[str, Any]:
    """The run's config, plain JSON; its hash is in the folder's name.

    The prompts' ids stand for tokenizer, chat template and template. The machine is not in it: it shapes times only,
    and is kept with each row.
    """
    data, asked = hashlib.sha256(), hashlib.sha256()
    for row in rows:
        data.update(json.dumps(asdict(row), ensure_ascii=False).encode())
    for prompt in prompts:
        asked.update(b"".join(len(s).to_bytes(4) + s.token_ids.tobytes() for s in prompt.segments) + b"|")
    versions = provenance.versions()
    described = {
        "cacheblend": cacheblend.__version__,
        "code": provenance.code_digest(CODE),
        "libraries": {name: versions[name] for name in LIBRARIES},
        "model": engine.name,
        "fingerprint": engine.planner.root.hex(),
        "device": engine.model.device.type,
        "store": engine.store.stats().tier,
        "engine": asdict(engine.config),
        "rows": len(rows),
        "data": data.hexdigest(),
        "prompts": asked.hexdigest(),
        "chat": settings.template.layout.is_chat(engine),
        "template": asdict(settings.template),
        "top_k": settings.top_k,
        "max_tokens": settings.max_tokens,
        "arms": [repr(arm) for arm in arms],
    }
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain
