"""Examines whether a model folder or a loaded model can be blended, by static checks and live runs. Only words the
results; the survey and the live check examine. Never raises for one that cannot be: it reports a failed check."""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from cacheblend.core.errors import CacheBlendError
from cacheblend.engines.checkpoint import weight_files
from cacheblend.engines.fingerprint import ModelIdentity
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.live_check import LiveCheck
from cacheblend.engines.hf.model_loader import class_of, loading_reason, open_folder, read_config
from cacheblend.engines.hf.survey import Survey, survey_model
from cacheblend.engines.tokens import PromptBuilder


@dataclass(frozen=True)
class Check:
    """The result of one check. `ok`: False if it prevents blending; None if it is only information."""

    name: str
    ok: bool | None
    detail: str


@dataclass
class Diagnosis:
    """All checks of one model, in order; the list ends with the first failed check that makes later ones impossible."""

    model: str  # its name
    checks: list[Check] = field(default_factory=list)  # in the order in which they were made
    fingerprint: str = ""  # of a folder's files, once it is opened

    @property
    def blendable(self) -> bool:
        return all(check.ok is not False for check in self.checks)

    @property
    def reason(self) -> str:
        """The failed checks in words; empty if there are none."""
        failed = [check for check in self.checks if check.ok is False]
        return "; ".join(dict.fromkeys(f"{check.name}: {check.detail}" for check in failed))

    def to_dict(self) -> dict[str, Any]:
        checks = [asdict(check) for check in self.checks]
        return {"model": self.model, "checks": checks, "blendable": self.blendable, "reason": self.reason}


@without_ambient
def diagnose(
    model: PreTrainedModel | str | Path,
    *,
    name: str = "",
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    on_check: Callable[[str], None] = lambda name: None,
) -> Diagnosis:
    """Examines a model folder, or a loaded model, which is not changed, and has no tokenizer. `name`: for display;
    empty: the folder's or the model's class. `dtype` and `device` are for a folder's weights; ``auto`` keeps the stored
    one, None takes CUDA if there is any. `on_check` is called with what the live run, which may take minutes, has
    checked."""
    is_folder, tokenizer = isinstance(model, str | Path), None
    found = Diagnosis(name or (Path(str(model)).resolve().name if is_folder else type(model).__name__))
    what = "files"
    try:
        if isinstance(model, str | Path):
            folder = Path(model)
            config_file, weights = folder / "config.json", weight_files(folder)
            there = {"config.json": config_file.is_file(), "weights": bool(weights)}
            if missing := [part for part, is_there in there.items() if not is_there]:
                found.checks.append(Check(what, False, f"{folder} has no {' and no '.join(missing)}"))
                return found
            size = sum(file.stat().st_size for file in weights) / 2**30
            found.checks.append(Check(what, True, f"config.json, {len(weights)} weight file(s), {size:.2f} GiB"))
            what = "config"  # checked before the weights are read
            json.loads(config_file.read_text())
            class_of(read_config(folder))
            what = "weights"
            opened = open_folder(folder, dtype=dtype, device=device, with_tokenizer=False)
            model, found.fingerprint = opened.model, opened.fingerprint
            with contextlib.suppress(Exception):
                tokenizer = AutoTokenizer.from_pretrained(folder, mistral_format=False)
        what = "architecture"
        survey = survey_model(model)
    except Exception as error:
        detail = " ".join(str(error).split())
        if not isinstance(error, CacheBlendError):
            detail = f"{loading_reason(error)} ({type(error).__name__})" if str(error) else type(error).__name__
        found.checks.append(Check(what, False, detail))
        return found
    found.checks += _survey_checks(model, survey)
    if is_folder:
        found.checks += _tokenizer_checks(tokenizer, survey.room)
    for title, ok, detail in LiveCheck(model, survey).run():
        found.checks.append(Check(title, ok, detail))
        on_check(f"done: {title}")
    return found


