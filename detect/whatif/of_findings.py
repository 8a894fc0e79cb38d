"""What the detector's findings cost, each set of ranks once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from detect.report import Cause, Finding
from detect.whatif.replay import Replay
from detect.whatif.saving import Saving, saved_by_fixing


def savings_of(replay: Replay, findings: Sequence[Finding]) -> list[Saving]:
    """One saving a set of ranks, in the order of the findings.

    A rank that computes slowly and whose host is slow as well is mended once. Findings that name no
    rank (uneven sequences), or ranks that are not in the replay, have no saving.
    """
    recorded = set(replay.ranks.ravel().tolist())
    causes: dict[tuple[int, ...], list[Cause]] = {}
    for finding in findings:
        ranks = replay.with_shared_work(finding.ranks)
        if ranks and recorded.issuperset(ranks):
            causes.setdefault(ranks, []).append(finding.cause)
    return [
        replace(
            saved_by_fixing(replay, ranks, links=Cause.LINK in found),
            causes=tuple(dict.fromkeys(found)),
        )
        for ranks, found in causes.items()
    ]
