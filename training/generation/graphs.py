"""The step in which every row computes one token, recorded once and replayed.

A GPU computes such a step of a small model faster than Python can start its kernels. They are the
same every time, so they are recorded as a CUDA graph, which is started as a whole. A recording
reads and writes fixed memory: the step's numbers are copied into a buffer, and its sizes are
rounded up. With 5 rows, the longest of 300 tokens, the recording for 6 rows and 384 places is
replayed; the sixth row computes something that nobody reads.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from training.generation.layout import Decoding, RowTokens, StepTokens
from training.generation.request import Limits
from training.generation.scheduler import Step

if TYPE_CHECKING:
    from training.generation.stage import Stage

logger = logging.getLogger(__name__)

Compute = Callable[[], torch.Tensor]

_FEWEST_PLACES = 128
_MOST_RECORDINGS = 64


class Recorder(Protocol):
    """Makes something that computes the same again, from and into the same memory."""

    def record(self, compute: Compute) -> Compute:
        """Return what repeats `compute`, which neither waits for the device nor decides by it."""


class CudaGraphs:
    """Records CUDA graphs; what cannot be recorded is computed anew each time."""

    def __init__(self) -> None:
        # Graphs share their memory: none runs beside another or has results that outlive it.
        self._pool = torch.cuda.graph_pool_handle()
        self._has_failed = False

    def record(self, compute: Compute) -> Compute:
        """Compute once, so that libraries have set themselves up, then record."""
        if self._has_failed:
            return compute
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            compute()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile, such as NCCL's, which asks for its events.
        recording = torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local")
        try:
            # A recording that fails leaves its own stream behind as the current one.
            with torch.cuda.stream(current), recording:
                result = compute()
        except RuntimeError as error:
            self._has_failed = True
            reason = str(error.__context__ or error).splitlines()[0]
            logger.warning(
                "no CUDA graph of a step could be recorded, going on without: %s", reason
            )
            return compute

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class ReplayedSteps:
    """Computes steps of one token a row by recordings, one for each size that occurs."""

    def __init__(self, stage: Stage, limits: Limits, recorder: Recorder) -> None:
        self._stage = stage
        self._limits = limits
        self._recorder = recorder
        self._memory = torch.zeros(4 * limits.num_rows, dtype=torch.int64, device=stage.device)
        self._recorded: OrderedDict[tuple[int, int], Compute] = OrderedDict()

    def takes(self, step: Step) -> bool:
        """Return whether a step is of this kind, and no hook wants to see it computed."""
        shares = step.shares
        return (
            len(step.targets) == len(shares)
            and all(
                share.slot == row and len(share.tokens) == 1 for row, share in enumerate(shares)
            )
            and not self._stage.is_watched
        )

    @torch.inference_mode()
    def run(self, shares: Sequence[RowTokens]) -> torch.Tensor:
        """Return the logits `(share, vocabulary)`; they are lost when the next step is run."""
        limits = self._limits
        num_rows = min(round_up(len(shares)), limits.num_rows)
        longest = max(share.end for share in shares)
        length = min(max(round_up(longest), _FEWEST_PLACES), limits.max_length)
        self._numbers(num_rows).copy_(self._fill(shares, num_rows))
        key = num_rows, length
        replay = self._recorded.pop(key, None)
        if replay is None:
            if len(self._recorded) == _MOST_RECORDINGS:
                self._recorded.popitem(last=False)
            replay = self._recorder.record(lambda: self._compute(num_rows, length))
        self._recorded[key] = replay  # the last one is the one that was used last
        return replay()[: len(shares)]

    @property
    def num_recorded(self) -> int:
        """Recordings that are kept."""
        return len(self._recorded)

    def forget(self) -> None:
        """Drop all recordings."""
        self._recorded.clear()

    def _numbers(self, num_rows: int) -> torch.Tensor:
        """Return the fixed memory of steps of so many rows.

        `(4, row)`: token, position, place in the cache, number of places that are seen.
        """
        return self._memory[: 4 * num_rows].view(4, num_rows)

    def _fill(self, shares: Sequence[RowTokens], num_rows: int) -> torch.Tensor:
        """Return the numbers of a step, on the CPU.

        Rows that only fill up write the last place of their slots. That harms nobody: a row that
        gets as far writes this place in the very step that first reads it.
        """
        max_length = self._limits.max_length
        columns = [
            (share.tokens[0], share.start, share.slot * max_length + share.start, share.end)
            for share in shares
        ]
        columns += [(0, 0, (slot + 1) * max_length - 1, 1) for slot in range(len(shares), num_rows)]
        return torch.tensor(list(zip(*columns, strict=True)))

    def _compute(self, num_rows: int, length: int) -> torch.Tensor:
        """Compute the step whose numbers are in the buffer."""
        stage, numbers = self._stage, self._numbers(num_rows)
        places = torch.arange(length, device=stage.device)
        is_seen = places < numbers[3][:, None]
        # As it is added to the scores: made here once and not in each layer.
        visible = torch.where(is_seen, 0.0, float("-inf")).to(stage.dtype)[:, None, None]
        layout = StepTokens(
            tokens=numbers[0:1],
            positions=numbers[1:2],
            places=numbers[2],
            decoding=Decoding(
                num_rows=num_rows, slots=slice(0, num_rows), length=length, visible=visible
            ),
            pieces=(),
        )
        logits = stage.run(layout, None)
        assert logits is not None  # the only stage is the last
        return logits


def round_up(count: int) -> int:
    """Return the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, …: at most half as much again."""
    power = 1 << (count - 1).bit_length()
    between = power // 4 * 3
    return between if count <= between else power