def _tokenizer_checks(tokenizer: Any, room: int) -> Iterator[Check]:
    if tokenizer is None:
        yield Check("tokenizer", False, "the folder has no tokenizer; pass token ids instead of text")
        return
    try:
        builder = PromptBuilder(tokenizer)
    except Exception as error:
        yield Check("tokenizer", False, " ".join(str(error).split()))
        return
    yield Check("tokenizer", True, f"fast backend, {len(tokenizer)} tokens")
    identity = ModelIdentity(None, "", "", builder.bos_id, "", in_front=builder.in_front, room=room)
    anchor = identity.anchor("auto")
    if anchor.rule == "none":
        yield Check("anchor", None, "none: the tokenizer adds no BOS token")
    elif anchor.rule == "bos":
        yield Check("anchor", True, f"BOS, id {builder.bos_id}")
    else:
        yield Check("anchor", True, f"a text that ships, {sum(map(len, anchor.front))} tokens")
    has_template = bool(tokenizer.chat_template)
    yield Check("chat template", has_template or None, "present" if has_template else "none: plain prompts only")


def _survey_checks(model: PreTrainedModel, survey: Survey) -> Iterator[Check]:
    layout, kinds, latents = survey.layout, survey.kinds, [latent for latent in survey.latents if latent is not None]
    layers, attend = survey.num_layers, len(kinds.kv_layers)
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    if layers == 1:
        detail = "one decoder layer: no layer can be checked ahead of others, so no rows can be selected by deviation"
        yield Check("layers", False, detail)
    yield Check("architecture", True, f"{type(model).__name__}, {layers} decoder layers, {parameters:.0f} M parameters")
    which = "each layer calls" if attend == layers else f"{attend} of {layers} layers call"
    yield Check("attention", True, f"{which} transformers' attention interface once")
    shapes = Counter(
        f"a latent of {latent.rank} and a rotated key part of {latent.rotary_dim}"
        if latent
        else f"{shape.kv_heads} KV heads of {shape.head_dim}"
        for shape, latent in zip(layout.layers, survey.latents, strict=True)
    )
    dtype = str(layout.dtype).removeprefix("torch.")
    yield Check("KV cache", True, f"{_counted(shapes)}, {dtype}: {layout.block_bytes(1)} bytes a token")
    if latents:
        share = sum(latent.width for latent in latents) / sum(latent.expanded for latent in latents)
        kept = f"{len(latents)} layers keep latents, {share:.1%} of their keys and values expanded"
        yield Check("latent attention", True, f"{kept}; attention is over the latents (absorbed form)")
    if kinds.states:
        steps = " one row at a time, so only behind a prefix that leaves few rows" if kinds.stepped else ""
        kept = f"{len(kinds.states)} of {kinds.num_layers} layers keep a state, {kinds.state_bytes} bytes in all"
        yield Check("recurrent layers", True, f"{kept}; exact prefixes are stored with it and go on from it{steps}")
        detail = (
            f"the exact prefix, and behind it at most {kinds.saveable:.0%} of the compute: rows can be left out in "
            f"{len(kinds.blended_layers)} of {kinds.num_layers} layers, those behind the last recurrent one"
            if kinds.blended_layers
            else "the exact prefix, and nothing behind it: a state needs every row, and no attention layer behind the "
            "last recurrent one could leave rows out (0% of the compute); chunks are reused behind their anchor only"
        )
        yield Check("what can be saved", None, detail)
    windows = Counter(f"sliding by {window}" if window else "full" for window in survey.windows)
    yield Check("windows", True, f"layers: {'; '.join(f'{count} {which}' for which, count in windows.items())}")
    head_dim = max(shape.head_dim for shape in survey.head_shapes)
    turns = Counter(
        "keys without positions (NoPE)"
        if turn is None
        else f"{turn.pairing} pairing, {turn.rotary_dim} of {head_dim} dims, "
        f"{turn.inv_freq.max():.3g} .. {turn.inv_freq.min():.3g} rad a position"
        for turn in survey.rotations
    )
    yield Check("re-positioning", True, _counted(turns))
    context = "no limit in the config" if survey.context_length is None else f"{survey.context_length} tokens"
    if survey.length_limit is None:
        yield Check("length", True, f"context: {context}")
    else:
        limit = f"blendable up to {survey.length_limit}, where the RoPE frequencies change"
        yield Check("length", None, f"context: {context}; {limit}")


def _counted(kinds: Counter[str]) -> str:
    return "; ".join(f"{count} layers: {kind}" for kind, count in kinds.items())
