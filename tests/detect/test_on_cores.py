"""Two ranks on the cores of one machine: what tells of a rank there, and what of its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from detect import Cause, Owner, Verdict
from detect.causes.hits import lost_share
from detect.detector import judge, steady
from detect.observe.extract import observe
from detect.stats.noise import Usual, estimate_noise
from detect.thresholds.adjustable import DetectorSettings
from megascan.topology import Layout

NUM = 12
TWO = Layout(dp=2)


def named(report):
    return [(one.ranks, one.cause) for one in report.findings if one.owner is Owner.NODE]


def since(first, time_ms):
    """Return an effect: rank 1 pauses for `time_ms` from iteration `first` on."""
    return lambda slot: time_ms if slot.rank == 1 and slot.iteration >= first else 0.0


def test_of_two_who_pauses_as_long_each_time_since_some_iteration_is_named(job):
    late = job(layout=TWO, device="cpu", iterations=NUM, gap_ms=since(9, 150.0))
    (finding,) = late.report().findings
    assert (finding.ranks, finding.cause, finding.owner) == ((1,), Cause.HOST, Owner.NODE)
    assert finding.first_iteration == 9


@pytest.mark.parametrize(
    "stolen_ms", [[0, 0, 0, 300, 0, 0], [0] * 6 + [150, 110, 190, 140, 170, 90]]
)
def test_what_other_processes_take_of_a_core_is_no_pause_and_no_step(job, stolen_ms):
    """It comes in bursts, and varies from one iteration to the next."""
    seen = observe(job(layout=TWO, device="cpu", iterations=NUM).timeline())
    assert not named(stolen_report(seen, stolen_ms))


def test_a_step_to_another_level_is_no_burst():
    noise = np.random.default_rng(1).normal(0.0, 0.004, NUM)
    step = np.where(np.arange(NUM) >= 5, 0.5, 0.0) + noise
    bursts = np.where(np.arange(NUM) % 4 == 1, 0.5, 0.0) + noise
    usual = Usual(floor=0.0002, spread=0.003, bursty=True)
    nobody = np.zeros(2, dtype=bool)
    of_step = estimate_noise(np.array([step, -step]), nobody, usual)
    of_bursts = estimate_noise(np.array([bursts, -bursts]), nobody, usual)
    assert of_step.sigma.max() < 0.01
    assert of_bursts.sigma.min() > 0.2


@pytest.mark.parametrize(
    ("first", "ranks_a_host", "is_named"), [(0, 2, True), (8, 2, False), (8, 1, True)]
)
def test_a_core_of_one_machine_that_is_slow_for_a_while_has_no_name(
    job, slow, first, ranks_a_host, is_named
):
    slower = job(
        layout=TWO, device="cpu", iterations=NUM, noise=0.01, work=slow(1, 1.4, first),
        hosts=ranks_a_host,
    ).report()  # fmt: skip
    assert bool(named(slower)) == is_named
    (finding,) = (one for one in slower.findings if one.ranks == (1,))
    assert any("from second to second" in one for one in finding.evidence) != is_named


@pytest.mark.parametrize(("ranks_a_host", "is_named"), [(4, False), (1, True)])
def test_a_core_of_one_machine_that_is_quick_once_is_not_slow_for_good(job, ranks_a_host, is_named):
    """Recorded: 1.28 times slower in five of six iterations, and 0.78 in one."""

    def work(slot):
        return (0.78 if slot.iteration == 7 else 1.25) if slot.rank == 1 else 1.0

    report = job(
        layout=Layout(dp=4), device="cpu", iterations=NUM, noise=0.01, work=work,
        hosts=ranks_a_host,
    ).report()  # fmt: skip
    assert bool(named(report)) == is_named


@pytest.mark.parametrize(("factor", "is_named"), [(1.5, False), (2.0, True)])
def test_a_lone_stage_on_cores_that_was_quick_before_has_a_name_by_far_only(
    job, slow, factor, is_named
):
    """Recorded: 1.6 times slower in six of eight iterations, and as quick as other stages since."""
    report = job(
        layout=Layout(pp=4), layers=2, device="cpu", iterations=NUM, work=slow(1, factor, 8),
        hosts=1,
    ).report()  # fmt: skip
    assert bool(named(report)) == is_named


@pytest.mark.parametrize("kind", ["loading_ms", "gap_ms"])
def test_two_long_pauses_are_pointed_at_and_not_named(job, kind):
    def late(slot):
        return 300.0 if slot.rank == 1 and slot.iteration in (6, 11) and not slot.microbatch else 0

    report = job(layout=TWO, device="cpu", iterations=NUM, **{kind: late}).report()
    (finding,) = report.findings
    assert (finding.ranks, finding.owner) == ((1,), Owner.UNDECIDED)
    assert finding.cause == (Cause.LOADER if kind == "loading_ms" else Cause.HOST)


def stolen_report(seen, stolen_ms):
    """Judge a job of which other processes take the core of rank 1 for so long each iteration,
    while rank 0 waits for it.
    """
    settings = DetectorSettings()
    seen = steady(seen, settings)
    stolen_ns = np.zeros_like(seen.stolen_ns)
    stolen_ns[1] = np.resize(stolen_ms, stolen_ns.shape[1]) * 1e6
    waiting_ns = np.zeros_like(stolen_ns)
    waiting_ns[0] = stolen_ns[1]
    return judge(
        replace(
            seen,
            stolen_ns=stolen_ns,
            waiting_ns=waiting_ns,
            iteration_ns=seen.iteration_ns + stolen_ns[1],
            lost_ns=seen.lost_ns | {Cause.HOST: seen.lost(Cause.HOST) + stolen_ns},
        ),
        settings,
    )


def test_what_is_stolen_of_a_core_counts_as_no_pause(job):
    """A profile's gaps hold it, so they tell nothing; its loading does."""
    made = job(layout=TWO, device="cpu", iterations=NUM, gap_ms=since(0, 30.0))
    seen = observe(made.but(loading_ms=since(0, 1.0)).timeline())
    stolen_ns = np.full_like(seen.stolen_ns, 20e6)
    busier = replace(
        seen,
        stolen_ns=stolen_ns,
        lost_ns=seen.lost_ns | {Cause.HOST: seen.lost(Cause.HOST) + stolen_ns},
    )
    paused = lost_share(seen, (Cause.HOST,))
    assert paused[1].min() > 0.0 == paused[0].max()
    assert lost_share(busier, (Cause.HOST,)) == pytest.approx(paused)
    profile = replace(busier, tells_passes=False)
    assert not lost_share(profile, (Cause.HOST,)).any()
    loading = lost_share(profile, (Cause.LOADER,))
    assert loading[1].min() > 0.0
    assert lost_share(profile, (Cause.LOADER, Cause.HOST)) == pytest.approx(loading)


def test_a_step_that_is_far_longer_since_some_iteration_is_not_healthy(job):
    def all_slower(slot):
        return 1.6 if slot.iteration >= 9 else 1.0

    longer = job(layout=Layout(dp=4), device="cpu", iterations=NUM, noise=0.01)
    assert longer.report().verdict is Verdict.HEALTHY
    report = longer.but(work=all_slower).report()
    assert report.verdict is Verdict.UNDECIDED
    assert any("since iteration 9 the step takes 1.6" in one for one in report.notes)


@pytest.mark.parametrize(("factor", "ranks"), [(1.08, []), (1.12, [(3,)])])
def test_cold_caches_on_cpus_are_not_worth_a_word(job, factor, ranks):
    """Passes of one rank take a little longer, its optimizer step does not."""

    def work(slot):
        return factor if slot.rank == 3 and slot.name != "optimizer" else 1.0

    report = job(layout=Layout(dp=8), work=work, device="cpu", noise=0.01).report()
    assert [one.ranks for one in report.findings] == ranks
