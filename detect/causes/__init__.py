"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

registry.py lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly: its device,   finding.py   what a cause is; a claim as a
                    its host, or one pass only                         finding: place, cost,
    losses.py       loader, garbage collection, host                   words, what follows
    links.py        slow connections                      searches.py  what causes share: slow rows,
    late_exits.py   ranks that leave transfers late                    time lost, hits counted
    networks.py     NICs of a host, rails, NVLinks        device.py    slow, long data, starved;
    hosts.py        whole hosts, launching late                        what a device's clock says
    bursts.py       ranks that lose time now and then     ordinary.py  what else explains slow
    paused_hosts.py hosts that stall one rank or another               computing: chips, place, pair
    unexplained.py  all wait for one rank; the step       power.py     what would be found, and
                    became longer, nobody says why                     what never could be
    imbalance.py    heavy stages, uneven sequences
    corruption.py   devices that compute wrongly
    optimizer.py    an optimizer step alone is slow
    memory.py       slow device memory (profiles)
    spells.py       slow in few iterations (profiles)
    changed_links.py links that become slower, or flap

Start reading at finding.py, then losses.py. docs/architecture.md says how to add one.
"""
