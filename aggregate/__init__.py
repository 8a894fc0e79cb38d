"""Turn the rank files of a traced job into one aligned timeline, and sum it up.

Owns everything between a `Trace` (as each rank recorded it, by its own clock; from
`megascan.reader`) and a `Timeline` (on one clock, with waits and self times; for `megascan.export`
and `detect`).

    merge.py        build_timeline: the steps below in their order; start here. Also what each
                    span was made of (wait, transfer, self time), and where the spans of a rank
                    may be divided
    match.py        which spans of different ranks are one communication
    anchors.py      what ties clocks together: ends of collectives, bounds from messages; which
                    ends are drawn where there are many
    fitting.py      the robust least-squares problem: an offset and a drift for each clock
    causality.py    what no clock may contradict: nothing is received before it was sent
    clocks.py       the fit that causality allows, and its error bars
    jumps.py        clocks that jump, or begin again at every step; loaded only where there are any
    summary.py      shares of time by rank and iteration, as a table and as text
    cluster.py      all these steps with the workers of a Dask cluster
"""

from aggregate.fitting import load_solver
from aggregate.merge import align, build_shards, build_timeline
from aggregate.summary import Summary, Sums, render_text, summarise, summary_of

__all__ = [
    "Summary",
    "Sums",
    "align",
    "build_shards",
    "build_timeline",
    "load_solver",
    "render_text",
    "summarise",
    "summary_of",
]
__megascan__ = True
