"""What happens to the NICs of a job's hosts, for `benchmarks.wires`, and who may be named for it.

A trouble is made outside the job's processes, by the rates of NICs, and stays for all of a case
unless it comes and goes. The longer data of a replica alone are the ranks' own doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.hogs import alongside
from benchmarks.trainer_faults import HEALTHY, LONG
from benchmarks.wire_hosts import Host, Network

HALF, THIRD, QUARTER = 1 / 2, 1 / 3, 1 / 4
SLOW_S, PERIOD_S = 1.0, 4.0
"""A NIC that is slow now and then is so for so long, again after so long."""
LOOK_S = 0.05
"""Between two looks at how far a job is."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a trouble acts, and how much."""

    network: Network
    host: Host
    peer: Host
    """Another host, for what concerns a connection."""
    ratio: float
    """Of the full rate, what is left."""
    is_halfway: Callable[[], bool]
    """Tell whether half of the iterations are over."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """Something that happens to hosts; without causes it is nobody's fault."""

    name: str
    acting: Callable[[Site], AbstractContextManager[None]]
    causes: tuple[str, ...] = ("link",)
    ratios: tuple[float, ...] = (HALF,)
    """One of which a case draws."""
    is_between_two: bool = False
    """At fault are a connection's two hosts: either may be named."""
    of_ranks: str = HEALTHY.name
    """What the ranks do themselves, by the names of `trainer_faults`."""


@contextmanager
def _nothing(_: Site) -> Iterator[None]:
    yield


@contextmanager
def _slow_both_ways(site: Site) -> Iterator[None]:
    site.network.shape(site.host, egress_ratio=site.ratio, ingress_ratio=site.ratio)
    yield


@contextmanager
def _slow_egress(site: Site) -> Iterator[None]:
    site.network.shape(site.host, egress_ratio=site.ratio)
    yield


@contextmanager
def _slow_ingress(site: Site) -> Iterator[None]:
    site.network.shape(site.host, ingress_ratio=site.ratio)
    yield


@contextmanager
def _all_slow(site: Site) -> Iterator[None]:
    for host in site.network.hosts:
        site.network.shape(host, egress_ratio=site.ratio, ingress_ratio=site.ratio)
    yield


@contextmanager
def _slow_connection(site: Site) -> Iterator[None]:
    site.network.slow_connection(site.host, site.peer, site.ratio)
    yield
    site.network.restore_connection(site.host, site.peer)


@contextmanager
def _foreign_traffic(site: Site) -> Iterator[None]:
    with site.network.foreign_traffic(site.host, site.ratio):
        yield


def _slow_now_and_then(site: Site) -> AbstractContextManager[None]:
    def change(ended: threading.Event) -> None:
        while not ended.wait(PERIOD_S - SLOW_S):
            site.network.shape(site.host, egress_ratio=site.ratio, ingress_ratio=site.ratio)
            ended.wait(SLOW_S)
            site.network.shape(site.host)

    return alongside(change)


def _slow_from_the_middle_on(site: Site) -> AbstractContextManager[None]:
    def change(ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            if site.is_halfway():
                site.network.shape(site.host, egress_ratio=site.ratio, ingress_ratio=site.ratio)
                return

    return alongside(change)


NOTHING = Trouble(name=HEALTHY.name, acting=_nothing, causes=())
FAULTS = (
    Trouble(name="NIC at half", acting=_slow_both_ways),
    Trouble(name="egress slow", acting=_slow_egress, ratios=(HALF, THIRD)),
    Trouble(name="now and then", acting=_slow_now_and_then, ratios=(THIRD, QUARTER)),
    Trouble(name="foreign traffic", acting=_foreign_traffic),
    Trouble(name="NIC at a third", acting=_slow_both_ways, ratios=(THIRD,)),
    Trouble(name="ingress slow", acting=_slow_ingress, ratios=(HALF, THIRD)),
    Trouble(name="from the middle on", acting=_slow_from_the_middle_on, ratios=(HALF, THIRD)),
    Trouble(
        name="slow connection",
        acting=_slow_connection,
        ratios=(THIRD, QUARTER),
        is_between_two=True,
    ),
)
"""A job has some neighbours of this list, others at the next seed."""
NOBODYS = (
    Trouble(name="all NICs slow", acting=_all_slow, causes=()),
    Trouble(name="longer data", acting=_nothing, causes=(), of_ranks=LONG.name),
)
TROUBLES = {trouble.name: trouble for trouble in (NOTHING, *FAULTS, *NOBODYS)}
