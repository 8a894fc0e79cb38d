"""Own time of passes that wait for their TP group inside their compute spans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from detect.observe.observations import BACKWARD
from detect.observe.work import Entanglement, entangled_by, own_times

PASSES = 5


@dataclass(frozen=True)
class Spans:
    """Per rank and pass: pass, module, overlapped collective, in tenths of ns."""

    row: np.ndarray
    slot: np.ndarray
    start: np.ndarray
    duration: np.ndarray
    counts: np.ndarray
    shape: tuple[int, int]


def own_ratios(ranks):
    """`ranks` is (lead, collective, rest after it) each; own times over those of the last rank."""
    rows, starts, lengths, kinds = [], [], [], []
    for row, (lead, collective, rest) in enumerate(ranks):
        for number in range(PASSES):
            begin = number * 10_000
            for kind, start, length in (
                ("pass", begin, lead + collective + rest),
                ("module", begin + 1, lead + collective + rest - 2),
                ("collective", begin + lead, collective),
            ):
                rows.append(row)
                starts.append(start)
                lengths.append(length)
                kinds.append(kind)
    kind = np.array(kinds)
    length = (np.array(lengths) * 10).astype(np.int64)
    start = (np.array(starts) * 10).astype(np.int64)
    spans = Spans(
        np.array(rows), np.zeros(len(rows), dtype=np.int64), start, length,
        np.ones(len(rows), dtype=bool), (len(ranks), 1),
    )  # fmt: skip
    marks = Entanglement(
        passes=kind == "pass",
        modules=kind == "module",
        module_kind=np.zeros(len(ranks) * PASSES, dtype=np.int64),
        kinds=("module",),
        overlapped=kind == "collective",
    )
    phase = np.full(len(ranks) * PASSES, BACKWARD)
    time_ns = length[kind == "pass"].astype(np.float64)
    found = own_times(entangled_by(spans, marks), phase, time_ns)
    assert found.phases == (BACKWARD,)
    by_rank = found.time_ns.reshape(len(ranks), PASSES).mean(axis=1)
    return by_rank / by_rank[-1]


def test_the_partner_of_a_slow_rank_only_waits():
    """Slow after the launch: the partner's pass is as long, but waits in its collective."""
    slow, partner, sound = (100, 5, 155), (100, 60, 100), (100, 5, 100)
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(
        [260 / 205, 1, 1, 1], abs=0.01
    )


def test_weight_gradients_hidden_in_the_wait_do_not_make_a_rank_fast():
    """Everything slower by half; the partner computes weight gradients while it waits."""
    slow, partner, sound = (150, 5, 150), (100, 150, 55), (100, 5, 100)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


def test_a_lead_gathered_over_many_modules_is_not_speed():
    """Half a per cent faster, but early by a tenth of the module: its span is its own time."""
    behind, ahead = (100.5, 20, 85), (100, 40, 64.5)
    found = own_ratios([ahead, behind, (100, 20, 84.5), (100, 20, 84.5)])
    assert found == pytest.approx([1, 205.5 / 204.5, 1, 1], abs=0.002)


@pytest.mark.parametrize("factor", [1.03, 1.2, 1.5, 2.0])
def test_a_transfer_that_outlasts_the_weight_gradients_hides_no_slowness(factor):
    """Nobody's weight gradients (35) reach beyond the transfer (90): only leads differ."""
    lead = 100 * factor
    slow, partner, sound = (lead, 90, 0), (100, lead - 100 + 90, 0), (100, 90, 0)
    expected = [factor, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.002)


def test_a_slow_rank_whose_weight_gradients_outlast_the_transfer_is_not_exaggerated():
    """Half slower: its weight gradients (60, slow 90) are now what its pass ends with."""
    slow, partner, sound = (150, 65, 25), (100, 115, 0), (100, 65, 0)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.002)


def test_two_slow_ranks_of_four_do_not_set_the_measure():
    found = own_ratios([(120, 90, 0), (100, 110, 0), (110, 90, 0), (100, 100, 0)])
    assert found == pytest.approx([1.2, 1, 1.1, 1], abs=0.002)


def test_a_tensor_group_without_an_equal_shows_its_slow_rank():
    assert own_ratios([(130, 90, 0), (100, 120, 0)]) == pytest.approx([1.3, 1], abs=0.002)
    lead, waits = 130, (100, 35, 30)  # here weight gradients (35) outlast the transfer (5)
    found = own_ratios([(lead, 5, 40.5), *[waits] * 7])
    assert found == pytest.approx([1.3, *[1] * 7], abs=0.002)
