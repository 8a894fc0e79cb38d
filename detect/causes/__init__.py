"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

`registry.CAUSES` lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly (also: starved by its host, slow in one pass only)
    losses.py       loader, garbage collection, host      lost_time.py   the search they share
    links.py        slow connections, late exits          starvation.py  devices that wait for hosts
    occupancy.py    ranks for whom all others wait, nobody knows why
    imbalance.py    heavy stages, uneven sequences        finding.py     place, time, cost, headline
    consequences.py what follows from another finding     spec.py        what a cause is

Start reading at spec.py, then losses.py. To add a cause see registry.py.
"""
