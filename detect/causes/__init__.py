"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

`registry.CAUSES` lists them in the order of search; `detect.detector.judge` walks over it. Fed by
`detect.observe` (what was measured) and `detect.stats` (which rows stand out). Nothing here draws.

    compute.py      a rank computes slowly (also: starved by its host, slow in one pass only)
    losses.py       loader, garbage collection, host      lost_time.py   the search they share
    links.py        slow connections, late exits          starvation.py  devices that wait for hosts
    networks.py     a host's network, a rail              device.py      slow devices or long data
    hosts.py        whole hosts, launching late           readings.py    what a device's clock says
    bursts.py       ranks that lose time now and then     hits.py        such iterations, counted
    paused_hosts.py hosts that stall one rank or another  power.py       what would have been found
    occupancy.py    ranks for whom all others wait        blindness.py   what the trace cannot show
    imbalance.py    heavy stages, uneven sequences        finding.py     place, time, cost, headline
    corruption.py   devices that compute wrongly          spec.py        what a cause is
    consequences.py what follows from another finding     slow_passes.py single slow passes

Start reading at spec.py, then losses.py. To add a cause see registry.py.
"""
