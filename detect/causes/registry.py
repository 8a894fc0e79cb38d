"""The causes that are searched, in the order of search and of the report's power line.

The first search finds who computes slowly and hands that to the others, because a rank that waits
for a slow rank is not at fault. docs/architecture.md says how to add a cause, step by step.
"""

from __future__ import annotations

from detect.causes import (
    bursts,
    changed_links,
    compute,
    corruption,
    everywhere,
    hosts,
    imbalance,
    late_exits,
    links,
    losses,
    memory,
    networks,
    optimizer,
    paused_hosts,
    spells,
    unexplained,
)
from detect.causes.finding import CauseSpec

CAUSES: tuple[CauseSpec, ...] = (
    compute.COMPUTE,
    memory.SLOW_MEMORY,
    optimizer.SLOW_OPTIMIZER,
    losses.LOADER,
    losses.COLLECTOR,
    losses.HOST,
    late_exits.LATE_EXITS,
    links.LINK,
    networks.NETWORK,
    changed_links.CHANGED_LINKS,
    hosts.WHOLE_HOSTS,
    paused_hosts.PAUSED_HOSTS,
    paused_hosts.LOADING_HOSTS,
    spells.SPELLS_OF_DEVICES,
    bursts.BURST,
    compute.SLOW_ON_THE_MEAN,
    networks.PACE_OF_PCIE,
    everywhere.LATE_DATA,
    everywhere.PAUSES,
    unexplained.STEP_CHANGE,
    imbalance.STAGES,
    imbalance.SEQUENCES,
    corruption.CORRUPTION,
    unexplained.AWAITED,
    everywhere.STOPS,
    everywhere.UNEVEN,
)

POWER_WORDS = {spec.cause: spec.power_words for spec in CAUSES if spec.power_words}
"""What would have been found, by cause."""
QUANTITIES = {spec.cause: spec.quantity for spec in CAUSES if spec.quantity}
"""What the lost time of a cause is called, by cause."""
