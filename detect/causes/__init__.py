"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

`registry.CAUSES` lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly (also: starved by its host, slow in one pass only)
    losses.py       loader, garbage collection, host      lost_time.py  the search they share
    links.py        slow connections, late exits          hits.py       iterations and passes in
    networks.py     a host's network, a rail                            which time is lost, counted
    hosts.py        whole hosts, launching late           device.py     slow, long data, starved;
    bursts.py       ranks that lose time now and then                   what its clock says
    paused_hosts.py hosts that stall one rank or another  power.py      what would be found, and
    occupancy.py    ranks for whom all others wait                      what never could be
    imbalance.py    heavy stages, uneven sequences        finding.py    place, time, cost, words,
    corruption.py   devices that compute wrongly                        what follows from another
    memory.py       slow device memory (profiles)         spec.py       what a cause is
    spells.py       slow in few iterations (profiles)

Start reading at spec.py, then losses.py. To add a cause see registry.py.
"""
