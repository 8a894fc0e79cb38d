"""Text out of a model: cache, scheduler, sampling, the loop over tensor and pipeline ranks, HTTP.

Owns everything from a prompt's token ids to the answer's token ids. Fed by `training.generate` and
`training.serve`, through a checkpoint and its model chunks; answers go back to whoever asked.

    job.py        from a command line to an engine on every rank: start reading here
    engine.py     the loop on every rank, and what the ranks tell one another
    scheduler.py  which rows a batch holds, what each step computes, in which order tokens stand
    request.py    what a row asks for, and what it is answered
    stage.py      one pipeline stage, run step by step: cache of keys and values, attention to it;
                  modules without what only training needs
    sampling.py   tokens from logits; detokenizing.py text from tokens
    service.py    between a server's event loop and the thread that computes; web/ the endpoints
    scope.py      MegaScope in the server

Nothing is imported here: megatron.core may be imported only when the job has been joined, and the
command line is read before that.
"""
