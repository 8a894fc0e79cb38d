"""Timelines for the detector, made span by span: self times with noise and planted effects.

Nothing here depends on the simulator: what is planted is what the detector must read out of the
columns it documents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from detect import DetectorSettings, Report, detect
from detect.observe.extract import observe
from detect.observe.observations import Observations
from detect.observe.spans import Frame, SpanIndex
from detect.observe.transfers import Transfers
from detect.observe.warmup import steady
from megascan.header import (
    RESTARTING_CLOCK,
    ClockOrigin,
    Device,
    RankHeader,
    TraceSettings,
    WindowRecord,
)
from megascan.schema import Granularity
from megascan.timeline import TIMELINE_SCHEMA, ClockFit, Completeness, Timeline
from megascan.topology import Layout

MS = 1_000_000


@pytest.fixture(autouse=True)
def _quick(without_power: None) -> None:
    """Every verdict here is one without its power."""


Effect = Callable[["Slot"], float]


class Slot(NamedTuple):
    """Where a planted effect is asked for its factor."""

    rank: int
    stage: int
    replica: int
    iteration: int
    microbatch: int
    phase: str
    name: str


@dataclass(frozen=True)
class Job:
    """A job as the detector sees it; times of an even job are 10 ms forward, 20 ms backward."""

    layout: Layout
    iterations: int = 20
    microbatches: int = 8
    noise: float = 0.02
    seed: int = 0
    first_iteration: int = 3
    layers: int = 0
    device: str = "cuda"
    work: Effect | None = None
    """Factor on forward, backward, layers and (name "optimizer") the optimizer."""
    loading_ms: Effect | None = None
    blocked_ms: Effect | None = None
    """Length of a loading span that ends with the begin of its forward pass: the host was ahead and
    waited for the device, whose time it does not lengthen."""
    gc_ms: Effect | None = None
    gap_ms: Effect | None = None
    """Nothing recorded ahead of the optimizer."""
    pause_ms: Effect | None = None
    """Nothing recorded ahead of a pass."""
    transfer: Callable[[int, int, int], float] | None = None
    """(rank, rank, iteration) to a factor on the 1 ms of a p2p message between the two."""
    message_bytes: int | Callable[[int], int] = 4096
    """Of all messages, or of each by its number."""
    launch_lead_ns: Callable[[int], int] | None = None
    counters: dict[int, dict[str, float]] = field(default_factory=dict)
    hosts: int = 8
    tokens: Callable[[int], tuple[int, ...]] | None = None
    """Of a rank, the fewest and the most that a pass gets."""
    kinds: Callable[[int], dict[str, tuple[int, ...]]] | None = None
    """Of a rank, the kinds of its layers."""

    def timeline(self) -> Timeline:
        """All spans of the job."""
        return _Builder(self).build()

    def original_timeline(self) -> Timeline:
        """All spans as of files of the original MegaScan, which hold no collections of garbage."""
        timeline = self.timeline()
        headers = {
            rank: replace(header, clock=replace(header.clock, source=RESTARTING_CLOCK))
            for rank, header in timeline.headers.items()
        }
        return replace(timeline, headers=headers)

    def report(self, settings: DetectorSettings | None = None) -> Report:
        """What the detector says about it."""
        return detect(self.timeline(), settings)

    def but(self, **changes: object) -> Job:
        """The same job with some things changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def slow_rank(rank: int, factor: float, first: int = 0, last: int = 10**9) -> Effect:
    """A compute fault: multiplies everything that the rank computes, in iterations first..last."""

    def effect(slot: Slot) -> float:
        return factor if slot.rank == rank and first <= slot.iteration <= last else 1.0

    return effect


def all_effects(*effects: Effect) -> Effect:
    """Product of several effects."""
    return lambda slot: float(np.prod([effect(slot) for effect in effects]))


def _is_text(name: str) -> bool:
    return pa.types.is_dictionary(TIMELINE_SCHEMA.field(name).type)


