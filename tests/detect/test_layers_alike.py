"""Layers and passes are compared only where they are of one kind and held up by nothing beside."""

from __future__ import annotations

import numpy as np
import pytest

from detect.observe.operations import FORWARD
from detect.observe.work import Layers, Samples, layers_of, work_of

RANKS_OF_STAGE = 64
"""As TP8 DP8 has: ranks 0 to 63 are the first stage."""


def layers(stage, unlike_stage=None):
    """Two layers a rank; in one stage the second, an expert layer, takes three times as long."""
    row = np.repeat(np.arange(len(stage)), 2)
    number = np.tile([0, 1], len(stage))
    zeros = np.zeros(len(row), dtype=np.int64)
    is_long = (number == 1) & (stage[row] == (-1 if unlike_stage is None else unlike_stage))
    return Layers(
        samples=Samples(row=row, slot=zeros, phase=zeros + FORWARD, chunk=zeros, microbatch=zeros),
        time_ns=np.where(is_long, 3e6, 1e6),
        number=number,
        is_forward=zeros == 0,
        entangled=None,
    )


@pytest.mark.parametrize("num_stages", [1, 4, 64])
def test_layers_of_one_kind_are_compared(num_stages):
    stage = np.repeat(np.arange(num_stages), RANKS_OF_STAGE)
    assert layers_of(layers(stage), stage, (len(stage), 1)) is not None


@pytest.mark.parametrize("unlike_stage", [0, 1, 3])
def test_expert_layers_of_any_stage_are_noticed(unlike_stage):
    stage = np.repeat(np.arange(4), RANKS_OF_STAGE)
    assert layers_of(layers(stage, unlike_stage), stage, (len(stage), 1)) is None


@pytest.mark.parametrize(("microbatches", "known"), [(2, 3), (1, 2)])
def test_passes_that_are_held_up_are_left_out_where_the_phase_has_others(microbatches, known):
    """Gradients are reduced beside the last backward pass: of two, or of the only one."""
    phase, microbatch = np.divmod(np.arange(2 * microbatches), microbatches)
    zeros = np.zeros(len(phase), dtype=np.int64)
    samples = Samples(row=zeros, slot=zeros, phase=phase, chunk=zeros, microbatch=microbatch)
    held_up = np.arange(len(phase)) == len(phase) - 1
    work = work_of(samples, np.full(len(phase), 1e6), (1, 1), held_up)
    assert np.isfinite(work.log_ns).sum() == known
    assert np.isfinite(work_of(samples, np.full(len(phase), 1e6), (1, 1)).log_ns).all()
