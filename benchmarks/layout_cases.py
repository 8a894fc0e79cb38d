"""What `benchmarks.layouts` plants: which rank of which layout is made slow, and how."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.axes import LLAMA
from benchmarks.jobs import LAYOUTS, model


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How a rank is made slow, and the cause that a verdict must give."""

    name: str
    cause: str | None = None
    inject: str | None = None
    hog: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model by device, how strong its faults are, and how far the faulty ranks are moved on."""

    models: dict[str, tuple[str, ...]]
    compute_factor: float
    delay_ms: int
    link_factor: float
    host_factor: dict[str, float]
    """A GPU that is given its work early enough does not notice a host of half the speed."""
    shift: int

    def faults(self, device: str) -> list[Fault]:
        """Healthy first, then those of every layout, then those of the first layout only."""
        compute, delay = f"kind=compute,factor={self.compute_factor:g}", f"delay={self.delay_ms}"
        return [
            Fault(name="healthy"),
            Fault(name=f"compute × {self.compute_factor:g}", cause="compute", inject=compute),
            Fault(name="GPU hog", cause="compute", hog="gpu"),
            Fault(name="CPU hog", cause="host", hog="cpu"),
            Fault(name="loader", cause="loader", inject=f"kind=loader,{delay}"),
            Fault(name="gc", cause="gc", inject=f"kind=gc,delay={1.5 * self.delay_ms:g}"),
            Fault(
                name="host", cause="host", inject=f"kind=host,factor={self.host_factor[device]:g}"
            ),
            Fault(
                name=f"link × {self.link_factor:g}",
                cause="link",
                inject=f"kind=link,factor={self.link_factor:g}",
            ),
        ]


NUM_EVERYWHERE = 4
"""Faults of every layout; the others are made in the first only, which has data-parallel peers."""
TRIALS = {
    "first": Trial(
        models={
            "cpu": (
                *model(layers=8, hidden=256, heads=4, sequence=128, micro_batch=2),
                *("--global-batch-size", "32"),
            ),
            "gpu": (
                *model(layers=8, hidden=6144, heads=48, sequence=2048),
                *("--global-batch-size", "8"),
            ),
        },
        compute_factor=1.5,
        delay_ms=100,
        link_factor=3,
        host_factor={"cpu": 2, "gpu": 6},
        shift=0,
    ),
    "second": Trial(
        models={
            "cpu": (
                *model(layers=8, hidden=192, heads=6, sequence=192, micro_batch=2),
                *("--global-batch-size", "32", *LLAMA),
            ),
            "gpu": (
                *model(layers=8, hidden=4096, heads=32, sequence=4096),
                *("--global-batch-size", "8", *LLAMA),
            ),
        },
        compute_factor=1.2,
        delay_ms=60,
        link_factor=2,
        host_factor={"cpu": 2, "gpu": 6},
        shift=1,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout and what is wrong with which rank of it."""

    layout: str
    fault: Fault
    rank: int

    @property
    def name(self) -> str:
        """Shown in the table."""
        where = f", rank {self.rank}" if self.fault.cause else ""
        return f"{self.layout} {self.fault.name}{where}"

    @property
    def file_name(self) -> str:
        """The same for files."""
        return self.name.replace(",", "").replace("× ", "x").replace(" ", "-")


def all_cases(device: str, trial: Trial, num_ranks: int) -> list[Case]:
    """Every layout's cases, with another faulty rank each time."""
    cases = []
    for number, layout in enumerate(LAYOUTS[num_ranks]):
        faults = trial.faults(device)
        for place, fault in enumerate(faults if number == 0 else faults[:NUM_EVERYWHERE]):
            if fault.hog == "gpu" and device == "cpu":
                continue
            rank = (number + place + trial.shift) % num_ranks
            if fault.cause == "loader" and num_ranks > 2:
                rank = (2 + 2 * trial.shift) % num_ranks  # of a TP pair only the first loads data
            cases.append(Case(layout=layout, fault=fault, rank=rank))
    return cases
