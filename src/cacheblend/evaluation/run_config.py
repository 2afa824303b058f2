"""Settings of a run, and the config that identifies it: all that affects its cells. Knows nothing of reports."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import cacheblend
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.data import QuestionRow
from cacheblend.engines import provenance
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation.methods import Method
from cacheblend.evaluation.templates import Template

CODE = (
    *("core", "store", "engines"),
    *(
        f"evaluation/{name}.py"
        for name in ("methods", "choices", "compute", "run_config", "records", "runner", "templates")
    ),
)
"""The source files that affect cells. Reports are not among them: later code may report the same rows again."""
LIBRARIES = ("python", "torch", "transformers", "tokenizers")


@dataclass(frozen=True)
class Settings:
    """What all methods of a run share.

    Attributes:
        template: layout of the prompts.
        top_k: numbers of passages; every method runs with the first so many passages of each row. None: all of them.
        max_tokens: most tokens of an answer.

    Raises:
        InvalidInputError: `max_tokens` or a `top_k` below 1, or no `top_k` at all.
    """

    template: Template = field(default_factory=Template)
    top_k: tuple[int | None, ...] = (None,)
    max_tokens: int = 32

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidInputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.top_k or any(k is not None and k < 1 for k in self.top_k):
            raise InvalidInputError(f"top_k must be at least 1, got {', '.join(map(str, self.top_k)) or 'none'}")


def describe(
    engine: BlendEngine,
    rows: Sequence[QuestionRow],
    methods: Sequence[Method],
    settings: Settings,
    prompts: Iterable[Prompt],
) -> dict[str, Any]:
    """The config of a run, as plain JSON; its hash is part of the folder's name.

    The prompts' token ids cover tokenizer, chat template and template. The machine is not included: it affects times
    only, and is written with each row.
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
        "methods": [repr(method) for method in methods],
    }
    plain: dict[str, Any] = json.loads(json.dumps(described))
    return plain
