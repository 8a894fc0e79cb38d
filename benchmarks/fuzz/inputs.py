"""Input number i of a campaign: which sample, and what became of it.

The first inputs are cuts: a rank's file at every byte, a timeline at every eighth; those after them
are damaged by chance. An input depends on its number and the seed alone, so any of them can be made
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.fuzz.damage import damaged
from benchmarks.fuzz.samples import Sample

_TIMELINE_STEP = 8


@dataclass(frozen=True)
class Inputs:
    """All inputs of a campaign."""

    samples: Sequence[Sample]
    seed: int

    @property
    def num_cuts(self) -> int:
        """How many inputs are cuts."""
        return sum(map(_num_cuts, self.samples))

    def __getitem__(self, number: int) -> tuple[Sample, bytes]:
        """The sample and its damaged content."""
        place = number
        for sample in self.samples:
            if place < _num_cuts(sample):
                return sample, sample.content[: place * _cut_step(sample)]
            place -= _num_cuts(sample)
        random = Random(f"{self.seed}:{number}")
        sample = random.choice(self.samples)
        return sample, damaged(sample.content, sample.file_name.endswith(".gz"), random)


def _num_cuts(sample: Sample) -> int:
    return -(-len(sample.content) // _cut_step(sample))


def _cut_step(sample: Sample) -> int:
    return 1 if sample.is_trace else _TIMELINE_STEP
