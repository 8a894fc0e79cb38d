"""Draw what the data decide: how long documents are, and which experts the tokens go to.

Attention over packed documents of lengths d in a sequence of S tokens costs sum(d^2) / S^2 of what
it costs over one document. Where the loader balances, replicas differ by a few per cent only.

    S = 8,192, documents of 6,000, 1,500 and 692:   0.536 + 0.034 + 0.007 = 0.58

The load of a rank's experts is the sum of their shares of the tokens; shares are log-normal and go
their own ways from iteration to iteration (AR(1)).
"""

from __future__ import annotations

import numpy as np

from benchmarks.grounds.pod.job import Data, Floats, Job

_MOST_DOCUMENTS = 400


class Load:
    """Tell the work of each microbatch of an iteration."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rng = np.random.default_rng([job.seed, 19])
        num_layers = sum(map(sum, job.model.layers)) + 1
        self._hidden = self._rng.standard_normal((num_layers, max(job.model.num_experts, 1)))
        self.lengths = np.ones((0, 0))
        self.tokens = 1.0
        self._place = np.arange(job.stage_size)

    def begin(self, iteration: int) -> None:
        """Draw the data of an iteration."""
        job = self._job
        shape = (job.trainer.num_microbatches, job.layout.dp)
        self.lengths = np.ones(shape)
        if job.data.packed:
            ratios = np.array([_squares(job.data, self._rng) for _ in range(shape[0] * shape[1])])
            if job.data.balanced:
                ratios = ratios.mean() * (1 + 0.25 * (ratios / ratios.mean() - 1) * 0.3)
            self.lengths = ratios.reshape(shape)
        first, last = job.tracing.iterations[0], job.tracing.iterations[-1]
        part = (iteration - first) / max(last - first, 1)
        self.tokens = 1 + (job.data.curriculum_ratio - 1) * part
        memory = job.disorder.router_memory
        fresh = self._rng.standard_normal(self._hidden.shape)
        self._hidden = memory * self._hidden + np.sqrt(1 - memory**2) * fresh

    def quadratic(self, microbatch: int) -> Floats:
        """Return what the core of attention costs, over one document's cost, (place,)."""
        layout = self._job.layout
        each = self.lengths[microbatch] * self.tokens**2
        return np.repeat(each, layout.tp * layout.cp)

    def experts(self, layer: int) -> Floats:
        """Return the tokens for each rank's experts over the mean, (place,)."""
        job = self._job
        shares = np.exp(job.disorder.router_sigma * self._hidden[min(layer, len(self._hidden)) - 1])
        by_rank = shares.reshape(job.layout.ep, -1).sum(axis=1)
        return np.asarray((by_rank / by_rank.mean())[self._place % job.layout.ep])


def _squares(data: Data, rng: np.random.Generator) -> float:
    """Return the sum of squares of documents that fill a sequence, over the square of the whole."""
    drawn = rng.lognormal(np.log(data.median_length), data.tail_sigma, _MOST_DOCUMENTS)
    ends = np.minimum(np.cumsum(drawn), data.sequence)
    lengths = np.diff(ends, prepend=0.0)
    return float((lengths**2).sum() / data.sequence**2)
