"""Slow connections as findings."""

from __future__ import annotations

import numpy as np

from detect.causes.links import LinkSearch, SlowLink
from detect.findings.finding import Claim, build_finding
from detect.findings.wording import counted, listed, milliseconds, place, times
from detect.observations import Observations
from detect.report import Cause, Finding, Owner


def link_findings(seen: Observations, found: LinkSearch) -> list[Finding]:
    """One finding a bad connection."""
    return [_finding(seen, one) for one in found.slow]


def _finding(seen: Observations, link: SlowLink) -> Finding:
    members = seen.members
    known = set(members.ranks.tolist())
    rows = tuple(members.row(rank) for rank in link.ranks if rank in known)
    slowdown = float(np.exp(link.course.effect))
    reach = 1.96 * link.course.standard_error
    return build_finding(
        seen,
        Claim(
            ranks=link.ranks,
            rows=rows,
            cause=Cause.LINK,
            owner=Owner.NODE,
            slowdown=slowdown,
            interval=(slowdown * float(np.exp(-reach)), slowdown * float(np.exp(reach))),
            course=link.course,
            q_value=link.q_value,
            num_peers=link.num_peers,
            saved_ns=link.excess_ns,
            subject=_subject(seen, link, rows),
            predicate=f"transfers {times(slowdown)} slower than equal connections",
            evidence=_evidence(seen, link),
        ),
    )


def _subject(seen: Observations, link: SlowLink, rows: tuple[int, ...]) -> str:
    if len(link.ranks) == 1:
        where = place(seen.members, rows[0]) if rows else ""
        return f"everything that rank {link.ranks[0]} ({where}) sends and receives"
    if len(link.ranks) == 2:
        places = " and ".join(place(seen.members, row) for row in rows)
        return f"the link between ranks {link.ranks[0]} and {link.ranks[1]} ({places})"
    return f"the group of ranks {listed(link.ranks)}"


def _evidence(seen: Observations, link: SlowLink) -> tuple[str, ...]:
    sentences = [
        f"{link.kind} takes {milliseconds(link.actual_ns)} against "
        f"{milliseconds(link.normal_ns)} on {counted(link.num_peers, 'equal connection')}, counted "
        "from the last member's arrival",
        f"slower in {link.course.share:.0%} of these iterations",
    ]
    if len(link.units) > 1:
        groups = listed(f"{{{listed(ranks)}}}" for ranks in link.units)
        sentences.append(f"slow among {groups}; what they share is named")
    elif len(link.ranks) > 2:
        sentences.append("which link inside the group is slow, one group alone cannot tell")
    if seen.alignment is not None:
        sentences.append(
            f"the loss is {milliseconds(link.actual_ns - link.normal_ns)} a transfer, clocks agree "
            f"within {milliseconds(seen.alignment.residual_p99_ns)} (p99)"
        )
    return tuple(sentences)
