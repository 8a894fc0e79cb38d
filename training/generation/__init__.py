"""Text out of a model: cache, scheduler, sampling, the loop over tensor and pipeline ranks, HTTP.

Owns everything between a prompt's token ids and the answer's. Fed by `training.generate` and
`training.serve`, through a checkpoint and its model chunks; its answers go back to whoever asked.

    job.py        from a command line to an engine on every rank: start reading here
    engine.py     the loop on every rank, and what the ranks tell one another
    scheduler.py  which rows a batch holds, what each step computes, where its tokens stand
    request.py    what a row asks for
    stage.py      one pipeline stage, run step by step: keys, values, attention to them; modules
                  without what only training needs
    sampling.py   tokens from logits; detokenizing.py text from tokens
    service.py    between a server's event loop and the thread that computes; web/ the endpoints
    scope.py      MegaScope in the server

Nothing is imported here: megatron.core may be imported only when the job has been joined, and the
command line is read before that.
"""
