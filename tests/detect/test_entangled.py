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
    """`ranks` is (lead, collective, rest after it) each; own times over those of the last rank.

    With sequence parallelism also the time for which it stands still before all of that, and the
    gather beside its lead.
    """
    recorded = []
    for row, (lead, collective, rest, *more) in enumerate(ranks):
        blocked, gather = more or (0, 0)
        length = blocked + lead + collective + rest
        for number in range(PASSES):
            begin = number * 10_000
            recorded += [
                (row, "pass", begin, length),
                (row, "module", begin + 1, length - 2),
                (row, "blocking", begin + 1, blocked),
                (row, "gather", begin + 1 + blocked, gather),
                (row, "collective", begin + blocked + lead, collective),
            ]
    recorded = [one for one in recorded if one[3]]
    rows, kinds, starts, lengths = zip(*recorded, strict=True)
    kind, length = np.array(kinds), (np.array(lengths) * 10).astype(np.int64)
    spans = Spans(
        np.array(rows), np.zeros(len(rows), dtype=np.int64),
        (np.array(starts) * 10).astype(np.int64), length,
        np.ones(len(rows), dtype=bool), (len(ranks), 1),
    )  # fmt: skip
    marks = Entanglement(
        passes=kind == "pass",
        modules=kind == "module",
        module_kind=np.zeros(len(ranks) * PASSES, dtype=np.int64),
        kinds=("module",),
        overlapped=(kind == "collective") | (kind == "gather"),
        reduces=kind == "collective",
        blocking=kind == "blocking",
    )
    phase = np.full(len(ranks) * PASSES, BACKWARD)
    stood_ns = np.repeat([10.0 * (more or (0, 0))[0] for _, _, _, *more in ranks], PASSES)
    found = own_times(entangled_by(spans, marks), phase, length[kind == "pass"] - stood_ns)
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


def test_what_a_module_stands_still_for_is_no_part_of_it():
    """Sequence parallelism: the partner waits in the gather of output gradients, too."""
    slow, partner, sound = (150, 5, 150, 5, 0), (100, 110, 100, 155, 0), (100, 5, 100, 5, 0)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("factor", [1.05, 1.5])
def test_a_gather_beside_compute_is_no_launch_and_costs_nothing(factor):
    """It begins with the module; what tells a slow rank is when the reduction begins."""
    lead = 100 * factor
    slow, partner = (lead, 90, 0, 5, 10), (100, lead - 100 + 90, 0, 5, 10 + 20 * (factor - 1))
    sound = (100, 90, 0, 5, 10)
    expected = [factor, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


def test_a_gather_that_was_waited_for_makes_nobody_slow():
    """The partner's reduction could only begin when the gather was over."""
    slow, sound = (300, 5, 300, 5, 10), (100, 5, 100, 5, 10)
    partner = (280, 25, 100, 5, 280)  # of the 280 it computed 100
    first, second, *_ = own_ratios([slow, partner, sound, sound])
    assert first == pytest.approx(3, rel=0.02)
    assert second <= 1.02
