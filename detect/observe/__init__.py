"""Timeline to observations: what each span counts as, and what can be measured of it.

Fed by `megascan.timeline` (aligned, matched spans); feeds `detect.causes` and
`detect.stats` with matrices by (rank, iteration).

    observations.py  the result: a window as one record of all that was measured
    axes.py          fields that declare their axes, and cutting along one
    members.py       the ranks: their place in the layout, their hosts and devices
    groups.py        one row for a TP group whose members cannot be told apart
    operations.py    times of passes, layers, modules, by operation
    machines.py      what devices, ports and connections count themselves
    warmup.py        which iterations count
    extract.py       timeline to observations        facts.py      what the spans of one rank tell
    spans.py         what lies in which span, gaps   work.py       passes, layers
    kernels.py       work from a profile's kernels   transfers.py  communication by edge, group
    stalls.py        devices that stand still        launches.py   how hosts launch, and pause
    modules.py       modules in a row that are slow

Start reading at observations.py, then extract.py.
"""
