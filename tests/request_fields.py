"""The fields of OpenAI's and vLLM's requests, by kind of request."""

import typing
from typing import Any

import pytest

from cacheblend.serve.schemas import ChatRequest, CompletionRequest, ResponsesRequest, Sampling

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
COMPLETION = {"model": "m", "prompt": "hello"}
RESPONSE = {"model": "m", "input": "hello"}
KINDS: dict[str, tuple[type[Sampling], dict[str, Any], str]] = {
    "chat": (ChatRequest, CHAT, "chat.completion_create_params.CompletionCreateParamsBase"),
    "completions": (CompletionRequest, COMPLETION, "completion_create_params.CompletionCreateParamsBase"),
    "responses": (ResponsesRequest, RESPONSE, "responses.response_create_params.ResponseCreateParamsBase"),
}
VLLM = {  # fields of vLLM 0.33's requests that OpenAI's do not have
    *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt", "chat_template"),
    *("chat_template_kwargs", "continue_final_message", "documents", "ec_transfer_params", "echo", "ignore_eos"),
    *("include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logprob_token_ids"),
    *("media_io_kwargs", "min_p", "min_tokens", "mm_payload", "mm_processor_kwargs", "priority", "prompt_embeds"),
    *("prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id", "return_mm_kwargs"),
    *("return_prompt_text", "return_token_ids", "return_token_offsets", "return_tokens_as_token_ids"),
    *("return_weight_versions",),
    *("routed_experts_prompt_start", "session_id", "skip_special_tokens", "spaces_between_special_tokens"),
    *("stop_token_ids", "stream_interval", "structured_outputs", "thinking_token_budget", "top_k"),
    *("truncate_prompt_tokens", "truncation_side", "use_beam_search", "vllm_xargs", "watermarking"),
    *("enable_response_messages", "previous_input_messages"),  # of its /v1/responses
}


def openai_fields(kind: str) -> set[str]:
    module, _, name = KINDS[kind][2].rpartition(".")
    return {*typing.get_type_hints(getattr(pytest.importorskip(f"openai.types.{module}"), name)), "stream"}
