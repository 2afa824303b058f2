"""What a server counts is what its answers say, and both are what its store was asked to hold: a random history."""

import json
import random
from collections import Counter
from typing import Any

from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from campaign import SEED, share
from random_words import words
from serving import shallow

DOCUMENTS = [{"title": f"note {number}", "text": words(24 + number)} for number in range(12)]
SUMMED = ("prompt_tokens", "generated_tokens", "missed_tokens", "recomputed_tokens")
REFUSED = ({"n": 0}, {"messages": []}, {"cacheblend": {"mode": "best"}}, {"max_tokens": 10**9})


def chat(web: TestClient, salt: str, documents: list[int], mode: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status of a chat's answer, and its report."""
    body = {"messages": [{"role": "user", "content": "Where is it?"}], "max_tokens": 2, "temperature": 1.0}
    body |= {"documents": [DOCUMENTS[number] for number in documents], "cacheblend": {"salt": salt, "mode": mode}}
    answer = web.post("/v1/chat/completions", json=body | fields)
    if answer.status_code != 200 or not fields.get("stream"):
        return answer.status_code, answer.json().get("cacheblend")
    *_, last = (json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {"))
    return answer.status_code, last["cacheblend"]


def shown(web: TestClient) -> Counter[str]:
    """What /metrics has of requests and tokens, by name and label."""
    found = Counter[str]()
    for family in text_string_to_metric_families(web.get("/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("cacheblend_").removesuffix("_total")
            if name in (*SUMMED, "hit_tokens", "requests"):
                found[" ".join([name, *sample.labels.values()])] += int(sample.value)
    return found


def test_metrics_answers_and_store_agree() -> None:
    draw, told = random.Random(SEED), Counter[str]()
    with (
        BlendEngine.from_pretrained(shallow(), store="memory", config={"discover": False}) as engine,
        TestClient(create_app(engine, ServeSettings())) as web,
    ):
        sizes = [chat(web, "sizes", [number], "blend")[1]["missed_tokens"] for number in range(len(DOCUMENTS))]
        engine.flush()
        before, held = shown(web), set[tuple[str, int]]()
        for _ in range(share(1000)):
            salt, mode = draw.choice(["", "one", "two"]), draw.choice(["blend", "blend", "reuse", "prefix", "full"])
            documents = draw.sample(range(len(DOCUMENTS)), draw.randint(0, 4))
            fields = draw.choice([{}, {"n": 3}, {"stream": True}, draw.choice(REFUSED)])
            status, report = chat(web, salt, documents, mode, **fields)
            engine.flush()
            told[f"requests /v1/chat/completions {status}"] += 1
            assert (status == 200) == (fields not in REFUSED)
            if status != 200:
                continue
            told.update({name: report[name] for name in SUMMED})
            told.update({f"hit_tokens {source}": tokens for source, tokens in report["hit_tokens"].items()})
            exact, loaded = report["hit_tokens"]["prefix"], report["hit_tokens"]["memory"]
            parts = exact, loaded, report["missed_tokens"], report["text_tokens"], report["left_out_tokens"]
            assert sum(parts) == report["prompt_tokens"] and not report["fallbacks"] + report["load_timeouts"]
            # All that was stored is loaded, or left out as asked, and nothing else is; a passage's first and last token
            # may be one with the text beside it, and the first passage's beginning part of an exact prefix
            edges = 2 * len(documents)
            stored = [number for number in documents if (salt, number) in held]
            known, unknown = (sum(sizes[number] for number in each) for each in (stored, {*documents} - {*stored}))
            there = loaded if mode in ("blend", "reuse") else report["left_out_tokens"]
            assert known - edges <= there + exact and there <= known + edges and loaded in (0, there)
            assert abs(report["missed_tokens"] - unknown) <= edges
            held |= {(salt, number) for number in documents}
        assert shown(web) - before == told
        # each passage of a tenant was captured once: as its tokens stand alone, or one with the text beside it
        captured = len(engine.store.manifests()) - len(DOCUMENTS)
        assert len(held) <= captured <= 4 * len(held)
        families = text_string_to_metric_families(web.get("/metrics").text)
        values = Counter[str]()
        for family in families:
            for each in family.samples:
                values[each.name.removeprefix("cacheblend_")] += each.value  # type: ignore[assignment]
        stats = engine.store.stats()
        assert (values["store_blocks"], values["store_bytes"]) == (stats.blocks, stats.bytes)
        assert values["captures_given_up_total"] == values["fallbacks_total"] == 0
