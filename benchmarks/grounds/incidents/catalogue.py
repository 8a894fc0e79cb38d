"""List the families of cases: what went wrong, or only looks like it, and in which jobs.

What is planted, and how large, follows published incidents: thermal throttling, power brakes, link
flaps and slow storage (Llama 3 report, 2024; Kokolis et al., Revisiting Reliability, 2024),
computing and link fail-slows and their lengths (FALCON, Wu et al. 2024; Greyhound, 2025), garbage
collection, stages and sequences as the job's own stragglers (Lin et al., Understanding Stragglers
in Large Model Training Using What-if Analysis, 2025), hosts and CPUs (MegaScale, Jiang et al.
2024), congestion between jobs and rails (C4, Dong et al. 2024; Alibaba HPN, 2024), slow nodes found
by benchmarks (SuperBench, Xiong et al. 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

import numpy as np

from benchmarks.grounds.ground import Case
from benchmarks.grounds.incidents import causes, likenesses
from benchmarks.grounds.incidents.draws import Rng, Wants, draw_job
from benchmarks.grounds.incidents.jobs import Job
from benchmarks.grounds.incidents.troubles import Trouble

GROUND = "incidents"

Plan = tuple[Job, tuple[Trouble, ...]]
Planner = Callable[[Job, Rng], Plan]


@dataclass(frozen=True)
class Recipe:
    """One family: how many cases of a draw, in what jobs, and what is done to them."""

    family: str
    count: int
    wants: Wants
    plan: Planner


def _with(*planters: Callable[[Job, Rng], Trouble]) -> Planner:
    """Return a planner that plants all of these."""

    def plan(job: Job, rng: Rng) -> Plan:
        return job, tuple(planter(job, rng) for planter in planters)

    return plan


def _sound(change: Callable[[Job, Rng], Job]) -> Planner:
    """Return a planner that changes the job and plants nothing."""

    def plan(job: Job, rng: Rng) -> Plan:
        return change(job, rng), ()

    return plan


def _timed(
    planter: Callable[[Job, Rng], Trouble], change: Callable[[Trouble, Job, Rng], Trouble]
) -> Planner:
    """Return a planner whose trouble does not hold all the time."""

    def plan(job: Job, rng: Rng) -> Plan:
        return job, (change(planter(job, rng), job, rng),)

    return plan


_ANY = Wants()
_LONG = Wants(least_iterations=6)
_MEGATRON = Wants(forms=("megatron",))
_HOSTS = Wants(hosts=2)
_NICS = Wants(hosts=2, network=True)
_FAULTS = (
    Recipe("gpu_clock", 8, _ANY, _with(causes.thermal)),
    Recipe("power_cap", 5, _ANY, _with(causes.power_cap)),
    Recipe("power_brake", 5, _HOSTS, _with(causes.power_brake)),
    Recipe("memory_stack", 6, _ANY, _with(causes.memory_stack)),
    Recipe("ecc_pauses", 4, _LONG, _with(causes.ecc_pauses)),
    Recipe("pcie", 4, _NICS, _with(causes.pcie)),
    Recipe(
        "nvlink",
        6,
        Wants(forms=("megatron", "profile"), tensor=True, replicas=2),
        _with(causes.nvlink),
    ),
    Recipe("nvswitch", 3, Wants(hosts=2, tensor=True, forms=("megatron",)), _with(causes.nvswitch)),
    Recipe("nic", 8, Wants(hosts=4, network=True), _with(causes.nic)),
    Recipe(
        "link_flap", 4, Wants(hosts=4, network=True, least_iterations=6), _with(causes.flapping)
    ),
    Recipe("rail", 4, Wants(hosts=4, network=True), _with(causes.wrong_rail)),
    Recipe(
        "pfc_storm", 3, Wants(hosts=4, network=True, least_iterations=4), _with(causes.pfc_storm)
    ),
    Recipe("noisy_neighbour", 6, _ANY, _with(causes.neighbour)),
    Recipe("numa", 4, _ANY, _with(causes.misbound)),
    Recipe("cpu_quota", 4, _HOSTS, _with(causes.quota)),
    Recipe("agent", 3, _LONG, _with(causes.agent)),
    Recipe("memory_pressure", 3, _HOSTS, _with(causes.memory_pressure)),
    Recipe("slow_storage", 4, _HOSTS, _with(causes.storage)),
    Recipe("dead_workers", 4, _ANY, _with(causes.dead_workers)),
    Recipe("gc", 5, _LONG, _with(causes.collector)),
    Recipe("logging", 4, _LONG, _with(causes.logging)),
    Recipe("async_checkpoint", 3, _HOSTS, _with(causes.checkpoint)),
    Recipe("begins", 7, _LONG, _timed(causes.any_computing, causes.begins)),
    Recipe("ends", 4, _LONG, _timed(causes.any_computing, causes.ends)),
    Recipe("bursts", 6, _LONG, _timed(causes.any_computing, causes.bursts)),
    Recipe("two_troubles", 7, _HOSTS, causes.two),
    Recipe("no_effect", 6, _HOSTS, causes.hidden),
)
_SOUND = (
    Recipe("healthy", 26, _ANY, _sound(lambda job, _: job)),
    Recipe("healthy: several hosts", 6, Wants(hosts=4, network=True), _sound(lambda job, _: job)),
    Recipe("healthy: restarted", 3, _HOSTS, _sound(likenesses.restarted)),
    Recipe("healthy: files missing", 4, _ANY, _sound(likenesses.incomplete)),
    Recipe("look_alike: jitter", 6, _ANY, _sound(likenesses.jitter)),
    Recipe("look_alike: congestion", 5, _NICS, _sound(likenesses.congestion)),
    Recipe("look_alike: stalls of NCCL", 4, _HOSTS, _sound(likenesses.stalls)),
    Recipe("look_alike: clocks wander", 5, _HOSTS, _sound(likenesses.clocks)),
    Recipe("look_alike: chips differ", 6, _ANY, _sound(likenesses.chips)),
    Recipe("look_alike: compilation", 3, _ANY, _sound(likenesses.compilation)),
    Recipe("look_alike: evaluation", 4, _MEGATRON, _sound(likenesses.evaluation)),
    Recipe("look_alike: ramp", 4, Wants(least_iterations=4), _sound(likenesses.ramp)),
    Recipe("look_alike: everybody slower", 5, _LONG, _sound(likenesses.everybody)),
    Recipe("look_alike: slow hosts all over", 4, _ANY, _sound(likenesses.launch_bound)),
    Recipe(
        "look_alike: uneven layers",
        5,
        Wants(forms=("megatron",), pipeline=True),
        _sound(likenesses.uneven),
    ),
    Recipe(
        "look_alike: first stage encodes",
        4,
        Wants(forms=("megatron",), pipeline=True),
        _sound(likenesses.encoder),
    ),
    Recipe(
        "look_alike: last stage",
        4,
        Wants(forms=("megatron",), pipeline=True),
        _sound(likenesses.last_stage),
    ),
    Recipe("look_alike: distillation", 3, _MEGATRON, _sound(likenesses.distillation)),
    Recipe("look_alike: packed sequences", 6, Wants(replicas=2), _sound(likenesses.packed)),
    Recipe(
        "look_alike: routing drifts",
        5,
        Wants(forms=("megatron", "profile"), experts=True),
        _sound(likenesses.routing),
    ),
    Recipe(
        "look_alike: heavy stage",
        5,
        Wants(forms=("megatron",), pipeline=True),
        _with(likenesses.heavy_stage),
    ),
    Recipe("look_alike: long sequences", 6, Wants(replicas=2), likenesses.long_sequences),
    Recipe(
        "look_alike: hot expert",
        5,
        Wants(forms=("megatron", "profile"), experts=True),
        likenesses.hot_expert,
    ),
    Recipe("look_alike: shared storage", 4, _ANY, _with(likenesses.shared_storage)),
    Recipe("look_alike: mixed chips", 3, Wants(hosts=2), likenesses.mixed_chips),
)
RECIPES: Sequence[Recipe] = (*_FAULTS, *_SOUND)


@lru_cache(maxsize=4)
def plans(draw: int) -> dict[str, tuple[Case, Plan]]:
    """Return all cases of a draw by name, with the jobs and troubles that they stand for."""
    found = {}
    for recipe in RECIPES:
        for number in range(recipe.count):
            stem = f"{recipe.family}-{number}".replace(": ", "-").replace(" ", "_")
            seed = crc32(f"{GROUND}/{stem}/{draw}".encode())
            rng = np.random.default_rng(seed)
            job, troubles = recipe.plan(draw_job(rng, recipe.wants, seed), rng)
            troubles = tuple(replace(one, seed=seed + place) for place, one in enumerate(troubles))
            case = Case(
                ground=GROUND,
                name=f"{stem}-{seed:08x}",
                family=recipe.family,
                num_ranks=job.num_ranks,
                seed=seed,
                draw=draw,
                planted=tuple(one.planted for one in troubles),
            )
            found[case.name] = case, (job, troubles)
    return found
