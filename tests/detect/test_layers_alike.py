"""Layers are compared only where those of a rank are of one kind, in whatever stage they are."""

from __future__ import annotations

import numpy as np
import pytest

from detect.observe.observations import FORWARD
from detect.observe.work import Layers, Samples, layers_of

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
