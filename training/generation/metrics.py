"""What a server counts, and its text for Prometheus."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from training.generation.engine import GenerationCallback
from training.generation.request import Answer
from training.generation.scheduler import Scheduler, Step

# Upper ends of the histograms' buckets: from a small model's token to a long prompt in a queue.
_BOUNDS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip


class Outcome(StrEnum):
    """How a row or a request has ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"


class Histogram:
    """Durations in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BOUNDS_S, duration_s)] += 1
        self._sum_s += duration_s

    def lines(self, name: str) -> Iterator[str]:
        """Return the lines of Prometheus' text format: cumulated buckets, sum and number."""
        total = 0
        for bound, count in zip((*map(str, _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum_s:.6f}"
        yield f"{name}_count {total}"


class Metrics(GenerationCallback):
    """Counters of one engine; steps are told by the engine, requests by the service."""

    def __init__(self, *, num_slots: int) -> None:
        self.first_token_s = Histogram()
        self.next_token_s = Histogram()
        self._step_s = Histogram()
        self._requests = dict.fromkeys(Outcome, 0)
        self._num_prompt_tokens = 0
        self._num_generated_tokens = 0
        self._gauges = {
            "rows_running": ("Rows in the batch.", 0),
            "rows_waiting": ("Rows that wait for a place in the batch.", 0),
            "rows_limit": ("Places in the batch.", num_slots),
            "cache_bytes": ("Memory of keys and values on rank 0.", 0),
        }

    def count_request(self, outcome: Outcome) -> None:
        """Count the end of a row, or a request that was refused."""
        self._requests[outcome] += 1

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Time a step."""
        began = time.monotonic()
        yield
        self._step_s.observe(time.monotonic() - began)
        self._num_prompt_tokens += step.num_prompt_tokens

    def answered(self, scheduler: Scheduler, answers: Sequence[Answer]) -> None:
        """Count tokens, and what is there now."""
        self._num_generated_tokens += sum(answer.token is not None for answer in answers)
        self._set("rows_running", len(scheduler.rows))
        self._set("rows_waiting", len(scheduler.waiting))

    def note_cache(self, num_bytes: int) -> None:
        """Remember the cache's memory, which is known when the model is built."""
        self._set("cache_bytes", num_bytes)

    def _set(self, name: str, value: int) -> None:
        self._gauges[name] = (self._gauges[name][0], value)

    def text(self) -> str:
        """Return all of it in Prometheus' text format."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Rows by how they ended; refused requests.")
        for outcome, count in self._requests.items():
            yield f'megascan_requests_total{{outcome="{outcome}"}} {count}'
        for name, text, count in (
            ("prompt_tokens_total", "Tokens of prompts that were read.", self._num_prompt_tokens),
            ("generated_tokens_total", "Tokens generated.", self._num_generated_tokens),
        ):
            yield from _head(name, "counter", text)
            yield f"megascan_{name} {count}"
        for name, (text, value) in self._gauges.items():
            yield from _head(name, "gauge", text)
            yield f"megascan_{name} {value}"
        for name, text, histogram in (
            ("first_token_seconds", "From a request to its first token.", self.first_token_s),
            ("next_token_seconds", "From one token of a row to the next.", self.next_token_s),
            ("step_seconds", "One step of the batch.", self._step_s),
        ):
            yield from _head(name, "histogram", text)
            yield from histogram.lines(f"megascan_{name}")


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP megascan_{name} {text}"
    yield f"# TYPE megascan_{name} {kind}"
