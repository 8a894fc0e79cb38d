"""The columns of a timeline that the replay asks single spans for."""

from __future__ import annotations

from dataclasses import dataclass

from detect.whatif.blocking import messages_hold_up
from detect.whatif.graph import Bools, Ints
from detect.whatif.marks import Marks
from detect.whatif.pauses import host_work_before_marks
from megascan.schema import Kind, Track
from megascan.timeline import Timeline, codes, equals, numbers


@dataclass(frozen=True)
class Texts:
    """A text column: code of each row, text of each code."""

    codes: Ints
    texts: list[str]

    def __getitem__(self, row: int) -> str:
        return self.texts[int(self.codes[row])]


@dataclass(frozen=True, kw_only=True)
class SpanColumns:
    """What is asked of single spans, by row of the timeline's table."""

    kind: Texts
    name: Texts
    op: Texts
    direction: Texts
    group: Texts
    microbatch: Ints
    chunk: Ints
    size_bytes: Ints
    match: Ints
    wait_ns: Ints
    overlapped: Bools
    pauses_ns: Ints
    """Garbage collection in the work before each mark (mark,)."""
    loading_ns: Ints
    """Data loading in the work before each mark (mark,)."""

    @classmethod
    def of(cls, timeline: Timeline, marks: Marks) -> SpanColumns:
        """Columns of a timeline."""
        table = timeline.spans
        overlapped = numbers(table, "track") == Track.OVERLAPPED
        messages = equals(table, "kind", Kind.P2P)
        if messages_hold_up(marks, overlapped & messages):
            overlapped &= ~messages
        return cls(
            kind=Texts(*codes(table, "kind")),
            name=Texts(*codes(table, "name")),
            op=Texts(*codes(table, "op")),
            direction=Texts(*codes(table, "direction")),
            group=Texts(*codes(table, "group")),
            microbatch=numbers(table, "microbatch"),
            chunk=numbers(table, "chunk"),
            size_bytes=numbers(table, "size_bytes"),
            match=numbers(table, "match"),
            wait_ns=numbers(table, "wait_ns"),
            overlapped=overlapped,
            pauses_ns=host_work_before_marks(timeline, marks, Kind.GC),
            loading_ns=host_work_before_marks(timeline, marks, Kind.DATA),
        )
