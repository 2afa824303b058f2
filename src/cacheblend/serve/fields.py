"""What becomes of each field of OpenAI's and vLLM's requests that the schemas do not have: nothing is dropped silently.

A field that asks for what this server does not do is refused, unless its value asks for what is done anyway. A few say
nothing about the answer, and are accepted. Any other field is refused as unknown.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cacheblend.serve.errors import ApiError


class Refused(NamedTuple):
    """A refused field: what is missing, or what to use; `neutral` values, as None, ask for what is done anyway."""

    what: str
    neutral: tuple[Any, ...] = ()


_TOOLS = "tools are called by answers of /v1/chat/completions"
_IMAGES = "only text is read"

REFUSED: Mapping[str, Refused] = {
    "add_generation_prompt": Refused("the prompt always ends where the answer begins", (True,)),
    "add_special_tokens": Refused("the tokenizer's own rule applies to text; token ids are taken as they are"),
    "allowed_token_ids": Refused("use logit_bias"),
    "audio": Refused("answers are text"),
    "best_of": Refused("ask for n answers and choose", (1,)),
    "chat_template": Refused("the model's own template is used"),
    "continue_final_message": Refused("use /v1/completions with the whole prompt", (False,)),
    "ec_transfer_params": Refused(_IMAGES),
    "echo": Refused("the prompt is not answered back", (False,)),
    "function_call": Refused("use tools and tool_choice", ("none", "auto")),
    "functions": Refused("use tools", ([],)),
    "include_reasoning": Refused("reasoning is not told apart from the answer", (True,)),
    "include_stop_str_in_output": Refused("a stop text is not part of the answer", (False,)),
    "kv_transfer_params": Refused("what vLLM's clients name there goes into the field cacheblend"),
    "length_penalty": Refused("there is no beam search", (1.0,)),
    "logprob_token_ids": Refused("log-probabilities are given of the likeliest tokens"),
    "media_io_kwargs": Refused(_IMAGES),
    "mm_payload": Refused(_IMAGES),
    "mm_processor_kwargs": Refused(_IMAGES),
    "modalities": Refused("answers are text", (["text"],)),
    "moderation": Refused("nothing is moderated"),
    "priority": Refused("requests are served in the order in which they come", (0,)),
    "prompt_embeds": Refused("prompts are text or token ids"),
    "prompt_logprobs": Refused("log-probabilities are given of the answer's tokens", (0,)),
    "repetition_detection": Refused("use a penalty"),
    "return_mm_kwargs": Refused(_IMAGES, (False,)),
    "return_prompt_text": Refused("the prompt is not answered back", (False,)),
    "return_token_ids": Refused("answers are text; /v1/completions takes token ids", (False,)),
    "return_token_offsets": Refused("answers are text", (False,)),
    "return_tokens_as_token_ids": Refused("log-probabilities name tokens by their text", (False,)),
    "routed_experts_prompt_start": Refused("experts are not reported"),
    "skip_special_tokens": Refused("special tokens are never part of the text", (True,)),
    "spaces_between_special_tokens": Refused("special tokens are never part of the text", (True,)),
    "store": Refused("answers are not kept", (False,)),
    "stream_interval": Refused("each token is an event", (1,)),
    "suffix": Refused("nothing is filled in between texts", ("",)),
    "thinking_token_budget": Refused("use max_tokens"),
    "tool_choice": Refused("the model decides whether it calls a tool; use auto, or none", ("none", "auto")),
    "truncate_prompt_tokens": Refused("a prompt that is too long is refused; shorten it"),
    "truncation_side": Refused("prompts are not shortened"),
    "use_beam_search": Refused("there is no beam search", (False,)),
    "verbosity": Refused("say it in the prompt", ("medium",)),
    "vllm_xargs": Refused("there are no extensions; what blending may be told goes into the field cacheblend"),
    "watermarking": Refused("answers carry no watermark"),
    "web_search_options": Refused("nothing is searched"),
}

REFUSED_RESPONSES: Mapping[str, Refused] = {
    **REFUSED,
    "background": Refused("an answer is given while its client waits", (False,)),
    "context_management": Refused("nothing is left out of an input", ([],)),
    "conversation": Refused("answers are not kept; send the whole conversation as input"),
    "documents": Refused("use /v1/chat/completions; long texts of the input are chunks, too"),
    "enable_response_messages": Refused("the prompt is not answered back", (False,)),
    "include": Refused("answers have their text alone", ([],)),
    "logprobs": Refused("use /v1/chat/completions", (False,)),
    "max_tokens": Refused("use max_output_tokens"),
    "max_tool_calls": Refused(_TOOLS),
    "messages": Refused("use input"),
    "n": Refused("use /v1/chat/completions", (1,)),
    "parallel_tool_calls": Refused(_TOOLS, (True,)),
    "previous_input_messages": Refused("answers are not kept; send the whole conversation as input"),
    "previous_response_id": Refused("answers are not kept; send the whole conversation as input"),
    "prompt": Refused("there are no stored prompts; use input and instructions"),
    "reasoning": Refused("reasoning is not told apart from the answer", ({},)),
    "response_format": Refused("use text.format", ({"type": "text"},)),
    "stream_options": Refused(
        "events are not padded; usage is in the last one", ({}, {"include_obfuscation": False}, {"include_usage": True})
    ),
    "tools": Refused(_TOOLS, ([],)),
    "top_logprobs": Refused("use /v1/chat/completions", (0,)),
    "truncation": Refused("a prompt that is too long is refused; shorten it", ("disabled",)),
}
"""Of `/v1/responses`."""

ACCEPTED: Mapping[str, str] = {
    "metadata": "kept by nobody",
    "prediction": "would only be faster",
    "prompt_cache_key": "stored passages are found by their content",
    "prompt_cache_options": "stored passages are found by their content",
    "prompt_cache_retention": "the store's own rules apply",
    "request_id": "answers have ids of their own",
    "safety_identifier": "not used; keys tell clients apart",
    "service_tier": "there is one",
    "session_id": "requests have no session",
    "user": "not used; keys tell clients apart",
}
"""Fields that say nothing about the answer."""


def check_fields(
    body: Any, known: Iterable[str], refused: Mapping[str, Refused] = REFUSED, accepted: Mapping[str, str] = ACCEPTED
) -> None:
    """Raises `ApiError`, with what to do, for a field of a client's body that nothing would come of. `known` are the
    schema's fields, `accepted` say nothing about the answer, `refused` go whether the schema has them or not."""
    if not isinstance(body, dict):
        return
    known = set(known)
    for name, value in body.items():
        if value is None or (name not in refused and (name in known or name in accepted)):
            continue
        if name not in refused:
            near = difflib.get_close_matches(name[:80], [*known, *refused], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            shown = name[:80].encode(errors="replace").decode()  # half of a surrogate pair is no text to answer with
            raise ApiError(400, f"there is no field {shown!r}{hint}", param=shown, code="unknown_field")
        what, neutral = refused[name]
        if not any(value == each and type(value) is type(each) for each in neutral):
            raise ApiError(400, f"{name} is not supported: {what}", param=name, code="unsupported_field")
