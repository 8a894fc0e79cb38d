"""MegaScope: look into a Megatron-Core model while it trains and while it generates.

Owns what is captured, changed and shown of a model's inside, and the probe that finds a rank that
computes wrongly. `training` feeds it through its callback seam (`training/scope.py`,
`training/generation/scope.py`); findings of the probe reach `detect` as files (`megascan.probes`).
Nothing is imported here: the page over a folder of recordings needs no torch. Start with
capture.py.

    capture.py         places that can be looked at, hooks on them while somebody looks
    reductions.py      what may be asked of a tensor; shares of ranks joined
    one_pass.py        two of these reductions on a GPU, each tensor read once
    interventions.py   changes to what is computed, as data
    recorder.py        capturing in a training, as request.py asks, and the files it leaves
    session.py         one prompt after the other through a model that generates
    server.py          the page and its guard
    folder_page.py     answers the page from the files of all ranks, joined to one model
    model_page.py      answers the page from a model that generates
    frames.py          how arrays travel, in files and to the page
    probe.py           checksums of replicas in a training, and of one host's devices before it
"""

__megascan__ = True
