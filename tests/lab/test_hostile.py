"""The lab's hostile clients at a small scale: whatever they send, another client's answers are as before, and nothing
is an error of the server's own."""

import pytest

from lab.servers import hostile

SMALL = {
    "CHAT_BYTES": 400_000,
    "DOCUMENT_BYTES": 300_000,
    "GIVE_UP_S": 0.5,
    "WARM_CHUNKS": 4,
    "CHUNKS": 20,
    "SOCKETS": 20,
    "ANSWER_TOKENS": 20,
    "FLOOD": 1_500,
    "PIECES_BYTES": 200_000,
    "SALTS": 40,
    "LISTED": 100,
    "LISTINGS": 10,
    "REFUSED_BYTES": 30_000_000,
    "LOGPROB_TOKENS": 40,
    "EXPLAINED": 200,
    "SIZES": (64, 128),
    "COST_S": 0.05,
}
BUSY = ("503", "gone", "ConnectionResetError", "BrokenPipeError", "RemoteDisconnected")
"""What a client may find beside a refusal: no place for now, a connection that was ended, its own patience."""


@pytest.mark.slow
def test_hostile_clients_change_no_answer_and_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(hostile, name, value)
    seen: list[tuple[object, ...]] = []
    found = hostile.run("nano", 1, 0, lambda *step: seen.append(step))
    assert seen == [(stage, 1, 1) for stage in hostile.STAGES]
    assert found["figures"]["wrong_answers"] == 0
    assert (*found["statuses"],) == hostile.STAGES
    for kind in ("long bodies", "parts", "pieces", "headers", "refused", "salts", "listings"):
        assert found["statuses"][kind][0], kind  # it was answered somehow
    outcomes = {outcome for rounds in found["statuses"].values() for each in rounds for outcome in each}
    statuses = {outcome.rpartition(": ")[2] for outcome in outcomes}
    assert all(status[0] in "24" or status in BUSY or status in ("yes", "nothing") for status in statuses), outcomes
    refused = {outcome.rpartition(": ")[0] for outcome in outcomes if outcome.rpartition(": ")[2].startswith("4")}
    assert {"parts", "pieces", "headers", "refused"} <= refused, outcomes