_EMPTY: dict[str, object] = {name: "" if _is_text(name) else -1 for name in TIMELINE_SCHEMA.names}
_OF_SPANS = (
    "rank", "kind", "name", "track", "start_ns", "duration_ns", "iteration", "microbatch", "phase",
    "layer", "chunk", "self_ns", "launch_ns",
)  # fmt: skip
_OF_MESSAGES = (
    "rank", "kind", "name", "track", "start_ns", "duration_ns", "iteration", "microbatch", "chunk",
    "op", "peer", "direction", "size_bytes", "match", "wait_ns", "transfer_ns",
)  # fmt: skip
"""Columns of a row; the others are empty."""


def _index_of(rows: list[dict[str, object]], *, is_sampled: bool = False) -> SpanIndex:
    """Index spans, given by their columns that are not empty, of one iteration on GPUs."""
    whole = [_EMPTY | {"iteration": 1} | row for row in rows]
    table = pa.Table.from_pylist(whole).select(TIMELINE_SCHEMA.names).cast(TIMELINE_SCHEMA)
    frame = Frame(
        ranks=np.unique([row["rank"] for row in whole]), iterations=np.array([1]), is_cpu=False,
        is_sampled=is_sampled, uses_cpu_time=False, has_passes=True, has_layers=False,
        has_modules=True, has_iterations=False, has_parts=True, has_loss=False,
        shares_parts=False,
    )  # fmt: skip
    return SpanIndex(table, frame)


_DRAWN_AT_ONCE = 4096
"""Numbers: one by one each takes longer than the rest of its span."""


