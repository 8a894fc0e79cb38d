"""Timeline to observations: what each span counts as, and what can be measured of it.

Fed by `megascan.timeline` (aligned, matched spans); feeds `detect.causes` and
`detect.stats` with matrices by (rank, iteration).

    observations.py  the result: records whose fields declare their axes; warm-up left out;
                     hosts, clock, power
    extract.py       timeline to observations        facts.py      what the spans of one rank tell
    spans.py         what lies in which span, gaps   work.py       passes, layers
    kernels.py       work from a profile's kernels   transfers.py  communication by edge, group
    stalls.py        devices that stand still        launches.py   how hosts launch
    modules.py       modules in a row that are slow

Start reading at observations.py, then extract.py.
"""
