"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

`registry.CAUSES` lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly: its device,   slow_rows.py  which rows do
                    its host, or one pass only            lost_time.py  the search of losses
    losses.py       loader, garbage collection, host      hits.py       iterations and passes in
    links.py        slow connections, late exits                        which time is lost, counted
    networks.py     a host's network, a rail              device.py     slow, long data, starved;
    hosts.py        whole hosts, launching late                         what its clock says
    bursts.py       ranks that lose time now and then     power.py      what would be found, and
    paused_hosts.py hosts that stall one rank or another                what never could be
    occupancy.py    ranks for whom all others wait        finding.py    place, time, cost, words,
    imbalance.py    heavy stages, uneven sequences                      what follows from another
    corruption.py   devices that compute wrongly          spec.py       what a cause is
    optimizer.py    an optimizer step alone is slow
    memory.py       slow device memory (profiles)
    spells.py       slow in few iterations (profiles)

Start reading at spec.py, then losses.py. To add a cause see registry.py.
"""
