"""Say who is slow while the job still runs.

Owns everything between growing rank files and the places where operators listen. Composes the
core, `aggregate` and `detect`: the verdict comes from `detect`, unchanged.

    watcher.py      one look after the other: read, judge, keep account, report, and what survives a
                    restart; start here
    windows.py      growing files of all ranks, joined into the windows of the job
    ring.py         the last windows, the detector's verdict on them, and whether it may wait
    accounts.py     the life of a finding: raised, holding, cleared; what it has cost
    hang.py         a window that does not come, and where all ranks stand
    delivery.py     events in the format of each receiver, delivered at least once
    metrics.py      metrics for Prometheus, and the server that it asks
    policy.py       what an operator's rules would drain
    history.py      findings of many jobs by host and device
    screen.py       the terminal view
"""