class _Builder:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.random = np.random.default_rng(job.seed)
        self.spans: list[tuple[object, ...]] = []
        self.messages: list[tuple[object, ...]] = []
        self.match = 0
        self.draws = self._draws()

    def build(self) -> Timeline:
        layout = self.job.layout
        for rank in range(layout.world_size):
            self._rank(rank)
        if self.job.transfer is not None:
            self._messages()
        table = self._table()
        order = np.lexsort(
            (
                -table["duration_ns"].to_numpy(),
                table["start_ns"].to_numpy(),
                table["rank"].to_numpy(),
            )
        )
        ranks = range(layout.world_size)
        return Timeline(
            run_id="test",
            layout=layout,
            headers={rank: self._header(rank) for rank in ranks},
            spans=table.take(order),
            windows={rank: self._windows(rank) for rank in ranks},
            clocks={
                rank: ClockFit(
                    rank=rank,
                    domain="one",
                    offset_ns=0.0,
                    drift_ppm=0.0,
                    residual_median_ns=500.0,
                    residual_p99_ns=2000.0,
                    num_anchors=100,
                )
                for rank in ranks
            },
            clock_method="one clock",
            origin_ns=0,
            completeness=Completeness(world_size=layout.world_size, ranks=tuple(ranks)),
        )

    def _table(self) -> pa.Table:
        """All rows, in the order in which they were made."""
        of_spans = dict(zip(_OF_SPANS, zip(*self.spans, strict=True), strict=True))
        of_messages = dict(zip(_OF_MESSAGES, zip(*self.messages, strict=True), strict=False))

        def column(name: str) -> pa.Array:
            empty, kind = _EMPTY[name], pa.string() if _is_text(name) else pa.int64()
            parts = [
                pa.array(of[name], kind) if name in of else pa.repeat(pa.scalar(empty, kind), rows)
                for of, rows in ((of_spans, len(self.spans)), (of_messages, len(self.messages)))
            ]
            whole = pa.concat_arrays(parts)
            return whole.dictionary_encode() if _is_text(name) else whole

        names = TIMELINE_SCHEMA.names
        return pa.table({name: column(name) for name in names}).cast(TIMELINE_SCHEMA)

    def _header(self, rank: int) -> RankHeader:
        layout = self.job.layout
        return RankHeader(
            run_id="test",
            rank=rank,
            world_size=layout.world_size,
            layout=layout,
            coordinates=layout.coordinates(rank),
            groups={},
            host=f"n{rank // self.job.hosts:02d}",
            process_id=1,
            device=Device(kind=self.job.device, name="H100", index=rank % 8),
            backend="nccl",
            clock=ClockOrigin(domain="one", source="test", origin_unix_ns=0),
            trace=TraceSettings(granularity=Granularity.FULL, interval=1, window=1),
        )

    def _windows(self, rank: int) -> tuple[WindowRecord, ...]:
        return (
            WindowRecord(
                run_id="test",
                window=0,
                first_iteration=1,
                last_iteration=self.job.iterations,
                num_spans=1,
                counters=self.job.counters.get(rank, {}),
                tokens=self.job.tokens(rank) if self.job.tokens else (),
                kinds=self.job.kinds(rank) if self.job.kinds else {},
            ),
        )

    def _draws(self) -> Iterator[tuple[float, float]]:
        """Yield numbers of a normal distribution, each with the factor that noise makes of it."""
        while True:
            drawn = self.random.standard_normal(_DRAWN_AT_ONCE)
            factors = np.exp(self.job.noise * drawn)
            yield from zip(drawn.tolist(), factors.tolist(), strict=True)

    def _noisy(self, time_ms: float) -> int:
        return int(time_ms * MS * next(self.draws)[1])

    def _rank(self, rank: int) -> None:
        job, place = self.job, self.job.layout.coordinates(rank)
        for number in range(job.iterations):
            iteration = job.first_iteration + number
            begin = now = number * 1000 * MS

            def slot(microbatch: int, phase: str, name: str, at: int = iteration) -> Slot:
                return Slot(rank, place.pp, place.dp, at, microbatch, phase, name)

            for microbatch in range(job.microbatches):
                for phase, usual in (("forward", 10.0), ("backward", 20.0)):
                    now = self._pass(slot(microbatch, phase, phase), usual, now)
            if job.gc_ms is not None and (pause := job.gc_ms(slot(0, "", "gc"))) > 0:
                self._span(rank, "gc", "gc", now, int(pause * MS), iteration, track=3)
                now += int(pause * MS)
            if job.gap_ms is not None:
                now += int(job.gap_ms(slot(0, "", "gap")) * MS)
            factor = job.work(slot(0, "", "optimizer")) if job.work else 1.0
            length = self._noisy(5.0 * factor)
            self._span(rank, "optimizer", "optimizer", now, length, iteration)
            now += length
            self._span(rank, "iteration", "iteration", begin, now - begin, iteration)

    def _pass(self, slot: Slot, usual: float, now: int) -> int:
        job = self.job
        loading = 0
        if job.pause_ms is not None:
            now += int(job.pause_ms(slot) * MS)
        if job.loading_ms is not None and slot.phase == "forward":
            loading = self._noisy(job.loading_ms(slot))
            self._span(
                slot.rank, "data", "batch-generator", now, loading, slot.iteration, track=3,
                microbatch=slot.microbatch,
            )  # fmt: skip
        if job.blocked_ms is not None and slot.phase == "forward":
            blocked = int(job.blocked_ms(slot) * MS)
            self._span(
                slot.rank, "data", "batch-generator", now - blocked, blocked, slot.iteration,
                track=3, microbatch=slot.microbatch,
            )  # fmt: skip
        length = self._noisy(usual * (job.work(slot) if job.work else 1.0))
        self._span(
            slot.rank, "compute", slot.phase, now, length + loading, slot.iteration,
            microbatch=slot.microbatch, phase=slot.phase,
        )  # fmt: skip
        start = now + loading
        suffix = "-backward" if slot.phase == "backward" else ""
        if job.launch_lead_ns is not None:
            for part, name in enumerate(("attention", "mlp")):
                self._span(
                    slot.rank, "compute", f"{name}{suffix}", start + part * (length // 2),
                    length // 2, slot.iteration, microbatch=slot.microbatch, phase=slot.phase,
                )  # fmt: skip
        for layer in range(job.layers):
            layered = slot._replace(name="transformer_layer")
            part = self._noisy(1.0 * (job.work(layered) if job.work else 1.0))
            self._span(
                slot.rank, "compute", f"transformer_layer{suffix}", start, part, slot.iteration,
                microbatch=slot.microbatch, phase=slot.phase,
                layer=slot.stage * job.layers + layer + 1,
            )  # fmt: skip
            start += part
        return now + length + loading

    def _span(
        self, rank: int, kind: str, name: str, start: int, length: int, iteration: int,
        track: int = 1, microbatch: int = -1, phase: str = "", layer: int = -1,
    ) -> None:  # fmt: skip
        launch = -1
        if self.job.launch_lead_ns is not None and kind == "compute":
            launch = -self.job.launch_lead_ns(rank)
        self.spans.append((
            rank, kind, name, track, start, length, iteration, microbatch, phase, layer,
            0 if microbatch >= 0 else -1, length, launch,
        ))  # fmt: skip

    def _messages(self) -> None:
        """One message a microbatch between neighbouring stages, both directions."""
        job, layout = self.job, self.job.layout
        assert job.transfer is not None
        for rank in range(layout.world_size):
            place = layout.coordinates(rank)
            if place.pp == layout.pp - 1:
                continue
            peer = layout.rank_of(replace(place, pp=place.pp + 1))
            for number in range(job.iterations):
                iteration = job.first_iteration + number
                for microbatch in range(job.microbatches):
                    factor = job.transfer(rank, peer, iteration)
                    self._message(rank, peer, iteration, microbatch, factor)

    def _message(
        self, rank: int, peer: int, iteration: int, microbatch: int, factor: float
    ) -> None:
        self.match += 1
        size = self.job.message_bytes
        size = size(self.match) if callable(size) else size
        length = int(MS * factor * np.exp(0.05 * next(self.draws)[0]))
        start = (iteration - self.job.first_iteration) * 1000 * MS + 900 * MS + microbatch * 9 * MS
        for one, other, op in ((rank, peer, "send"), (peer, rank, "recv")):
            self.messages.append((
                one, "p2p", f"{op}_forward", 2, start, length, iteration, microbatch, 0, op, other,
                "forward", size, self.match, 0, length,
            ))  # fmt: skip


@pytest.fixture
def index_of() -> Callable[..., SpanIndex]:
    """`index_of([{"rank": 0, "name": "forward", "start_ns": 0, …}, …])`: an index of spans."""
    return _index_of


@pytest.fixture
def job() -> type[Job]:
    """`job(layout=…, work=slow(1, 1.2)).report()`."""
    return Job


@pytest.fixture
def slow() -> Callable[..., Effect]:
    """A compute fault: `slow(rank, factor, first, last)`."""
    return slow_rank


@pytest.fixture
def together() -> Callable[..., Effect]:
    """Several effects at once."""
    return all_effects


def _exchanging(
    timeline: Timeline, units: list[tuple[tuple[int, ...], int, object]], **changes: object
) -> Observations:
    """Observe a job whose communication is these groups: (members, bytes, ms) each.

    The ms are one number, or one for each of the iterations that are judged; groups of equal size
    are of one kind.
    """
    seen = steady(observe(timeline), DetectorSettings())
    shape = (len(seen.members), len(seen.iterations))
    kinds = sorted({(len(members), size) for members, size, _ in units})
    time_ns = np.array([np.broadcast_to(np.asarray(ms) * 1e6, shape[1]) for _, _, ms in units])
    wobble = np.exp(0.01 * np.random.default_rng(0).standard_normal(time_ns.shape))
    transfers = Transfers(
        members=tuple(members for members, _, _ in units),
        kinds=tuple(f"dp all_reduce of {size} bytes by {width}" for width, size in kinds),
        kind=np.array([kinds.index((len(members), size)) for members, size, _ in units]),
        size_bytes=np.array([size for _, size, _ in units]),
        transfer_ns=time_ns * wobble,
        sum_ns=time_ns,
        late_ns=np.zeros(shape),
        quick_ns=np.zeros(shape),
    )
    return replace(seen, **{"transfers": transfers, "costs": None} | changes)


@pytest.fixture
def exchanging() -> Callable[..., Observations]:
    """`exchanging(timeline, [((0, 1, 2, 3), 10**8, 12.0), …])`: communication of these groups."""
    return _exchanging
