"""Questions to a server on the model that ships, through OpenAI's own client."""

from typing import Any

import openai

from lab.nano.questions import draw_questions

ROW = draw_questions(777, 1)[0]
PASSAGES = [text.text for text in ROW.passages]
QUESTION = ROW.question


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def messages() -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text} for text in [*PASSAGES, QUESTION]]
    return [{"role": "user", "content": parts}]


def ask(url: str, **options: Any) -> Any:
    settings = {"model": "nano", "messages": messages(), "temperature": 0, "max_tokens": 8} | options
    return client(url).chat.completions.create(**settings)


def extras(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["cacheblend"]
    return found
