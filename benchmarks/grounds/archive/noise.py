"""Draw what differs without a cause: chips, thermal wander, single operations, bursts.

Every purpose has a generator of its own, so that a job with and without a planted cause has the
same draws.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_TRIES = 200


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of one purpose, the same in every process."""
    return np.random.default_rng([seed, crc32(purpose.encode())])


def gamma(rng: np.random.Generator, cv: float, size: tuple[int, ...]) -> Array:
    """Return gamma noise of mean 1: the sum of many exponential delays, skewed to long times."""
    if cv <= 0:
        return np.ones(size)
    return rng.gamma(1 / cv**2, cv**2, size)


def lognormal(rng: np.random.Generator, cv: float, size: tuple[int, ...]) -> Array:
    """Return log-normal noise of mean 1: products of many influences, as hosts and nets have."""
    sigma = np.sqrt(np.log1p(cv**2))
    return rng.lognormal(-(sigma**2) / 2, sigma, size)


def chips(rng: np.random.Generator, spread: float, num: int) -> Array:
    """Return how much longer each chip takes, a normal law of sd spread / 2, cut at ± spread.

    Chips of one model differ by a few per cent in what power they need for a clock (Sinha et al.,
    "Not All GPUs Are Created Equal", SC 2022).
    """
    return 1 + spread * np.clip(rng.normal(0, 0.5, num), -1, 1)


def wander(rng: np.random.Generator, sd: float, num: int, length: int, memory: float) -> Array:
    """Return `num` stationary Ornstein-Uhlenbeck paths around 0, (num, length).

    `memory` is the correlation of one iteration with the next: heat sinks forget in some ten
    seconds, an iteration takes about one.
    """
    path = np.empty((num, length))
    steps = rng.normal(0, sd, (num, length))
    path[:, 0] = steps[:, 0]
    for at in range(1, length):
        path[:, at] = memory * path[:, at - 1] + np.sqrt(1 - memory**2) * steps[:, at]
    return path


def bursts(rng: np.random.Generator, share: float, mean_length: float, length: int) -> Array:
    """Return a random telegraph signal of 0 and 1 that is 1 for `share` of the time.

    A power or heat limit holds for `mean_length` slots and is then left; both stays are
    geometric. Signals are drawn until one has its share within a fifth of it, too.
    """
    leave, enter = 1 / mean_length, share / (1 - share) / mean_length
    signal = np.empty(length)
    for _ in range(MOST_TRIES):
        state = rng.random() < share
        for at, draw in enumerate(rng.random(length)):
            state = draw >= leave if state else draw < enter
            signal[at] = state
        if abs(signal.mean() - share) <= share / 5:
            break
    return signal
