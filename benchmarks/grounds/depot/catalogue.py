"""List the cases of a draw: families, how many of each, and the scenario of every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from benchmarks.grounds.depot import faulty, sound
from benchmarks.grounds.depot.menus import Menu
from benchmarks.grounds.depot.scenarios import Scenario
from benchmarks.grounds.ground import Case

GROUND = "depot"
_FIRST_SEED, _SEEDS_A_DRAW = 16_000_000, 1000

FAMILIES: tuple[tuple[str, int, Callable[[Menu], Scenario]], ...] = (
    ("healthy: equal chips", 6, sound.healthy(0.0)),
    ("healthy: chips 1%", 8, sound.healthy(0.01)),
    ("healthy: chips 2%", 8, sound.healthy(0.02)),
    ("healthy: chips 3%", 8, sound.healthy(0.03)),
    ("healthy: chips 5%", 8, sound.healthy(0.05)),
    ("look_alike: noisy hosts", 8, sound.noisy_hosts),
    ("look_alike: bound by hosts", 8, sound.bound_by_hosts),
    ("look_alike: heavy stage", 8, sound.heavy_stage),
    ("look_alike: unequal layers", 5, sound.unequal_layers),
    ("look_alike: padded lengths", 6, sound.uneven_lengths("padded to the batch")),
    ("look_alike: packed lengths", 6, sound.uneven_lengths("packed")),
    ("look_alike: long replica", 5, sound.long_replica),
    ("look_alike: hot expert", 6, sound.hot_expert),
    ("look_alike: warm-up", 4, sound.warming_up),
    ("look_alike: evaluation", 3, sound.evaluating),
    ("look_alike: checkpoint", 4, sound.saving),
    ("look_alike: collectors", 5, sound.collecting),
    ("look_alike: one collector", 6, sound.one_collector),
    ("look_alike: logging rank", 4, sound.logging_rank),
    ("look_alike: recomputation", 4, sound.recomputing),
    ("look_alike: shared storage", 5, sound.shared_storage),
    ("look_alike: congestion", 6, sound.congested),
    ("look_alike: wandering clocks", 5, sound.wandering_clocks),
    ("gpu_clock", 18, faulty.gpu_clock("always")),
    ("gpu_clock: onset", 9, faulty.gpu_clock("onset")),
    ("gpu_clock: ended", 7, faulty.gpu_clock("ended")),
    ("throttling: bursts", 10, faulty.throttling(whole=False)),
    ("throttling: iterations", 9, faulty.throttling(whole=True)),
    ("hbm", 7, faulty.hbm),
    ("ecc", 6, faulty.ecc),
    ("host_cpu: daemon", 5, faulty.host_cpu("daemon", whole=True)),
    ("host_cpu: cores", 5, faulty.host_cpu("cores", whole=False)),
    ("host_cpu: cgroup", 5, faulty.host_cpu("cgroup", whole=True)),
    ("host_cpu: cgroup of a rank", 3, faulty.host_cpu("cgroup", whole=False)),
    ("host_memory", 5, faulty.host_memory),
    ("loader", 6, faulty.loader(whole=False)),
    ("loader of a host", 5, faulty.loader(whole=True)),
    ("nvlink", 8, faulty.nvlink),
    ("pcie", 6, faulty.pcie),
    ("nic", 8, faulty.nic(whole=False)),
    ("nics of a host", 7, faulty.nic(whole=True)),
    ("rail", 5, faulty.rail),
    ("flapping nic", 6, faulty.flapping),
    ("two faults", 10, faulty.two_faults),
    ("fault beside imbalance", 9, faulty.beside_imbalance),
)


@lru_cache(maxsize=4)
def catalogue(draw: int) -> Mapping[str, tuple[Case, Scenario]]:
    """Return all cases of a draw by their names, each with its scenario."""
    found: dict[str, tuple[Case, Scenario]] = {}
    seed = _FIRST_SEED + draw * _SEEDS_A_DRAW
    for family, number, choose in FAMILIES:
        for count in range(number):
            scenario = choose(Menu(np.random.default_rng(seed)))
            case = _case(family, count, seed, draw, scenario)
            found[case.name] = (case, scenario)
            seed += 1
    return found


def _case(family: str, count: int, seed: int, draw: int, scenario: Scenario) -> Case:
    word = family.replace("look_alike: ", "").replace(":", "").replace(" ", "-").replace("%", "")
    truths = [fault.planted(scenario.job, fault.share) for fault in scenario.faults]
    if scenario.own is not None:
        truths.append(scenario.own)
    return Case(
        ground=GROUND,
        name=f"{word}-{count}-s{seed}",
        family=family,
        num_ranks=scenario.job.num_ranks,
        seed=seed,
        draw=draw,
        planted=tuple(truths),
    )


def scenario_of(case: Case) -> Scenario:
    """Return the scenario of a case."""
    return catalogue(case.draw)[case.name][1]
