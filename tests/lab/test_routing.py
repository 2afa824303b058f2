"""The router of `lab routing`: whom it sends what."""

import threading
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lab.servers.routing import AFFINITY, ROUND_ROBIN, Router


@given(st.integers(1, 5), st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=40))
@settings(max_examples=50, deadline=None)
def test_round_robin_is_even_whatever_is_asked(servers: int, asked: list[list[int]]) -> None:
    router = Router(servers, ROUND_ROBIN)
    counts = Counter(router.choose(chunks) for chunks in asked)
    assert not asked or max(counts.values()) - min(counts[server] for server in range(servers)) <= 1


@given(st.integers(1, 5), st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_affinity_sends_a_topic_where_it_went_and_spreads_topics(servers: int, topics: int, draw) -> None:
    router = Router(servers, AFFINITY)
    asked = [draw.randrange(topics) for _ in range(60)]
    sent: dict[int, set[int]] = {}
    for topic in asked:
        chunks = [4 * topic + each for each in range(4)]
        draw.shuffle(chunks)
        sent.setdefault(topic, set()).add(router.choose(chunks))
    assert all(len(places) == 1 for places in sent.values())
    counts = Counter(place for places in sent.values() for place in places)
    assert max(counts.values()) - min(counts[server] for server in range(servers)) <= 1


def test_a_request_goes_where_most_of_its_chunks_are() -> None:
    router = Router(2, AFFINITY)
    first, second = router.choose([0, 1, 2]), router.choose([3, 4, 5])
    assert first != second
    assert router.choose([0, 4, 5]) == second
    assert router.choose([1, 2, 5]) == first


def test_threads_do_not_lose_requests() -> None:
    router, found = Router(2, ROUND_ROBIN), Counter[int]()
    lock = threading.Lock()

    def ask() -> None:
        for _ in range(200):
            chosen = router.choose([1])
            with lock:
                found[chosen] += 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 400, 1: 400}
