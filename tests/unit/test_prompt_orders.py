"""The same passages in another order: whatever is equal is shared, whichever token the tokenizer puts at an edge."""

import random
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest
import torch

import tokenizers_for_tests as tokenizers
from cacheblend.core.names import BlockName, TokenIds, block_name, chain_names, join_ids, split_blocks
from cacheblend.core.plan.blocks import BlockEntry, KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan, Source
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.tokens import Passage, PromptBuilder

MAKERS = {
    "prepend": tokenizers.sentencepiece,
    "metaspace": partial(tokenizers.sentencepiece, dummy_prefix="metaspace"),
    "byte_level": tokenizers.byte_level,
    "byte_level bos": partial(tokenizers.byte_level, bos=True),
    "gemma": tokenizers.gemma,
    "neox": tokenizers.neox,
    "unigram": tokenizers.unigram,
}
LAYOUTS = {
    "space": "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/]{% endfor %}",
    "line": "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}",
    "two lines": "{% for m in messages %}{{ m.role }}:\n\n{{ m.content }}\n\n{% endfor %}",
    "special": "{% for m in messages %}</s>{{ m.content }}<|im_end|>{% endfor %}",
    "bare": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "documents": "{% for d in documents %}<doc> {{ d.text }} </doc> {% endfor %}{{ messages[-1].content }}",
    "numbers": "Read: {% for d in documents %}{{ d.text }} {{ loop.index }}. {% endfor %}{{ messages[-1].content }}",
}
PASSAGES = [
    "The quick brown fox jumps over the lazy dog.",
    "the dog sleeps on.",
    "1 2 3 passages are stored once",
    "你好世界, nobody knows.",
    "  Who wrote it? ",
    "\nGröße, déjà vu",
    "\n\nand lines.\n",
    "A passage is reused at any position of a prompt\n\n",
    "dog",
    "s",
    "<s> is the answer </s>",
    "😀 emoji 😀",
]
LAYOUT = KVLayout((LayerShape(1, 2),), torch.float32)
ROUNDS = 3
SYSTEMS = ["", "The answer is in the second passage:", "Who wrote it? "]


class Held:
    """A store's blocks."""

    def __init__(self) -> None:
        self.blocks: dict[BlockName, TokenIds] = {}

    def find(self, names: Sequence[BlockName]) -> list[BlockEntry | None]:
        return [BlockEntry(self.blocks[name], LAYOUT, "memory") if name in self.blocks else None for name in names]

    def serve(self, planner: Planner, prompt: Prompt) -> BlendPlan:
        """Plans a prompt, and stores what an engine would: exact text, and missed chunks behind their anchor."""
        plan = planner.plan(prompt, self)  # type: ignore[arg-type]
        ids = plan.prompt.token_ids
        for span in plan.publishable:
            self.blocks[span.name] = ids[span.start : span.stop]
        anchor = planner.anchor.segments(plan.prompt)
        assert planner.chain_of(anchor) == plan.anchor_name
        assert join_ids(anchor).tolist() == plan.anchor_ids.tolist()
        for missed in plan.missed_chunks():
            name = planner.root
            for tokens in (*anchor, missed.token_ids):
                blocks = split_blocks(tokens, planner.block_size)
                names = chain_names(name, blocks)
                self.blocks |= dict(zip(names, blocks, strict=True))
                name = names[-1]
        return plan


@cache
def builder_of(name: str, layout: str) -> PromptBuilder:
    return PromptBuilder(MAKERS[name](LAYOUTS[layout]))


def asked(name: str, layout: str, system: str, passages: Sequence[str]) -> Prompt:
    messages = [{"role": "system", "content": system}] if system else []
    return builder_of(name, layout).chat(
        [*messages, {"role": "user", "content": "Who?"}], [Passage(each, each) for each in passages]
    )


def common(one: TokenIds, other: TokenIds) -> int:
    """Tokens that two prompts begin alike with."""
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size


@pytest.mark.parametrize("rule", ["system", "bos", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MAKERS)
def test_another_order_shares_all_that_is_equal(name: str, layout: str, rule: str) -> None:
    """Every passage is loaded as far as the prompt has its tokens, and the text in front of the first one as far as
    it is the same."""
    draw = random.Random(f"{name} {layout} {rule}")
    bos = builder_of(name, layout).bos_id
    if rule == "bos" and bos is None:
        pytest.skip("no BOS")
    for _ in range(ROUNDS):
        planner, held = Planner(block_name(BlockName(b"root"), np.empty(0, "<u4")), Anchor(rule, bos), 8), Held()
        passages, system = draw.sample(PASSAGES, draw.randrange(2, 5)), draw.choice(SYSTEMS)
        turned = [passages[at:] + passages[:at] for at in range(len(passages))]
        seen = [held.serve(planner, asked(name, layout, system, order)) for order in turned]
        for _ in range(4):
            order = draw.sample(passages, len(passages))
            prompt = asked(name, layout, system, order)
            plan = held.serve(planner, prompt)
            assert np.array_equal(plan.prompt.token_ids, prompt.token_ids)
            known = {tuple(chunk.stored_ids.tolist()) for before in seen for chunk in before.prompt.chunks}
            missed = {plan.prompt.segments[span.segment] for span in plan.spans if span.source is Source.MISS}
            assert not any(tuple(segment.stored_ids.tolist()) in known for segment in missed), order
            front = common(plan.prompt.token_ids, join_ids(Anchor("system", bos).segments(prompt)))
            assert plan.prefix_length >= front or not any(before.prompt.chunks for before in seen), order
            seen.append(plan)
        anchors = {plan.anchor_name for plan in seen}
        assert len(anchors) == 1, "the anchor depends on the order"
