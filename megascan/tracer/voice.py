"""Warnings that hundreds of ranks have at once, said by one of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger("megascan")

_FINISH_S = 5.0


class Voice:
    """Says each warning of a run once, by the first rank that has it.

    `claim` asks whether this rank is the first with a topic. Asking goes over the job's key-value
    store and may take long when the job is in trouble, so it is done by a thread of its own:
    neither training nor the writer waits. Without `claim` everything is said at once.
    """

    def __init__(self, rank: int = 0, claim: Callable[[str], bool] | None = None) -> None:
        self._rank = rank
        self._claim = claim
        self._topics: set[str] = set()
        self._threads: list[threading.Thread] = []

    def warn(self, topic: str, text: str) -> None:
        """Say it, unless this or another rank has spoken on the topic."""
        if topic in self._topics:
            return
        self._topics.add(topic)
        if self._claim is None:
            logger.warning("%s", text)
            return
        thread = threading.Thread(target=self._say, args=(self._claim, topic, text), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _say(self, claim: Callable[[str], bool], topic: str, text: str) -> None:
        if claim(topic):
            logger.warning(
                "%s (said by rank %d; ranks with the same trouble do not repeat it)",
                text,
                self._rank,
            )

    def finish(self) -> None:
        """Wait a bounded time for what is still to be said."""
        for thread in self._threads:
            thread.join(_FINISH_S)
