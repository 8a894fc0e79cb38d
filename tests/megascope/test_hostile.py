"""A short campaign of each kind of `benchmarks.fuzz.scope`; and a campaign finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.fuzz import scope
from benchmarks.fuzz.hostile import Message
from benchmarks.fuzz.scope import Outcome, judge
from megascope import session
from megascope.server import build_app

Campaign = Callable[[int, int], Outcome]


@pytest.mark.parametrize(
    ("campaign", "num_inputs"),
    [
        (scope.training_page, 200), (scope.speaking_page, 200), (scope.requests, 40),
        (scope.recordings, 150),
    ],
)  # fmt: skip
def test_hostile_inputs_end_in_an_answer_or_a_sentence(
    campaign: Campaign, num_inputs: int, alone: None
) -> None:
    outcome = campaign(num_inputs, 7)
    assert outcome.faults == []
    assert sum(outcome.ends.values()) == num_inputs and len(outcome.ends) >= 1


def test_a_page_that_fails_is_found() -> None:
    class Failing:
        async def answer(self, name: str, body: object) -> bytes:
            raise ValueError(name)

    outcome = Outcome("failing")
    log = scope._Log()
    with log.listening(), scope.served(build_app(Failing(), token=scope.TOKEN)) as port:
        scope.attack(outcome, port, 30, 1, scope.of_a_folder)
    assert outcome.ends["500"] > 5 and len(outcome.faults) > 5
    assert any("Traceback" in one for one in log.failures)


def test_numbers_for_others_that_change_are_found(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks and changes that stay in the model when others are served."""
    monkeypatch.setattr(session.Session, "look_away", lambda self: None)
    outcome = scope.speaking_page(200, 7)
    assert any("others are told otherwise" in one for one in outcome.faults)


def test_a_whole_request_without_an_answer_is_a_fault() -> None:
    whole = Message(b"POST / HTTP/1.1", is_whole=True)
    assert judge(whole, None)[1] and judge(whole, b"")[1]
    assert judge(whole, b"HTTP/1.1 503 x\r\n\r\n")[0] == "503"
    assert judge(Message(b"?", is_whole=False), None) == ("cut short", "")
