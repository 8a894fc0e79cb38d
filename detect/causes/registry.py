"""The causes that are searched, in the order of search and of the report's power line.

The first search finds who computes slowly and hands that to the others, because a rank that waits
for a slow rank is not at fault. docs/architecture.md says how to add a cause, step by step.

What only a few inputs show, a profile's kernels or probes, is declared here; the file that searches
it is loaded where there is such an input.
"""

from __future__ import annotations

from detect.causes import (
    bursts,
    compute,
    everywhere,
    hosts,
    imbalance,
    links,
    losses,
    networks,
    optimizer,
    paused_hosts,
    unexplained,
)
from detect.causes.finding import Answer, CauseSpec, Inquiry
from detect.report import Cause


def _search_memory(inquiry: Inquiry) -> Answer:
    """Search slow device memory in a profile of GPUs: only there kernels tell what bounds them."""
    if inquiry.seen.boundness is None:
        return Answer()
    from detect.causes.memory import search_memory

    return search_memory(inquiry)


def _search_spells(inquiry: Inquiry) -> Answer:
    """Search devices that are slow in few iterations of a profile, kernel by kernel."""
    if inquiry.seen.history is None:
        return Answer()
    from detect.causes.spells import search_spells

    return search_spells(inquiry)


def _search_corruption(inquiry: Inquiry) -> Answer:
    """Judge the probes that were stored with the trace, if there are any."""
    if inquiry.seen.probes is None:
        return Answer()
    from detect.causes.corruption import findings_of

    findings, notes = findings_of(inquiry.seen.probes)
    return Answer(findings=findings, notes=notes)


SLOW_MEMORY = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search_memory,
    tests_rows=lambda seen: seen.boundness is not None,
)
SPELLS_OF_DEVICES = CauseSpec(
    cause=Cause.COMPUTE,
    search=_search_spells,
    tests_rows=lambda seen: seen.history is not None,
)
CORRUPTION = CauseSpec(cause=Cause.CORRUPTION, search=_search_corruption)

CAUSES: tuple[CauseSpec, ...] = (
    compute.COMPUTE,
    SLOW_MEMORY,
    optimizer.SLOW_OPTIMIZER,
    losses.LOADER,
    losses.COLLECTOR,
    losses.HOST,
    losses.LATE_EXITS,
    links.LINK,
    networks.NETWORK,
    everywhere.CHANGED_LINKS,
    hosts.WHOLE_HOSTS,
    paused_hosts.PAUSED_HOSTS,
    SPELLS_OF_DEVICES,
    bursts.BURST,
    compute.SLOW_ON_THE_MEAN,
    networks.PACE_OF_PCIE,
    everywhere.LATE_DATA,
    everywhere.PAUSES,
    unexplained.STEP_CHANGE,
    imbalance.STAGES,
    imbalance.SEQUENCES,
    CORRUPTION,
    unexplained.AWAITED,
    everywhere.STOPS,
    everywhere.UNEVEN,
)

POWER_WORDS = {spec.cause: spec.power_words for spec in CAUSES if spec.power_words}
"""What would have been found, by cause."""
QUANTITIES = {spec.cause: spec.quantity for spec in CAUSES if spec.quantity}
"""What the lost time of a cause is called, by cause."""
