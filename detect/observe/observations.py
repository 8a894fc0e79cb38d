"""What the detector looks at, whatever it was read from: matrices by rank, iteration, operation.

`Observations` holds one window; its fields declare their axes (`detect.observe.axes`). To add a
measure: one field with its axes (or one entry of `Observations.lost_ns`), filled by
`detect.observe.extract`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from detect.observe.axes import along
from detect.observe.groups import EachRank
from detect.observe.machines import Carried, WorkDone
from detect.observe.members import Members
from detect.observe.operations import Boundness, Tokenwise, Work
from detect.observe.transfers import Transfers, UnmatchedIn, hidden_axes
from detect.report import Cause, ClockAgreement
from detect.thresholds.adjustable import DetectorSettings
from megascan.arrays import Flags, Floats, Integers
from megascan.header import Json

if TYPE_CHECKING:
    from detect.observe.launches import Pauses
    from detect.observe.modules import SlowRuns
    from detect.whatif.savings import ReplayedCosts
    from megascan.probes import Probes


@dataclass(frozen=True, kw_only=True)
class Observations:
    """All that is known of a window, ready for comparison."""

    members: Members
    iterations: Integers = field(metadata=along("iteration"))
    iteration_ns: Floats = field(metadata=along("iteration"))
    """Longest over the ranks."""
    num_warmup_iterations: int = DetectorSettings.num_warmup_iterations
    """How many of the run's first iterations take long for everybody; `steady` sets it."""
    work: Work
    layers: Work | None = None
    """Transformer layers only: the same shape on every stage."""
    history: Work | None = None
    """Profiles: kernels that all iterations launch alike over what they typically take on their
    rank; NaN for ranks with too few of them."""
    boundness: Boundness | None = None
    """Profiles of GPUs."""
    busy_ns: Floats = field(metadata=along("row", "iteration"))
    """Self time of all compute, the optimizer included."""
    optimizer_ns: Floats = field(metadata=along("row", "iteration"))
    attention_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Attention in forward passes, which no routing of tokens to experts lengthens; NaN where no
    attention was traced."""
    exchanged_bytes: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """What the rank's all-to-alls carry, by which a router sends tokens to experts; NaN for a rank
    without them, None where nobody has some."""
    tokenwise: Tokenwise | None = None
    """None on CPUs."""
    modules_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """(row, iteration, kind): a span of an MLP, one of attention and one of the output layer in
    forward passes, on the mean; NaN where none was traced. None on CPUs."""
    slow_runs: SlowRuns | None = None
    """Modules in a row that a rank takes longer for than usual; None without passes."""
    workers: EachRank | None = None
    """All ranks, where rows stand for several of them."""
    lost_ns: Mapping[Cause, Floats] = field(
        default_factory=dict, metadata=along("row", "iteration")
    )
    """Time lost next to compute by cause; a cause that the trace cannot tell about is absent.

    LOADER waiting for data, GC collecting garbage, HOST nothing to do because the host is late (the
    sum of its parts below), LINK leaving communications late.
    """
    host_gap_ns: Floats = field(metadata=along("row", "iteration"))
    """Part of HOST: time that no span covers."""
    ending_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Between the last span of an iteration and its end. What a rank takes longer than
    most is in `host_gap_ns`, unless it logs there for all (`Members.log_for_all`)."""
    stalled_ns: Floats = field(metadata=along("row", "iteration"))
    """Part of HOST, GPU runs: the device stood still inside passes, its queue empty."""
    stolen_ns: Floats = field(metadata=along("row", "iteration"))
    """Part of HOST, CPU runs: wall minus CPU time of compute; 0 elsewhere."""
    waiting_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Time in which the rank did nothing but wait for others; None where no communication could be
    split into waiting and transfer."""
    split_wait_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """All waiting in communication, also where computing beside it hides it."""
    beside_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Time in which the rank computes while a collective of it waits for others beside that."""
    unsplit_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Time in which the rank did nothing but communicate, and waiting cannot be told from transfer:
    nobody knows with whom, or when the communication was over. None in tables of operations."""
    unmatched: tuple[UnmatchedIn, ...] = ()
    """Of profiles."""
    starved_share: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Share of operations for whose launch the device waited. Like other figures of launches below,
    None where these were not recorded."""
    saving_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Time in which a rank saves checkpoints in an iteration, or behind it in the same window."""
    loading_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """How long the spans of loading last, whether or not the device had to wait for it."""
    launch_pace: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Log of the time that a host takes from launch to launch over what all take for that step."""
    held_pace: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """`launch_pace` from all launches, also of hosts so far ahead that the device holds them."""
    stopped_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """How long the host stood still between launches of modules, in a profile of kernels, while the
    device waited."""
    launching_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """How long the host takes to launch an iteration's passes, if nothing holds it up."""
    launching_first_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """Part of `launching_ns` up to the second launch of each pass; None in profiles."""
    launching_step_ns: Floats | None = field(default=None, metadata=along("row", "iteration"))
    """What one launch behind the second takes, summed over the passes; None in profiles."""
    pauses: Pauses | None = None
    """For how long hosts launch nothing outside passes; None in profiles."""
    entangled_phases: tuple[int, ...] = ()
    """Phases whose compute spans contain waiting for the TP group, so their times are estimates."""
    hides_waiting: bool = False
    """Whether all passes last as long as the slowest: parameters are gathered beside them, and no
    layers tell how long they wait."""
    waits_between_layers: bool = False
    """Whether passes hold waiting for parameters that are sharded over the replicas, which layers
    tell: a replay of passes takes what the others wait for as their work."""
    holds_tensor_waits: bool = False
    """Traces without passes: what lies between communications is compared, and holds waiting for
    the TP group, whose collectives of backward passes nobody recorded."""
    mixes_communication: bool = False
    """CPU runs at base granularity with TP: CPU time of compute holds that of communication."""
    splits_tensor_groups: bool = True
    """False when communication inside TP groups was not traced: their members' times are one."""
    may_have_stages: bool = False
    """Profiles with messages, but without pipeline stages: ranks may do other work."""
    tells_passes: bool = True
    """False for a profile: kernels stand for passes, and garbage collection is not recorded."""
    transfers: Transfers | None = None
    has_even_data: bool = False
    """Whether all ranks recorded how many tokens passes get, and those of a stage got as many."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """Tokens that a pass gets, by rank; of ranks all of whose passes got as many."""
    has_equal_layers: bool = False
    """Whether all ranks recorded what their layers are made of, and all layers are of one kind."""
    counters: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Readings of devices and of hosts' ports by rank, median over windows; counts their sum."""
    work_done: Mapping[int, tuple[WorkDone, ...]] = field(default_factory=dict)
    """By rank, of devices that count it."""
    core_waits: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """By rank and iteration: for how many ns the threads that launch its work could have run and
    had no core. Of ranks that tell, in a rank file on Linux."""
    other_threads: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """By rank and iteration: for how many ns other threads of Python in its process ran."""
    page_reads: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """By rank and iteration: pages that were read back from swap or a disk; of ranks with any."""
    pressure: Mapping[int, Mapping[int, Mapping[str, float]]] = field(default_factory=dict)
    """By rank and the last iteration of a window: how it waited for memory and disks since the
    reading before, by name; none of a first reading, which begins before the training."""
    carried: tuple[Carried, ...] = ()
    """By TCP connections between hosts, of windows that tell."""
    alignment: ClockAgreement | None = None
    completeness: Mapping[str, Json] = field(default_factory=dict)
    probes: Probes | None = None
    """What replicas computed from the same tokens, where that was recorded."""
    notes: tuple[str, ...] = ()
    source: str = ""
    costs: ReplayedCosts | None = None
    """What findings cost the step, by replay; None where nothing can be replayed."""

    @property
    def each_rank(self) -> EachRank:
        """Return what was seen of each rank, whatever ranks a row stands for."""
        return EachRank.of(self) if self.workers is None else self.workers

    @property
    def rules_data_out(self) -> bool:
        """Return whether longer data cannot be why passes differ: all got as many tokens, and no
        router sends more of them to some experts.
        """
        return self.has_even_data and self.members.layout.ep == 1

    def tokens_of(self, row: int) -> tuple[int, float] | None:
        """Return how many tokens a row's passes get, and those of its typical stage peer; None
        where somebody's are not known or vary, or a router sends them to experts.
        """
        members = self.members
        peers = [one for one in members.rows_of_stage(int(members.stage[row])) if one != row]
        known = [self.tokens.get(members.workers[one][0], 0) for one in (row, *peers)]
        if members.layout.ep > 1 or not peers or min(known) <= 0:
            return None
        return known[0], float(np.median(known[1:]))

    def within(self, stretches: Iterable[tuple[int, int]]) -> Flags:
        """Flag the iterations of some stretches, first and last of each, (iteration,)."""
        holds = np.zeros(len(self.iterations), dtype=bool)
        for first, last in stretches:
            holds |= (self.iterations >= first) & (self.iterations <= last)
        return holds

    @property
    def knows_roles(self) -> bool:
        """Return whether communication tells who does the same work: in a profile of which nothing
        was matched, a first stage or the leader of a TP group looks like any rank.
        """
        is_matched = self.transfers is not None and len(self.transfers.members) > 0
        return self.tells_passes or is_matched or not np.any(self.unsplit_ns)

    @cached_property
    def hidden_axes(self) -> tuple[str, ...]:
        """Return the axes along which ranks communicate inside their passes, none of it traced.

        The batch that a stage's first rank hands to its TP group and a few bytes (of losses, norms)
        are none of a model's own communication. What a CP group sends round in a ring are messages.
        """
        return hidden_axes(self.members.layout, self.transfers)

    @property
    def holds_waiting(self) -> bool:
        """Return whether times of passes hold waiting for ranks of the same group, or what is left
        of it. For parameters that are sharded over the replicas all of these wait alike.
        """
        is_hidden = bool(self.hidden_axes or self.entangled_phases) or self.hides_waiting
        return is_hidden or self.holds_tensor_waits or not self.splits_tensor_groups

    def lost(self, cause: Cause) -> Floats:
        """Return the time lost to a cause, (row, iteration); NaN where it was not recorded."""
        found = self.lost_ns.get(cause)
        return np.full_like(self.busy_ns, np.nan) if found is None else found
