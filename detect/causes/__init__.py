"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

registry.py lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

Causes:                                             What they share, and what follows them:

    compute.py       a rank computes slowly: its        finding.py   what a cause is; a claim as a
                     device, its host, or one pass                   finding: place, cost, words
    losses.py        loader, collector, host            together.py  what findings mean for each
    bursts.py        who loses time now and then                     other: one fault, one finding
    spells.py        slow in few iterations (profiles)  searches.py  slow rows, and time lost
    optimizer.py     an optimizer step alone is slow    hits.py      slow iterations and passes,
    memory.py        slow device memory (profiles)                   counted
    corruption.py    devices that compute wrongly       device.py    slow, starved or on long data;
    hosts.py         whole hosts, launching late                     what a device's clock says
    paused_hosts.py  hosts that stall now one rank,     ordinary.py  what else explains slow
                     now another                                     computing: chips, place, pair
    links.py         slow connections                   power.py     what would be found, and what
    changed_links.py links that become slower, or flap               never could be
    late_exits.py    ranks that leave transfers late
    networks.py      NICs of a host, rails, NVLinks
    imbalance.py     heavy stages, uneven sequences
    unexplained.py   all wait for one rank; the step
                     became longer, nobody says why

Start reading at finding.py, then losses.py. docs/architecture.md says how to add one.
"""
