"""Name hosts on which processes stand still for memory that was taken away, or for a slow disk.

Problem: a process whose pages were swapped out computes late, and so does one that waits for a
disk; no span shows either. Its device looks slow, its loader late, or all wait for it and nobody
says why.

Idea: Linux counts for which share of the time somebody in a rank's container, or on its host, stood
still for memory or for a disk (`megascan/tracer/pressure.py`). Neither data nor layers nor waiting
for other ranks lengthen that. An open finding is the host's where its ranks stand still for most of
what it costs, in several readings, and for several times as long as all ranks elsewhere. What a
whole host tells of all of its ranks is, of memory, that of the ranks that had pages read back: of
one that had a third as many as another it is a third.

**Pages.** Memory that comes back from compressed memory, or that was taken while it was at rest, is
not counted as waiting. But each page that is read back takes 10 µs and more, so that their number
says how long that takes at least, where some of the rank's memory is swapped out; a third of what
the finding costs is enough, as it is twice as much where compressing is slow. A page of a mapped
file takes far longer and so explains far less. Example: of two
replicas rank 1 computes 1.36 times slower, which costs 258 of 773 ms; 20,650 pages an iteration
were read back for it, in 207 ms at least.

Example: of two replicas all wait for rank 1, 1.8 times as long as the step would take (0.44 of it).
Its container stood still for memory for 28 % of the time, that of rank 0 for none; its process had
6,671 pages an iteration read back from swap, rank 0's none.

**What a rank does itself.** A rank that saves, logs or reads for all others waits for the disk as
well, and one that holds more memory is the first to lose it. So a rank that reads, writes or holds
far more than all others is undecided, and its evidence says what it does. Beside a disk that is
as quick twice as much is read in twice the time: a host that waits for three times as long, and
reads and writes no more than twice as much, has a slower one.

Limits: a kernel that does not count (PSI) tells nothing. Ranks of one host and no container of
their own are alike. Where many processors are busy less is counted than a process waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from detect.causes.finding import (
    Answer,
    Inquiry,
    decided,
    gain,
    rows_of_findings,
    settle,
    slowed_by,
    undecided,
)
from detect.observe.observations import Observations
from detect.report import Cause, Finding, Owner
from detect.stats import robust
from detect.text import subject_of_ranks
from detect.thresholds.hosts import SHORTAGES
from megascan.arrays import Flags, Floats, mask_of
from megascan.errors import listed

OF_HOSTS = (Cause.HOST, Cause.LOADER, Cause.UNKNOWN)
"""What a rank that stands still between its passes may be taken for."""


@dataclass(frozen=True, kw_only=True)
class _Need:
    """Something that a process may stand still for."""

    shares: Callable[[Observations, Flags], list[Floats] | None]
    """For which share of the time each row does, in samples of its own, while something holds; None
    where a row does not tell."""
    doings: Mapping[str, str]
    """What a rank does itself that has it wait longer: readings, and how they are said."""
    most_ratio: float
    """To the most of all others, up to which it does as they do."""
    most_share: float
    """Of what a finding costs, from which on that is why."""
    causes: tuple[Cause, ...]
    """What a rank that stands still for it may be taken for."""
    noun: str
    evidence: str
    advice: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Apart:
    """Rows that stand still for far longer than others."""

    need: _Need
    rows: tuple[int, ...]
    own_share: float
    """Of the time, of the row that has least."""
    others_share: float
    page_reads: tuple[float, float] = (0.0, 0.0)
    """An iteration, of the row that has least, and the most of others."""

    @property
    def predicate(self) -> str:
        """Return what is said of them."""
        verb, whose = ("waits", "its") if len(self.rows) == 1 else ("wait", "their")
        return f"{verb} for {self.need.noun} of {whose} host, {self.own_share:.0%} of the time"

    @property
    def evidence(self) -> Iterator[str]:
        """Yield where that is from."""
        yield self.need.evidence.format(own=self.own_share, others=self.others_share)
        own, others = self.page_reads
        if self.need.noun == "memory" and own >= SHORTAGES.min_page_reads:
            yield (
                f"its process had {own:,.0f} pages an iteration read back before it could go on, "
                f"those of others {others:,.0f} at most"
            )


def search_shortages(inquiry: Inquiry) -> Answer:
    """Name hosts of undecided findings whose ranks stand still for memory or a disk."""
    seen, members = inquiry.seen, inquiry.seen.members

    def decide(one: Finding) -> Finding | None:
        apart = _behind(seen, one)
        if one.owner is not Owner.UNDECIDED or apart is None:
            return None
        doubts = _own_doings(seen, apart, _window(seen, one))
        return undecided(one, doubts) if doubts else _decided(seen, one, apart)

    found, settled = settle(inquiry, decide)
    is_new = any(one.owner is Owner.NODE for one in found)
    for one in inquiry.found:
        if (explained := _explained(seen, one)) is not None:
            found.append(explained)
            settled.append(one)
    named = [one for one in found if one.owner is Owner.NODE]
    blamed = inquiry.blamed | rows_of_findings(members, named)
    return Answer(
        findings=tuple(found),
        slow=rows_of_findings(members, named),
        explains=lambda one: one in settled or (is_new and _is_nobodys(one)),
        notes=tuple(_notes(seen, blamed | rows_of_findings(members, found))),
    )


def _explained(seen: Observations, one: Finding) -> Finding | None:
    """Return a finding on a node that is blamed already with what its ranks stand still for as its
    cause; None where that is not why it is slow. A GPU is slow by itself.
    """
    if one.owner is not Owner.NODE or one.cause is Cause.UNKNOWN:
        return None
    if one.cause is Cause.COMPUTE and seen.members.device_kind != "cpu":
        return None
    apart = _behind(seen, one)
    if apart is None or _own_doings(seen, apart, _window(seen, one)):
        return None
    return replace(
        one,
        cause=_cause(one),
        statement=_statement(seen, one, one.ranks, apart),
        evidence=(*apart.evidence, *one.evidence),
        next_steps=apart.need.advice,
    )


def _cause(of: Finding) -> Cause:
    return Cause.LOADER if of.cause is Cause.LOADER else Cause.HOST


def _is_nobodys(one: Finding) -> bool:
    """Return whether an open finding is that somebody is late, and does not say who."""
    is_open = one.owner is Owner.UNDECIDED and one.cause is Cause.UNKNOWN
    return is_open and not one.ranks


def _window(seen: Observations, of: Finding) -> Flags:
    """Flag the iterations in which a finding holds, first to last."""
    return seen.within([(of.first_iteration, of.last_iteration)])


def _behind(seen: Observations, of: Finding) -> _Apart | None:
    """Return what the ranks of a finding stand still for, for most of what it costs; None where
    that is nothing, or others do as well.
    """
    if not of.ranks:
        return None
    told = (_behind_need(seen, need, of) for need in NEEDS if of.cause in need.causes)
    return next(filter(None, told), None)


def _behind_need(seen: Observations, need: _Need, of: Finding) -> _Apart | None:
    """Return the rows that stand still for most of what a finding costs, if these are its rows; or
    some of them, where they wait for each other inside passes. All else that stands still as long
    must be on the same hosts, of which a reading may be. None where nobody knows what ranks do
    themselves.
    """
    holds = _window(seen, of)
    apart = _apart(seen, need, holds, max(SHORTAGES.least_share, need.most_share * of.lost_share))
    if apart is None or any(_readings(seen, name, holds) is None for name in need.doings):
        return None
    members, rows = seen.members, set(seen.members.rows_with(of.ranks))
    hosts = members.hosts_of(of.ranks)
    if rows <= set(apart.rows) and members.hosts_of(members.ranks_of(apart.rows)) <= hosts:
        return replace(apart, rows=tuple(sorted(rows)))
    return apart if set(apart.rows) <= rows and seen.holds_waiting else None


def _apart(seen: Observations, need: _Need, holds: Flags, least_share: float) -> _Apart | None:
    """Return the rows that stand still by `least_share` of the time longer than usual in the
    iterations `holds`, for several times as long as all others, and in several readings.
    """
    samples = need.shares(seen, holds)
    if samples is None:
        return None
    share = np.array([float(np.mean(one)) for one in samples])
    usual = robust.usual(share)
    level = max(SHORTAGES.far_ratio * usual, usual + least_share)
    is_far = share >= level
    others = float(share[~is_far].max(initial=0.0))
    if not is_far.any() or share[is_far].min() < SHORTAGES.far_ratio * others:
        return None
    rows = np.flatnonzero(is_far).tolist()
    if min(int(np.sum(samples[row] >= level)) for row in rows) < SHORTAGES.min_readings:
        return None
    page_reads = _page_reads(seen, holds).mean(axis=1)
    return _Apart(
        need=need,
        rows=tuple(rows),
        own_share=float(share[is_far].min()),
        others_share=others,
        page_reads=(float(page_reads[is_far].min()), float(page_reads[~is_far].max(initial=0.0))),
    )


def _memory_shares(seen: Observations, holds: Flags) -> list[Floats] | None:
    readings = _readings(seen, "memory_waited_percent", holds)
    if readings is None:
        return None
    weights = _weights(seen, _page_reads(seen, holds).mean(axis=1))
    return [weight * one / 100 for weight, one in zip(weights, readings, strict=True)]


def _page_shares(seen: Observations, holds: Flags) -> list[Floats] | None:
    """Return the share of each iteration in which pages were read back, at the least that takes; of
    rows none of whose memory is swapped out, none: they read a mapped file for the first time.
    """
    swapped = _readings(seen, "memory_swapped_gbytes", holds)
    if swapped is None or not seen.page_reads:
        return None
    share = _page_reads(seen, holds) * SHORTAGES.page_ns / seen.iteration_ns[holds]
    return [one * float(is_out.max() > 0.0) for one, is_out in zip(share, swapped, strict=True)]


def _disk_shares(seen: Observations, holds: Flags) -> list[Floats] | None:
    readings = _readings(seen, "disk_waited_percent", holds)
    return None if readings is None else [one / 100 for one in readings]


def _readings(seen: Observations, name: str, holds: Flags) -> list[Floats] | None:
    """Return what a reading is for each row while something holds, (reading,) each: of rows that
    stand for several ranks those of all; None where a row does not tell.
    """
    if not holds.any():
        return None
    first, last = seen.iterations[holds][[0, -1]]
    rows = []
    for ranks in seen.members.workers:
        told = [
            reading[name]
            for rank in ranks
            for window, reading in seen.pressure.get(rank, {}).items()
            if first <= window <= last and name in reading
        ]
        if not told:
            return None
        rows.append(np.array(told, dtype=np.float64))
    return rows if len(rows) > 1 else None


def _page_reads(seen: Observations, holds: Flags) -> Floats:
    """Return how many pages were read back for a rank of each row, (row, iteration)."""
    numbers = seen.iterations[holds].tolist()
    told = [
        [max(seen.page_reads.get(rank, {}).get(number, 0) for rank in ranks) for number in numbers]
        for ranks in seen.members.workers
    ]
    return np.array(told, dtype=np.float64)


def _weights(seen: Observations, page_reads: Floats) -> Floats:
    """Return the share of its host's waiting for memory that is each row's, (row,), by the pages
    that it had read back an iteration: all of it where no rank of a host had any, or nobody knows
    the host.
    """
    hosts = np.array(seen.members.hosts)
    weights = np.ones(len(hosts))
    for host in set(hosts.tolist()) - {""}:
        is_here = hosts == host
        most = float(page_reads[is_here].max())
        if most >= SHORTAGES.min_page_reads:
            weights[is_here] = page_reads[is_here] / most
    return weights


def _own_doings(seen: Observations, apart: _Apart, holds: Flags) -> str:
    """Say that ranks may wait for what they do themselves; "" where they do as the others."""
    doings = _doings(seen, apart, holds)
    if not doings:
        return ""
    return (
        f"it {apart.predicate}, but {doings}: whether that is its own doing or the host's fault is "
        "not shown"
    )


def _doings(seen: Observations, apart: _Apart, holds: Flags) -> str:
    """Say what ranks do more of than all others; "" where that is nothing."""
    is_far = mask_of(list(apart.rows), len(seen.members))
    words = []
    for name, said in apart.need.doings.items():
        readings = _readings(seen, name, holds)
        if readings is None:
            continue
        level = np.array([np.mean(one) for one in readings])
        own, others = float(level[is_far].max()), float(level[~is_far].max(initial=0.0))
        if own > apart.need.most_ratio * others:
            words.append(said.format(own=own, others=others))
    return listed(words)


def _decided(seen: Observations, of: Finding, apart: _Apart) -> Finding:
    """Return a finding as that of the host on which its ranks stand still."""
    ranks = seen.members.ranks_of(apart.rows)
    return decided(
        seen,
        of,
        ranks,
        cause=_cause(of),
        statement=_statement(seen, of, ranks, apart),
        evidence=tuple(apart.evidence),
        advice=apart.need.advice,
    )


def _statement(seen: Observations, of: Finding, ranks: tuple[int, ...], apart: _Apart) -> str:
    """Say what ranks stand still for, when, and what the step would gain."""
    first, last = of.first_iteration, of.last_iteration
    gained = gain(
        slowed_by(seen, first, last), of.step_time_cost_ratio, is_replayed=of.cost_is_replayed
    )
    return (
        f"{subject_of_ranks(seen.members, ranks)} {apart.predicate} ({first} to {last}); {gained}"
    )


def _notes(seen: Observations, spoken_of: Flags) -> Iterator[str]:
    """Yield who stands still for long and is in no finding."""
    everywhere = np.ones(len(seen.iterations), dtype=bool)
    for need in NEEDS:
        apart = _apart(seen, need, everywhere, SHORTAGES.noted_share)
        if apart is not None and not spoken_of[list(apart.rows)].any():
            subject = subject_of_ranks(seen.members, seen.members.ranks_of(apart.rows))
            doings = _doings(seen, apart, everywhere)
            yield (
                f"{subject} {apart.predicate}{f', and {doings}' if doings else ''}; whether that "
                "costs the step anything is not seen"
            )


_MEMORY = _Need(
    shares=_memory_shares,
    doings={
        "memory_own_gbytes": "holds {own:.3g} GB of memory of its own, the others {others:.3g}"
    },
    most_ratio=SHORTAGES.most_memory_ratio,
    most_share=SHORTAGES.most_share,
    causes=(*OF_HOSTS, Cause.COMPUTE, Cause.STAGE_IMBALANCE),
    noun="memory",
    evidence="Linux counts for how long processes of a container, or of its host, stood still for "
    "memory that was swapped out, or that nobody had free: here for {own:.0%} of the time, "
    "elsewhere for {others:.1%} at most; neither data nor devices lengthen that",
    advice=(
        "see how much memory that host has free, and who has the rest (free -m, vmstat 1: columns "
        "si and so, top sorted by RES)",
        "in a container, compare its limit with what the process needs (memory.max and "
        "memory.events of its cgroup)",
    ),
)
_PAGES = replace(
    _MEMORY,
    shares=_page_shares,
    most_share=SHORTAGES.pages_share,
    evidence="a page that is read back takes 10 µs and more: here that is {own:.0%} of the time at "
    "least, elsewhere {others:.1%}; neither data nor devices take memory away",
)
_DISKS = _Need(
    shares=_disk_shares,
    doings={
        "disk_read_mbytes_per_s": "reads {own:.3g} MB/s, the others {others:.3g}",
        "disk_written_mbytes_per_s": "writes {own:.3g} MB/s, the others {others:.3g}",
    },
    most_ratio=SHORTAGES.most_bytes_ratio,
    most_share=SHORTAGES.most_share,
    causes=OF_HOSTS,
    noun="disks",
    evidence="Linux counts for how long processes of a container, or of its host, stood still for "
    "disks and shared file systems: here for {own:.0%} of the time, elsewhere for {others:.1%} at "
    "most, though the others read and write as much",
    advice=(
        "see how busy that host's disks are and who keeps them so (iostat -x 1, iotop -o), and "
        "read a file as the job does on it and on a peer",
        "in a container, look for a limit (io.max of its cgroup); of the disks, read smartctl -a",
    ),
)
NEEDS = (_MEMORY, _PAGES, _DISKS)
"""Asked one after the other."""
