"""The experts' grid of ranks, against megatron.core's own."""

from __future__ import annotations

import itertools

import pytest
from megatron.core.parallel_state import RankGenerator

from megascan.topology import Layout, rank_file_name

LAST_PP = ("tp-cp-ep-dp-pp", "tp-cp-dp-ep-pp", "tp-ep-dp-cp-pp", "ep-tp-cp-dp-pp")
SIZES = list(itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2)))


@pytest.mark.parametrize("order", LAST_PP)
@pytest.mark.parametrize(("etp", "ep"), itertools.product((1, 2, 4), (1, 2, 4, 8)))
def test_expert_groups_are_those_of_megatron(order, etp, ep):
    for tp, cp, dp, pp in SIZES:
        if tp * cp * dp % (etp * ep):
            continue
        layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp, order=order)
        replicas = tp * cp * dp // (etp * ep)
        theirs = RankGenerator(tp=etp, ep=ep, dp=replicas, pp=pp, cp=1, order=order)
        for group in theirs.get_ranks("ep"):
            for place, rank in enumerate(group):
                assert layout.group(rank, "ep") == tuple(group)
                assert layout.coordinates(rank).ep == place


def test_every_rank_has_a_file_of_its_own():
    """Rank 0 sets files aside that no rank of the run has."""
    for etp in (1, 2):
        layout = Layout(tp=2, dp=2, ep=2, etp=etp)
        names = {rank_file_name(layout, layout.coordinates(rank)) for rank in range(4)}
        assert len(names) == 4
    assert rank_file_name(layout, layout.coordinates(1)).endswith("tensor-1-expert-0.json")
