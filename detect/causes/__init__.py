"""What can be wrong with a job, one file a cause: search, whose fault it is, words, advice.

`detect.detector` lists them in the order of search, loads what only some traces show where there is
any of it, and asks one after the other. Fed by `detect.observe` (what was measured) and
`detect.stats` (which rows stand out). Nothing here draws.

Causes:                                             What they share, and what follows them:

    compute.py       a rank computes slowly             finding.py   what a cause is; a claim as a
    compute_owner.py  whose fault that is: its                       finding: place, cost, words
                     device, its host, one pass
    losses.py        loader, collector, host, exits     together.py  what findings mean for each
    bursts.py        who loses time now and then                     other: one fault, one finding
    burst_owner.py   whose fault that is                searches.py  slow rows, and time lost
    spells.py        slow in few iterations (profiles)
    pass_ends.py     whose passes end late, of a TP
                     group that waits unseen
    changed_ends.py  the same of groups that are
                     slow at times
    own_work.py      slow now and then, by work in
                     which nobody waits
    slow_modules.py  slow for parts of passes
    burst_data.py    slow now and then, or on data
                     that are longer then
    one_of_two.py    which of two, now and then
    mates.py         which of a group is slow, whose    longer_steps.py  whose optimizer step is
                     waiting nobody recorded                         longer than its mates'
    optimizer.py     an optimizer step alone is slow    hits.py      slow iterations, counted
    memory.py        slow device memory (profiles)      pass_hits.py  slow passes, counted
    spared.py        slow in products of matrices,
                     less where memory is moved
    corruption.py    who computes wrongly (probes)      device.py    slow, or on long data
    hosts.py         whole hosts, launching late        readings.py  what a device's clock says
    host_data.py     their data, layers or experts      launching.py a device that waits for its
    paused_hosts.py  hosts that stall now one rank,                  host, and whose fault that is
                     now another
    loading_hosts.py  hosts that load far longer
    far_loaders.py   loads that are far longer
                     than any other ever is
    links.py         slow connections, and what may     ordinary.py  what else explains slow
                     only make them seem slow                        computing: chips, place, pair
    slow_links.py    which of them makes the others     power.py     what would be found, and what
                     slow                                            never could be
    networks.py      NICs of a host, rails, switches    connections.py  pairs and groups, what each
                     inside a host                                      carries, which end is slow
    flaps.py         NICs that are slow now and then    crossings.py  what crosses hosts, by kind
    nvlinks.py       groups at the pace of PCIe
    imbalance.py     heavy stages, uneven sequences
    shares.py        busy experts, longer data: ranks
                     that always have more to do
    everywhere.py    all wait for data, collect or
                     get uneven work, by turns; all
                     links of a kind become slower
    work_done.py     slow devices from more work, by what they count
    tcp.py           what TCP connections between hosts
                     carry while they are busy
    shared_devices.py  on whose device other processes compute
    held_up.py       who waits for a core, or for other threads of its process
    shortages.py     who waits for memory or a disk
    degraded.py      ports and links that read worse
                     than their equals
    low_clocks.py    clocks far below all others;
                     slow stages from heavy ones
    awaited.py       all wait for one rank, and what
                     it does meanwhile
    unexplained.py   the step became longer, nobody
                     says why

Start reading at finding.py, then losses.py. docs/architecture.md says how to add one.
"""
