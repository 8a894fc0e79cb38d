"""Which windows are judged at once and which may wait; what waiting never changes."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from aggregate import build_timeline
from detect import DetectorSettings, detect
from megascan.reader import read_trace
from megascan.watch.ring import Spending
from megascan.watch.watcher import CPU_SHARE

NEVER_DUE = 1e-9
"""A share that no verdict fits into: judged is what is unusual, or has waited for too long."""
SLOW_S, QUICK_S = 25.0, 10.0
"""Between two windows: half a ring lasts longer than `LONGEST_WAIT_S`, or shorter."""


@pytest.mark.parametrize(("gap_s", "longest"), [(SLOW_S, 10), (QUICK_S, 24)])
def test_usual_windows_wait_for_a_part_of_the_ring_or_two_minutes(
    healthy, grow, watched, gap_s, longest
):
    """Half of it: a finding of the job holds, its stages are uneven."""
    feed = grow(healthy)
    watch = watched(feed.target, cpu_share=NEVER_DUE)
    clock = ticking(watch)
    feed.step(4)
    watch.watcher.look()
    watch.watcher.spending.is_unusual = lambda *_: False
    judged = [8]
    for _ in range(feed.num_windows - 4):
        clock[0] += gap_s
        feed.step()
        watch.watcher.look()
        judged.append(watch.watcher.state.judged_iteration)
    gaps = [after - before for before, after in pairwise(sorted(set(judged)))]
    assert set(gaps) == {longest}
    assert watch.names == []


def test_of_windows_that_come_at_once_none_goes_unjudged(faulty, grow, watched, tmp_path):
    """A restart finds what came and left the ring meanwhile, however small its share of a core."""
    feed = grow(faulty)
    with closing(watched(feed.target, state=tmp_path / "state.json").watcher) as first:
        feed.step(4)
        first.look()
    feed.step(feed.num_windows - 4)
    state = tmp_path / "state.json"
    watch = watched(feed.target, state=state, cpu_share=NEVER_DUE, kept_iterations=12)
    watch.watcher.spending.is_unusual = lambda *_: False
    watch.watcher.look()
    assert watch.names[:1] == ["raised"]


def test_a_fault_is_told_a_window_later_at_most_than_with_a_verdict_a_window(faulty, grow, watched):
    feeds = [grow(faulty, name) for name in ("every", "lazy")]
    every = watched(feeds[0].target)
    lazy = watched(feeds[1].target, cpu_share=NEVER_DUE)
    told_at = []
    for feed, watch in zip(feeds, (every, lazy), strict=True):
        clock = ticking(watch)
        for window in range(feed.num_windows):
            clock[0] += SLOW_S
            feed.step()
            watch.watcher.look()
            if watch.names[:1] == ["raised"] and len(told_at) < feeds.index(feed) + 1:
                told_at.append(window)
    assert every.names == lazy.names == ["raised", "cleared"]
    assert [each["finding"]["since_iteration"] for each in every.events] == [
        each["finding"]["since_iteration"] for each in lazy.events
    ]
    assert told_at[0] <= told_at[1] <= told_at[0] + 1
    first, second = (watch.events[0]["finding"]["finding"] for watch in (every, lazy))
    assert (first["ranks"], first["cause"]) == (second["ranks"], second["cause"])
    assert len(lazy.verdicts) < len(every.verdicts)


def test_time_that_passes_pays_for_a_verdict(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, cpu_share=CPU_SHARE)
    watch.wait(0.0)  # no time passes
    watch.watcher.spending.is_unusual = lambda *_: False
    feed.step(10)
    watch.watcher.look()
    before = len(watch.verdicts)
    feed.step()
    watch.watcher.look()
    assert len(watch.verdicts) == before
    watch.wait(3600.0)
    watch.watcher.look()  # nothing new came, but what had waited is judged
    assert len(watch.verdicts) == before + 1
    report = detect(build_timeline(read_trace(feed.target)), DetectorSettings())
    assert watch.verdicts[-1]["iterations"][1] == report.iterations[1]


def test_what_could_not_wait_is_saved_later(healthy, grow, watched):
    """Verdicts of 1 CPU second, a window every 10 s, a share of 5 %: one of two is judged."""
    feed = grow(healthy)
    watch = watched(feed.target, cpu_share=0.05)
    watcher, now = watch.watcher, [0.0]
    watcher.monotonic_s = lambda: now[0]
    watcher.cpu_s = lambda: float(watcher.gauges.num_verdicts)
    watcher._judged_at = (0.0, 0.0)
    feed.step(8)
    watcher.look()

    def judged(unusual: bool) -> bool:
        before = watcher.gauges.num_verdicts
        watcher.spending.is_unusual = lambda *_: unusual
        now[0] += 10.0
        feed.step()
        watcher.look()
        return watcher.gauges.num_verdicts > before

    assert [judged(False) for _ in range(4)] == [False, True, False, True]
    assert [judged(True) for _ in range(2)] == [True, True]
    assert [judged(False) for _ in range(6)] == [False, False, False, True, False, True]


def ticking(watch):
    """Give the watcher a clock that stands until it is moved."""
    now = [0.0]
    watch.watcher.monotonic_s = lambda: now[0]
    watch.watcher._judged_at = (0.0, 0.0)
    return now


def test_the_end_of_the_job_is_judged(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, cpu_share=NEVER_DUE)
    watch.watcher.spending.is_unusual = lambda *_: False
    feed.step(10)
    watch.watcher.look()
    feed.step()
    watch.watcher.look()
    assert watch.watcher.state.judged_iteration == 20
    feed.close()
    watch.watcher.look()
    assert watch.watcher.state.judged_iteration == 22


def test_what_has_waited_is_judged_when_the_job_hangs(healthy, grow, watched):
    feed = grow(healthy)
    watch = watched(feed.target, cpu_share=NEVER_DUE, hang_after_s=60.0)
    clock = ticking(watch)
    watch.watcher.spending.is_unusual = lambda *_: False
    feed.step(10)
    watch.watcher.look()
    feed.step()
    watch.watcher.look()
    assert watch.watcher.state.judged_iteration == 20
    clock[0] += 61.0
    watch.watcher.look()
    watch.watcher.look()
    assert watch.names == ["hang"]
    assert watch.watcher.state.judged_iteration == 22


def test_what_came_and_went_while_windows_waited_is_told(faulty, grow, watched):
    """The fault has ended when the first verdict after it is reached: raised, then cleared."""
    feed = grow(faulty)
    watch = watched(feed.target, cpu_share=NEVER_DUE)
    clock = ticking(watch)
    feed.step(8)
    watch.watcher.look()
    watch.watcher.spending.is_unusual = lambda *_: False
    for _ in range(feed.num_windows - 8):
        clock[0] += SLOW_S
        feed.step()
        watch.watcher.look()
    assert watch.names == ["raised", "cleared"]


def test_once_leaves_nothing_unjudged(megascan, healthy, grow):
    """Two runs of it: windows that came between them, fewer than three quarters of a ring."""
    feed = grow(healthy)
    feed.step(12)
    patient = ("--once", "--json", "--hang-after", "3600")
    megascan("watch", feed.target, *patient)
    feed.step(7)
    done = megascan("watch", feed.target, *patient)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["iterations"][1] == 38


def test_what_spending_remembers_is_bounded(healthy, grow, watched):
    """Spans of ever new names, each in one window."""
    feed = grow(healthy)
    watch = watched(feed.target)
    feed.step(1)
    watch.watcher.look()
    spending, (window,) = Spending(4), watch.watcher.ring.windows
    for number in range(50):
        spending.push(renamed(window, f"name-{number}"))
    assert len(spending._rows) <= 2 * 2 * len(window.segments)
    assert spending._values.shape == (len(spending._rows), 4)


def renamed(window, name):
    """The same window, all its spans of one name."""
    segments = {}
    for rank, segment in window.segments.items():
        spans = segment.spans
        column = pa.array([name] * spans.num_rows).dictionary_encode()
        place = spans.schema.get_field_index("name")
        segments[rank] = replace(segment, spans=spans.set_column(place, "name", column))
    return replace(window, segments=segments)
