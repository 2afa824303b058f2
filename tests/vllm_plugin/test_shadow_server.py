"""The shadow check behind vLLM's OpenAI server, whose engine runs in a process of its own: it computes while there is
no request, its figures come to the endpoint, and the server ends while answers wait."""

import threading
import time
from pathlib import Path

from transformers import AutoTokenizer

from cacheblend.nano import model_path
from lab.servers.vllm_server import Server, ServerSettings, serving
from vllm_running import Texts, needs_vllm

pytestmark = needs_vllm

NAME = "vllm:cacheblend_shadow"
IN_TIME_S = 120.0


def figure(server: Server, name: str) -> float:
    """The sum of one of the check's metrics over its labels."""
    return sum(value for key, value in server.metrics().items() if key.split("{")[0] == f"{NAME}{name}")


def test_answers_are_compared_while_the_server_has_no_request(models: dict[str, Path], tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(models["llama"])
    texts = Texts(51)
    passages = texts.passages(5)
    first, *others = [texts.prompt(texts.rng.sample(passages, 5)) for _ in range(7)]
    extra = {
        "allow_untested_version": True,
        "lookup_timeout_s": 30.0,  # the machine may be busy
        "store": f"file://{tmp_path}/store",
        "recompute_ratio": 0.1,
        "refresh_s": 0,
        "controller": False,
        "shadow": 1.0,
        "shadow_floor": 0.8,
    }
    settings = ServerSettings(models["llama"], extra, 2048, 256, "float32", ("--enforce-eager",))
    with serving(settings) as server:
        server.ask(first.ids, 1, first.spans)
        server.wait_for_captures(sum(map(len, passages)))
        for one in others:
            server.ask(one.ids, 6, one.spans)
        end = time.monotonic() + IN_TIME_S
        while figure(server, "_total") + figure(server, "_dropped_total") < len(others) and time.monotonic() < end:
            time.sleep(0.1)
        assert figure(server, "_total") == len(others) and figure(server, "_dropped_total") == 0
        assert figure(server, "_tokens_total") == 6 * len(others)
        assert figure(server, "_kl_count") == len(others) and figure(server, "_kl_sum") > 1
        assert figure(server, "_changes_total") >= 1 and figure(server, "_ratio") > 0.1
        assert figure(server, "_waiting") == 0
        several = [threading.Thread(target=server.ask, args=(one.ids, 20, one.spans)) for one in others]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join(IN_TIME_S)
        ends_at = time.monotonic()
    assert time.monotonic() - ends_at < 60
