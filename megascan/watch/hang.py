"""Notice a window that does not come: which ranks did not write it, and where all ranks stand.

The job's usual gap is the median of the gaps between the ends of its last windows, by the job's own
clocks. When the files have been still for `GAPS_UNTIL_HANG` usual gaps, the job hangs, unless every
rank has closed its file. Ranks without the newest window are missing. A rank writes a window when
the window is finished, so its file does not tell where the rank stands now. Two other files do:

    megascan-standstill-3.json   the tracer's lookout: the host's Python stack
    nccl_trace_rank_3            PyTorch's flight recorder, dumped by its watchdog

A rank whose lookout writes nothing while other ranks' lookouts write is silent: stopped, killed, or
cut off. A hang is reported when it is noticed, and again when more of these files are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from megascan.errors import listed
from megascan.header import Json
from megascan.reader.flight_recorder import Standing, read_standings
from megascan.tracer.lookout import Standstill, read_standstills
from megascan.watch.windows import JobFiles, JobWindow

GAPS_UNTIL_HANG = 3.0
LEAST_SILENCE_S = 10.0
"""A job does not hang before this silence: windows every few ms may be late by a slow disk."""
_KEPT_GAPS = 16
SOURCES = ("flight recorders", "lookouts", "lookouts that are missing")
"""Who tells more of a hang than the rank files do."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A job that stands still."""

    silent_s: float
    usual_gap_s: float
    last_iteration: int
    """Last iteration of the newest window that any rank wrote."""
    missing: tuple[int, ...]
    """Ranks without the newest window."""
    standings: tuple[Standing, ...] = ()
    """What the devices were told to do, from flight recorders."""
    standstills: tuple[Standstill, ...] = ()
    """What the hosts wait in, from lookouts."""
    silent: tuple[int, ...] = ()
    """Ranks whose lookout has not written, although other lookouts did long enough ago."""

    @property
    def num_sources(self) -> int:
        """Return how many of the `SOURCES` have spoken."""
        return sum(map(bool, (self.standings, self.standstills, self.silent)))

    @property
    def headline(self) -> str:
        """Return what is known of the hang, in one sentence."""
        parts = [
            f"no window for {self.silent_s:.0f} s (usually one every {self.usual_gap_s:.3g} s); "
            + (
                f"{_ranks(self.missing)} did not finish the window up to iteration "
                f"{self.last_iteration}, the others did"
                if self.missing
                else f"all ranks finished iteration {self.last_iteration} and none the next window"
            )
        ]
        if self.silent:
            parts.append(
                f"{_ranks(self.silent)}: not a word, the process is stopped or dead or its host "
                "cut off"
            )
        parts += _by_place((one.rank, one.words) for one in self.standstills)
        parts += _by_place((one.rank, f"{one.words} (flight recorder)") for one in self.standings)
        return "; ".join(parts)

    def to_json(self) -> dict[str, Json]:
        """Return the hang for payloads and the state."""
        return {
            "silent_s": round(self.silent_s, 1),
            "usual_gap_s": round(self.usual_gap_s, 3),
            "last_iteration": self.last_iteration,
            "missing_ranks": list(self.missing),
            "silent_ranks": list(self.silent),
            "headline": self.headline,
            "standings": [standing.to_json() for standing in self.standings],
            "standstills": [standstill.to_json() for standstill in self.standstills],
        }


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks)}"


def _by_place(places: Iterable[tuple[int, str]]) -> list[str]:
    """Return a text for each place, as "ranks 0, 1, 3: in all_reduce …"."""
    ranks: dict[str, list[int]] = {}
    for rank, words in places:
        ranks.setdefault(words, []).append(rank)
    return [f"{_ranks(each)}: {words}" for words, each in sorted(ranks.items())]


@dataclass
class HangWatch:
    """Knows the usual gap between windows, and notices when it is exceeded."""

    after_s: float | None = None
    """Silence that counts as a hang; if None, it is computed from the usual gap."""
    hang: Hang | None = None
    _ends_ns: list[int] = field(default_factory=list)
    _heard_s: float = 0.0
    """Silence at which the first lookout was seen to write; 0 before."""

    def take(self, windows: Iterable[JobWindow]) -> None:
        """Note that windows have come."""
        for window in windows:
            if self._ends_ns and window.end_unix_ns < self._ends_ns[-1]:
                self._ends_ns.clear()  # another run
            self._ends_ns = [*self._ends_ns, window.end_unix_ns][-_KEPT_GAPS:]
            self.hang, self._heard_s = None, 0.0

    @property
    def usual_gap_s(self) -> float | None:
        """Return the median gap between the last windows; None before three windows."""
        if len(self._ends_ns) < 3:
            return None
        ends = self._ends_ns
        return median(after - before for before, after in pairwise(ends)) / 1e9

    def patience_s(self) -> float | None:
        """Return after how much silence the job hangs; None as long as that is not known."""
        if self.after_s is not None:
            return self.after_s
        gap = self.usual_gap_s
        return None if gap is None else max(LEAST_SILENCE_S, GAPS_UNTIL_HANG * gap)

    def look(self, files: JobFiles, silent_s: float) -> Hang | None:
        """Return a hang when it is first noticed, and again when more is known.

        `silent_s` is the time since the last write.
        """
        patience = self.patience_s()
        if patience is None or silent_s < patience:
            return None
        num_known = 0 if self.hang is None else self.hang.num_sources
        if num_known == len(SOURCES):
            return None
        hang = self._seen(files, silent_s)
        if self.hang is not None and hang.num_sources <= num_known:
            return None
        self.hang = hang
        return hang

    def _seen(self, files: JobFiles, silent_s: float) -> Hang:
        standstills = _newest(files)
        if standstills:
            self._heard_s = self._heard_s or silent_s
        patience_s = max((one.patience_s for one in standstills), default=0.0)
        is_due = standstills and silent_s >= self._heard_s + patience_s
        unheard = set(range(files.world_size)) - {one.rank for one in standstills}
        return Hang(
            silent_s=silent_s,
            usual_gap_s=self.usual_gap_s or 0.0,
            last_iteration=files.newest_iteration,
            missing=files.behind,
            standings=tuple(read_standings(files.folders)),
            standstills=tuple(standstills),
            silent=tuple(sorted(unheard)) if is_due else (),
        )


def _newest(files: JobFiles) -> list[Standstill]:
    """Return what lookouts have written since the last window, ordered by rank."""
    said = {
        found.rank: found
        for found, written in read_standstills(files.folders, files.run_id)
        if written >= files.changed_unix_s
    }
    return [said[rank] for rank in sorted(said)]
