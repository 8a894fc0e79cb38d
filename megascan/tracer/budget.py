"""Keep the cost of tracing below a budget: modules of fewer layers, then none, then fewer windows.

If the user has set no budget, the layers take turns above `LAYERS_BUDGET_RATIO`, and where that is
not enough windows become fewer above `WINDOWS_BUDGET_RATIO`: what a verdict needs most, modules,
passes and communication of each window, is not given up unasked.

Rank 0 decides, since the iterations of a synchronous job take equally long on all ranks, and
announces from which iteration on the decision holds; all other ranks look it up after each window.
Both happen on the writers' threads, over the job's key-value store: no byte goes over the training
network and no iteration waits. The iteration lies so far ahead that all ranks change together; a
rank that learns of it too late changes a window later, and its records say so.

A decision needs evidence: rank 0 looks for it after 7, 10, 15, 22, … windows at one level, and the
lower end of the cost's interval must lie above the budget. It is the 99 % interval, but the 90 %
interval where layers are to take turns, which costs a verdict next to nothing. To record a single
layer of a chunk is the last of these steps, because small faults (3 % and less) may then be missed.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from megascan.config import LAYERS_BUDGET_RATIO, WINDOWS_BUDGET_RATIO, TraceConfig
from megascan.header import WindowRecord
from megascan.schema import Granularity
from megascan.tracer.writer import MAX_WAITING_WINDOWS

if TYPE_CHECKING:
    from megascan.overhead import Overhead, Timing

logger = logging.getLogger("megascan")

CONFIDENCE, LAYERS_CONFIDENCE = 0.99, 0.9
_FIRST_LOOK_WINDOWS = 7
"""Five cycles, the first cycle, which warms up, and the cycle under way."""
_MEMORY_CYCLES = 256
MAX_INTERVAL_FACTOR = 64
"""There is at least one window every 64 intervals; fewer windows would show nothing."""
_CYCLES_AHEAD, _AHEAD_NS = MAX_WAITING_WINDOWS + 2, 1_000_000_000
"""How far ahead a decision holds: more windows than may wait for a slow disk, and a second."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """How much is traced from an iteration on."""

    granularity: Granularity
    interval: int
    layer_stride: int = 1
    from_iteration: int


class Board(Protocol):
    """Place where rank 0 writes announcements that all other ranks read; no rank waits."""

    def publish(self, number: int, text: str) -> None:
        """Write announcement `number`, from 0."""

    def read(self, number: int) -> str | None:
        """Return announcement `number`; None if it is not written yet."""


class Budget:
    """Follows one run, window by window; called from the writer's thread.

    `lower` takes a new level; `current_iteration` says how far training is. `largest_stride`
    returns the stride that leaves just enough layers to tell what is typical of a pass (1: there
    are no layers), `last_stride` the stride that leaves a single layer of a chunk.
    """

    def __init__(
        self,
        config: TraceConfig,
        board: Board,
        *,
        decides: bool,
        lower: Callable[[Level], None],
        current_iteration: Callable[[], int],
        largest_stride: Callable[[], int] = lambda: 1,
        last_stride: Callable[[], int] = lambda: 1,
    ) -> None:
        self._config = config
        self._board = board
        self._decides = decides
        self._lower = lower
        self._current_iteration = current_iteration
        self._largest_stride, self._last_stride = largest_stride, last_stride
        self._level = Level(
            granularity=config.granularity,
            interval=config.interval,
            layer_stride=config.layer_stride,
            from_iteration=1,
        )
        self._num_changes = 0
        self._timings: list[Timing] = []
        self._num_windows = 0
        self._next_look = _FIRST_LOOK_WINDOWS
        self._at_the_end = False

    def window_written(self, record: WindowRecord) -> None:
        """Look at the cost so far (on rank 0), or at what rank 0 has decided."""
        level = self._decide(record) if self._decides else self._learn()
        if level is None:
            return
        if self._decides:
            words = (level.granularity, level.interval, level.layer_stride, level.from_iteration)
            self._board.publish(self._num_changes, " ".join(map(str, words)))
        self._num_changes += 1
        self._level = level
        self._lower(level)

    def _learn(self) -> Level | None:
        text = self._board.read(self._num_changes)
        if text is None:
            return None
        granularity, interval, layer_stride, from_iteration = text.split()
        return Level(
            granularity=Granularity(granularity),
            interval=int(interval),
            layer_stride=int(layer_stride),
            from_iteration=int(from_iteration),
        )

    def _decide(self, record: WindowRecord) -> Level | None:
        """Return the next lower level if the present level is certainly too expensive."""
        since = max(
            self._level.from_iteration,
            record.last_iteration - _MEMORY_CYCLES * self._level.interval,
        )
        self._timings = [
            timing for timing in (*self._timings, *record.timings) if timing[0] >= since
        ]
        self._num_windows += 1
        if self._num_windows < self._next_look:
            return None
        self._next_look += min(self._num_windows // 2, _MEMORY_CYCLES)
        from megascan.overhead import measure  # most jobs end before there is enough to look at

        takes_turns = self._stride_ahead() == self._largest_stride()
        confidence = LAYERS_CONFIDENCE if takes_turns else CONFIDENCE
        cost = measure(self._timings, self._level.interval, confidence=confidence)
        if cost.run is None or cost.run.low - 1 <= self._limit:
            return None
        level = self._next_level(cost.run.ratio - 1)
        self._say(cost, level)
        self._timings, self._num_windows, self._next_look = [], 0, _FIRST_LOOK_WINDOWS
        return level

    def _stride_ahead(self) -> int | None:
        """Return the stride that modules of fewer layers may be recorded with; None at the end."""
        if self._level.granularity is not Granularity.FULL:
            return None
        strides = (self._largest_stride(), self._last_stride())
        return next((each for each in strides if self._level.layer_stride < each), None)

    @property
    def _limit(self) -> float:
        """Return the share of the run's time that tracing may cost at the present level."""
        unasked = WINDOWS_BUDGET_RATIO if self._stride_ahead() is None else LAYERS_BUDGET_RATIO
        return self._config.budget_ratio or unasked

    def _next_level(self, cost_ratio: float) -> Level | None:
        now, level = self._level, replace(self._level, from_iteration=self._first_of_next_level())
        factor = 2 ** max(1, math.ceil(math.log2(cost_ratio / self._limit)))
        if (stride := self._stride_ahead()) is not None:
            return replace(level, layer_stride=min(stride, now.layer_stride * factor))
        if self._config.budget_ratio and now.granularity is Granularity.FULL:
            return replace(level, granularity=Granularity.BASE)
        interval = min(self._config.interval * MAX_INTERVAL_FACTOR, now.interval * factor)
        return None if interval == now.interval else replace(level, interval=interval)

    def _first_of_next_level(self) -> int:
        """Return the first iteration of an interval, far enough ahead for all ranks to know."""
        interval = self._level.interval
        cycle_ns = interval * statistics.median(duration_ns for _, _, duration_ns in self._timings)
        ahead = max(_CYCLES_AHEAD, math.ceil(_AHEAD_NS / max(cycle_ns, 1)))
        return ((self._current_iteration() - 1) // interval + ahead) * interval + 1

    def _say(self, cost: Overhead, level: Level | None) -> None:
        """Warn of the cost, and say what is lowered for it, or once that nothing more can be."""
        if cost.run is None or self._at_the_end:
            return
        asked = "--trace-budget " if self._config.budget_ratio else ""
        text = (
            f"tracing costs {cost.run.ratio - 1:.1%} of the run, at least {cost.run.low - 1:.1%}: "
            f"more than {asked}{self._limit:.2%}"
        )
        if level is None:
            self._at_the_end = True
            logger.warning("%s, and there is nothing left to lower", text)
            return
        what, first = self._what_is_left(level), level.from_iteration
        logger.warning("%s; %s from iteration %d on", text, what, first)

    def _what_is_left(self, level: Level) -> str:
        """Return in words what the next level records less of: "granularity base"."""
        if level.layer_stride != self._level.layer_stride:
            return f"modules of one layer in {level.layer_stride} only"
        if level.granularity is not self._level.granularity:
            return f"granularity {level.granularity}"
        return f"a window every {level.interval} iterations"
