"""Which model an engine runs: what the names of its stored blocks depend on. Engines that agree on it share a store's
contents."""

from dataclasses import dataclass, replace
from pathlib import Path

from cacheblend.core.config import AnchorKind, BlendConfig
from cacheblend.core.errors import check_encodable
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.engines.fingerprint import with_adapters


@dataclass(frozen=True)
class ModelIdentity:
    """A loaded model, as far as names of blocks need it."""

    folder: Path | None  # the model's files; None for a model that was not loaded from a folder
    fingerprint: str  # of the weights and of load options that change K and V (`fingerprint_folder`)
    dtype: str  # of the KV cache, without ``torch.``: ``bfloat16``
    bos_id: int | None  # the token that the tokenizer puts in front of a prompt; None: it puts none
    name: str  # for people
    adapters: str = ""  # digest of the adapters in effect (`AdapterWatch`); empty: none
    has_exact_hits: bool = True  # see `Planner`
    weights: str = ""  # fingerprint of the folder's files alone, however they are loaded; empty: nobody compares it

    def anchor(self, rule: AnchorKind) -> Anchor:
        """The anchor of chunks; ``auto`` is the BOS token where the tokenizer sets one, else nothing. Raises
        `InvalidInputError`: the rule is ``bos`` and there is no BOS token."""
        if rule == "auto":
            rule = "none" if self.bos_id is None else "bos"
        return Anchor(rule, self.bos_id)

    def planner(self, config: BlendConfig, tenant: str = "") -> Planner:
        """The planner for prompts of one tenant; no tenant finds blocks that another one stored. Raises
        `InvalidInputError`: the configured anchor needs a BOS token that the model does not have, or the tenant's name
        has a lone surrogate."""
        check_encodable(tenant, f"the tenant {tenant!r}")
        planner = Planner.of_model(
            with_adapters(self.fingerprint, self.adapters),
            self.dtype,
            self.anchor(config.anchor),
            config.block_size,
            codec=config.codec,
            salt=f"{config.salt}\x1f{tenant}" if tenant else config.salt,
        )
        return replace(planner, has_exact_hits=self.has_exact_hits)
