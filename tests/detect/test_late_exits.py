"""Late exits: the partners of a late rank, and clocks that contradict each other, accuse nobody."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from detect import Cause, DetectorSettings, Owner
from detect.causes.losses import LATE, _without_victims
from detect.detector import judge
from detect.observe.extract import observe
from detect.observe.spans import SpanIndex
from detect.observe.transfers import transfers_of
from megascan.schema import Track
from megascan.timeline import TIMELINE_SCHEMA
from megascan.topology import Layout


@pytest.fixture
def lateness(job):
    """Lateness of ranks 0 and 1 from all-reduces given as (start, end) of each of the two."""

    def measure(*operations):
        timeline = job(layout=Layout(dp=2), iterations=1).timeline()
        rows = []
        for rank in (0, 1):
            for match, ends in enumerate(operations):
                start, end = ends[rank]
                last_arrival = max(ends[0][0], ends[1][0])
                row = dict.fromkeys(TIMELINE_SCHEMA.names, -1)
                row |= {
                    name: ""
                    for name in TIMELINE_SCHEMA.names
                    if pa.types.is_dictionary(TIMELINE_SCHEMA.field(name).type)
                }
                row |= {
                    "rank": rank, "kind": "collective", "name": "all_reduce", "op": "all_reduce",
                    "group": "dp@0", "track": int(Track.COMMUNICATION), "start_ns": start,
                    "duration_ns": end - start, "iteration": 3, "match": match, "size_bytes": 8,
                    "transfer_ns": max(0, end - last_arrival),
                }  # fmt: skip
                rows.append(row)
        columns = {
            name: pa.array([row[name] for row in rows]).cast(TIMELINE_SCHEMA.field(name).type)
            if not pa.types.is_dictionary(TIMELINE_SCHEMA.field(name).type)
            else pa.array([row[name] for row in rows], pa.string()).dictionary_encode()
            for name in TIMELINE_SCHEMA.names
        }
        headers = {
            rank: replace(header, groups={"dp@0": (0, 1)})
            for rank, header in timeline.headers.items()
        }
        spans = pa.table(columns).cast(TIMELINE_SCHEMA)
        timeline = replace(timeline, spans=spans, headers=headers)
        found = transfers_of(SpanIndex.of(timeline), timeline)
        return found.late_ns[:, 0].tolist(), found.late_in

    return measure


def test_the_later_of_two_is_late(lateness):
    late, where = lateness(((0, 100), (0, 900)))
    assert late == [0, 800]
    assert [(one.rank, one.members, one.time_ns) for one in where] == [(1, (0, 1), 800)]


def test_lateness_that_only_the_clocks_show_does_not_count(lateness):
    """Rank 1's clock is 500 ahead: rank 0 leaves the second operation before rank 1 came."""
    late, where = lateness(((0, 100), (0, 600)), ((1000, 1010), (1510, 1520)))
    assert late == [0, 0]
    assert not where


def _leaving_late(job, others_ms, costs):
    """Observe a job whose rank 1 leaves its communications 40 ms late, the others `others_ms`."""
    seen = observe(job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).timeline())
    late_ns = np.full((8, len(seen.iterations)), others_ms * 1e6)
    late_ns[1] = 40e6
    late_ns *= np.exp(0.01 * np.random.default_rng(1).standard_normal(late_ns.shape))
    return replace(seen, lost_ns={**seen.lost_ns, Cause.LINK: late_ns}, costs=costs)


@pytest.mark.parametrize("late", [(1,), (1, 2)])
def test_ranks_that_leave_late_are_pointed_at_and_not_blamed(job, late):
    """Of those that were named in jobs made for a test, nearly all were sound."""
    seen = observe(job(layout=Layout(dp=8, pp=2), transfer=lambda *_: 1.0).timeline())
    late_ns = np.full((16, len(seen.iterations)), 1e6)
    late_ns[list(late)] = 40e6
    late_ns *= np.exp(0.01 * np.random.default_rng(1).standard_normal(late_ns.shape))
    told = replace(seen, lost_ns={**seen.lost_ns, Cause.LINK: late_ns}, costs=None)
    findings = judge(told, DetectorSettings()).findings
    assert sorted(one.ranks for one in findings) == [(rank,) for rank in late]
    assert {(one.cause, one.owner) for one in findings} == {(Cause.LINK, Owner.UNDECIDED)}
    assert all(LATE in one.evidence for one in findings)


def _by_such_clocks(job, late_ms, error_ms):
    """Judge a job whose rank 1 leaves late by clocks that agree within `error_ms`."""
    seen = observe(job(layout=Layout(dp=4, pp=2), transfer=lambda *_: 1.0).timeline())
    late_ns = np.full((8, len(seen.iterations)), 1e6)
    late_ns[1] = late_ms * 1e6
    alignment = replace(seen.alignment, residual_p99_ns=error_ms * 1e6)
    lost_ns = {**seen.lost_ns, Cause.LINK: late_ns}
    return judge(
        replace(seen, lost_ns=lost_ns, alignment=alignment, costs=None), DetectorSettings()
    )


def test_clocks_that_were_not_put_together_accuse_nobody_of_leaving_late(job):
    report = _by_such_clocks(job, 200.0, 60.0)
    assert not report.findings
    assert any("who leaves communication late cannot be told" in note for note in report.notes)


@pytest.mark.parametrize(("hosts", "cause"), [(8, Cause.HOST), (4, Cause.LINK)])
def test_where_all_processes_share_one_host_a_late_exit_is_no_connections(job, hosts, cause):
    """Processes on CPUs; with a second host a network lies between some of them."""
    cpu = job(layout=Layout(dp=4, pp=2), device="cpu", hosts=hosts, transfer=lambda *_: 1.0)
    seen = observe(cpu.timeline())
    late_ns = np.full((8, len(seen.iterations)), 1e6)
    late_ns[1] = 80e6
    late_ns *= np.exp(0.01 * np.random.default_rng(1).standard_normal(late_ns.shape))
    seen = replace(seen, lost_ns={**seen.lost_ns, Cause.LINK: late_ns}, costs=None)
    (finding,) = judge(seen, DetectorSettings()).findings
    assert (finding.ranks, finding.cause) == ((1,), cause)
    shown = " ".join((*finding.evidence, *finding.next_steps))
    assert ("off its core" in shown) == ("iperf3" not in shown) == (cause == Cause.HOST)


def test_who_leaves_late_behind_a_slow_rank_of_its_pipeline_only_waits_for_it(job):
    """Whatever their messages were late by: lateness is handed on from stage to stage."""
    seen = observe(job(layout=Layout(pp=2, dp=2)).timeline())
    late = tuple(SimpleNamespace(row=row, course=SimpleNamespace(effect=0.1)) for row in (2, 3))
    none_late = SimpleNamespace(late_in=())
    kept = _without_victims(seen, none_late, late, np.arange(4) == 0)
    assert [one.row for one in kept] == [3]
