"""Work that only some ranks do, or only now and then: loading data, collecting garbage."""

from __future__ import annotations

import numpy as np

from detect.whatif.graph import Ints
from detect.whatif.marks import Marks
from megascan.schema import Kind
from megascan.timeline import Timeline, equals, numbers


def host_work_before_marks(timeline: Timeline, marks: Marks, kind: Kind) -> Ints:
    """Time of the spans of one kind that began between each mark and the one before it, ns (mark,).

    Without the communication inside them. None on GPUs: there the host runs ahead, and what holds
    it up need not hold up the device.
    """
    total = np.zeros(len(marks.row), dtype=np.int64)
    if any(header.device.kind != "cpu" for header in timeline.headers.values()):
        return total
    table = timeline.spans
    rows = np.flatnonzero(equals(table, "kind", kind) & (numbers(table, "iteration") > 0))
    if not len(rows) or not len(total):
        return total
    rank = np.searchsorted(marks.ranks, numbers(table, "rank")[rows])
    iteration = np.searchsorted(marks.iterations, numbers(table, "iteration")[rows])
    start = numbers(table, "start_ns")[rows]
    origin = min(int(marks.time_ns.min()), int(start.min()))
    width = max(int(marks.time_ns.max()), int(start.max())) - origin + 1
    axis = marks.segment * width + (marks.time_ns - origin)
    segment = rank * len(marks.iterations) + iteration
    place = np.searchsorted(axis, segment * width + (start - origin), side="right")
    inside = place < len(total)
    inside[inside] = marks.segment[place[inside]] == segment[inside]
    np.add.at(total, place[inside], np.maximum(numbers(table, "self_ns")[rows][inside], 0))
    return total
