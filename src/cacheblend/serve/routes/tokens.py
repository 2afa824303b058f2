"""Texts to token ids and back, as vLLM has it: POST /tokenize, POST /detokenize.

A chat's ids are those that `/v1/chat/completions` computes with.
"""

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request

from cacheblend.engines.tokens.chat import strings_in
from cacheblend.serve.admission import check_model
from cacheblend.serve.errors import ApiError
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.prompts import chat_prompt, texts_of_chat
from cacheblend.serve.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from cacheblend.serve.state import ServerState


def add_routes(app: FastAPI, state: ServerState) -> None:
    """Adds the routes of this module to the app."""
    Key = Annotated[ApiKey, Depends(state.authenticate)]  # noqa: N806

    @app.post("/tokenize")
    async def tokenize(request: Request, asked: TokenizeRequest, key: Key) -> dict[str, Any]:
        check_model(state, asked.model)
        return await state.parse(request, lambda: _tokenize(state, asked))

    @app.post("/detokenize")
    async def detokenize(request: Request, asked: DetokenizeRequest, key: Key) -> dict[str, Any]:
        check_model(state, asked.model)
        return await state.parse(request, lambda: _detokenize(state, asked))


def _tokenize(state: ServerState, asked: TokenizeRequest) -> dict[str, Any]:
    ids = _ids(state, asked)
    if state.settings.max_prompt_tokens is not None and len(ids) > state.settings.max_prompt_tokens:
        raise ApiError(400, f"the text has {len(ids)} tokens; at most {state.settings.max_prompt_tokens} are read")
    return {
        "count": len(ids),
        "max_model_len": state.engine.survey.max_length,
        "tokens": ids,
        "token_strs": state.engine.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None,
    }


def _ids(state: ServerState, asked: TokenizeRequest) -> list[int]:
    builder = state.builder()
    beside = strings_in([asked.prompt, asked.tools, asked.chat_template_kwargs])
    state.text_limit.check([*texts_of_chat(asked.messages or (), asked.documents), *beside], "the text")
    if asked.messages is None:
        return builder.text_ids(asked.prompt or "", special=asked.add_special_tokens is not False)
    if asked.add_special_tokens:
        raise ApiError(400, "a chat's special tokens are those of its template", param="add_special_tokens")
    same = {"messages", "documents", "tools", "tool_choice", "chat_template_kwargs"}
    chat = ChatRequest.model_construct(**{name: getattr(asked, name) for name in same})
    found: list[int] = chat_prompt(state.engine, chat, state.settings.chunk_tokens).prompt.token_ids.tolist()
    return found


def _detokenize(state: ServerState, asked: DetokenizeRequest) -> dict[str, Any]:
    engine, size = state.engine, state.engine.survey.vocab_size
    state.builder()
    most = state.settings.max_prompt_tokens or engine.survey.max_length
    if most is not None and len(asked.tokens) > most:
        raise ApiError(400, f"{len(asked.tokens):,} tokens are given; at most {most:,} are read", code="too_long")
    for number, token in enumerate(asked.tokens):
        if not 0 <= token < size:
            raise ApiError(400, f"tokens.{number} is {token}; ids are in 0..{size - 1}", param="tokens")
    return {"prompt": engine.tokenizer.decode(asked.tokens, clean_up_tokenization_spaces=False)}
