"""Own time of passes that wait for their TP group inside their compute spans."""

from __future__ import annotations

import numpy as np
import pytest

from detect.observe.operations import BACKWARD
from detect.observe.work import entangled_in, own_times
from megascan.schema import Track
from megascan.timeline import equals

PASSES = 5
_BESIDE = {"kind": "collective", "track": Track.OVERLAPPED, "group": "tp@0"}
COLUMNS = {
    "pass": {"kind": "compute", "name": "backward", "track": Track.COMPUTE},
    "module": {"kind": "compute", "name": "mlp-backward", "track": Track.COMPUTE},
    "blocking": {"kind": "collective", "track": Track.COMMUNICATION, "group": "tp@0"},
    "gather": _BESIDE | {"op": "all_gather"},
    "collective": _BESIDE | {"op": "all_reduce"},
}


@pytest.fixture
def own_ratios(index_of):
    """`ranks` is (lead, collective, rest after it) each, in tens of ns; own times over those of the
    last rank.

    With sequence parallelism also the time for which it stands still before all of that, and the
    gather beside its lead.
    """

    def ratios(ranks):
        spans = []
        for rank, (lead, collective, rest, *more) in enumerate(ranks):
            blocked, gather = more or (0, 0)
            length = blocked + lead + collective + rest
            for begin in range(0, PASSES * 10_000, 10_000):
                spans += [
                    (rank, "pass", begin, length),
                    (rank, "module", begin + 1, length - 2),
                    (rank, "blocking", begin + 1, blocked),
                    (rank, "gather", begin + 1 + blocked, gather),
                    (rank, "collective", begin + blocked + lead, collective),
                ]
        index = index_of([
            {"rank": rank, "start_ns": int(10 * start), "duration_ns": int(10 * length)}
            | COLUMNS[what]
            for rank, what, start, length in spans
            if length
        ])  # fmt: skip
        passes, modules = (equals(index.table, "name", one) for one in ("backward", "mlp-backward"))
        phase = np.full(len(ranks) * PASSES, BACKWARD)
        stood_ns = np.repeat([10.0 * (more or (0, 0))[0] for _, _, _, *more in ranks], PASSES)
        entangled = entangled_in(index, passes, modules)
        found = own_times(entangled, phase, index.duration[passes] - stood_ns)
        assert found.phases == (BACKWARD,)
        by_rank = found.time_ns.reshape(len(ranks), PASSES).mean(axis=1)
        return by_rank / by_rank[-1]

    return ratios


def test_the_partner_of_a_slow_rank_only_waits(own_ratios):
    """Slow after the launch: the partner's pass is as long, but waits in its collective."""
    slow, partner, sound = (100, 5, 155), (100, 60, 100), (100, 5, 100)
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(
        [260 / 205, 1, 1, 1], abs=0.01
    )


def test_weight_gradients_hidden_in_the_wait_do_not_make_a_rank_fast(own_ratios):
    """Everything slower by half; the partner computes weight gradients while it waits."""
    slow, partner, sound = (150, 5, 150), (100, 150, 55), (100, 5, 100)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


def test_a_lead_gathered_over_many_modules_is_not_speed(own_ratios):
    """Half a per cent faster, but early by a tenth of the module: its span is its own time."""
    behind, ahead = (100.5, 20, 85), (100, 40, 64.5)
    found = own_ratios([ahead, behind, (100, 20, 84.5), (100, 20, 84.5)])
    assert found == pytest.approx([1, 205.5 / 204.5, 1, 1], abs=0.002)


@pytest.mark.parametrize("factor", [1.03, 1.2, 1.5, 2.0])
def test_a_transfer_that_outlasts_the_weight_gradients_hides_no_slowness(own_ratios, factor):
    """Nobody's weight gradients (35) reach beyond the transfer (90): only leads differ."""
    lead = 100 * factor
    slow, partner, sound = (lead, 90, 0), (100, lead - 100 + 90, 0), (100, 90, 0)
    expected = [factor, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.002)


def test_a_slow_rank_whose_weight_gradients_outlast_the_transfer_is_not_exaggerated(own_ratios):
    """Half slower: its weight gradients (60, slow 90) are now what its pass ends with."""
    slow, partner, sound = (150, 65, 25), (100, 115, 0), (100, 65, 0)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.002)


def test_two_slow_ranks_of_four_do_not_set_the_measure(own_ratios):
    found = own_ratios([(120, 90, 0), (100, 110, 0), (110, 90, 0), (100, 100, 0)])
    assert found == pytest.approx([1.2, 1, 1.1, 1], abs=0.002)


def test_a_tensor_group_without_an_equal_shows_its_slow_rank(own_ratios):
    assert own_ratios([(130, 90, 0), (100, 120, 0)]) == pytest.approx([1.3, 1], abs=0.002)
    lead, waits = 130, (100, 35, 30)  # here weight gradients (35) outlast the transfer (5)
    found = own_ratios([(lead, 5, 40.5), *[waits] * 7])
    assert found == pytest.approx([1.3, *[1] * 7], abs=0.002)


def test_what_a_module_stands_still_for_is_no_part_of_it(own_ratios):
    """Sequence parallelism: the partner waits in the gather of output gradients, too."""
    slow, partner, sound = (150, 5, 150, 5, 0), (100, 110, 100, 155, 0), (100, 5, 100, 5, 0)
    expected = [1.5, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("factor", [1.05, 1.5])
def test_a_gather_beside_compute_is_no_launch_and_costs_nothing(own_ratios, factor):
    """It begins with the module; what tells a slow rank is when the reduction begins."""
    lead = 100 * factor
    slow, partner = (lead, 90, 0, 5, 10), (100, lead - 100 + 90, 0, 5, 10 + 20 * (factor - 1))
    sound = (100, 90, 0, 5, 10)
    expected = [factor, 1, 1, 1]
    assert own_ratios([slow, partner, sound, sound]) == pytest.approx(expected, abs=0.01)


def test_a_gather_that_was_waited_for_makes_nobody_slow(own_ratios):
    """The partner's reduction could only begin when the gather was over."""
    slow, sound = (300, 5, 300, 5, 10), (100, 5, 100, 5, 10)
    partner = (280, 25, 100, 5, 280)  # of the 280 it computed 100
    first, second, *_ = own_ratios([slow, partner, sound, sound])
    assert first == pytest.approx(3, rel=0.02)
    assert second <= 1.02
