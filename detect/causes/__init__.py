"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

registry.py lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly: its device,   finding.py   what a cause is; a claim as a
                    its host, or one pass only                         finding: place, cost, words
    losses.py       loader, garbage collection, host      together.py  what findings mean for
    links.py        slow connections                                   each other
    late_exits.py   ranks that leave transfers late       searches.py  what causes share: slow rows,
    networks.py     NICs of a host, rails, NVLinks                     time lost, hits counted
    hosts.py        whole hosts, launching late           device.py    slow, long data, starved;
    bursts.py       ranks that lose time now and then                  what a device's clock says
    paused_hosts.py hosts that stall one rank or another  ordinary.py  what else explains slow
    unexplained.py  all wait for one rank; the step                    computing: chips, place, pair
                    became longer, nobody says why        power.py     what would be found, and
                                                                       what never could be
    imbalance.py    heavy stages, uneven sequences
    corruption.py   devices that compute wrongly
    optimizer.py    an optimizer step alone is slow
    memory.py       slow device memory (profiles)
    spells.py       slow in few iterations (profiles)
    changed_links.py links that become slower, or flap

Start reading at finding.py, then losses.py. docs/architecture.md says how to add one.
"""
