"""Warnings that all ranks have are said once, and asking who says them holds nobody up."""

from __future__ import annotations

import threading
import time

from megascan.tracer import Voice


def test_a_topic_is_said_once_by_a_rank_alone(warnings_of_megascan):
    voice = Voice()
    for _ in range(3):
        voice.warn("disk", "the disk is behind")
    voice.warn("size", "too large")
    assert warnings_of_megascan() == ["the disk is behind", "too large"]


def test_only_the_first_rank_speaks_and_says_who_it_is(warnings_of_megascan):
    taken: set[str] = set()

    def claim(topic):
        first = topic not in taken
        taken.add(topic)
        return first

    for rank in (3, 0, 1):
        voice = Voice(rank, claim)
        voice.warn("disk", "no space left")
        voice.finish()
    (warning,) = warnings_of_megascan()
    assert warning.startswith("no space left (said by rank 3;")


def test_a_store_that_does_not_answer_holds_nobody_up(warnings_of_megascan):
    answer = threading.Event()

    def claim(topic):
        return answer.wait(10)

    voice = Voice(0, claim)
    begin = time.monotonic()
    voice.warn("disk", "no space left")
    assert time.monotonic() - begin < 5 and warnings_of_megascan() == []
    answer.set()
    voice.finish()
    assert len(warnings_of_megascan()) == 1
