"""What the detector looks at, whatever it was read from: matrices by rank, iteration, operation.

`Observations` holds one window. A matrix has one row a recorded rank, in the order of
`Members.ranks`; NaN stands where a rank did not record a sample. Each field declares its axes with
`along`, so that `cut` takes rows or iterations out of all of them at once:

    cut(seen, "iteration", np.array([False, True, True]))   without the first iteration
    cut(seen, "row", np.array([0, 4]))                      the first and the fifth rank only

To add a measure: one field with its axes (or one entry of `Observations.lost_ns`), filled by
`detect.observe.extract`.

**Where ranks run**, and how their devices fare: hosts, clocks, power, temperature. Launchers number
the ranks host by host and give the n-th of a host its n-th device:

    rank     0  1  2  3  4  5  6  7
    device   0  1  2  3  0  1  2  3        two hosts, #0 and #1

So a trace that names no hosts tells them all the same, if all of its ranks keep to that.

Ranks record a sample of each counter of their device at a window's end, twice a second at most;
what counts is the median over the windows, and of the mask of reasons for a lowered clock the bits
that are set in more than half of them: 0x4, 0x44, 0x44 over three windows are 0x44, power cap and
thermal slowdown. What a network port counts from one reading to the next is summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, reduce
from operator import or_
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from detect.report import Cause, ClockAgreement
from detect.stats import robust
from detect.thresholds.adjustable import DetectorSettings
from detect.thresholds.networks import NETWORKS
from detect.thresholds.observing import WINDOW
from megascan.arrays import Flags, Floats, Integers, numbered
from megascan.header import Json, RankHeader, Trainer
from megascan.timeline import Timeline
from megascan.topology import Coordinates, Layout
from megascan.vocabulary import ROOTED_OPS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from detect.observe.modules import SlowRuns
    from detect.whatif.savings import ReplayedCosts
    from megascan.probes import Probes

    Record = TypeVar("Record", bound=DataclassInstance)


REASONS_NAME = "clock_event_reasons"
OTHERS_NAME = "others_sm_percent"
CLOCK_NAME, TENSOR_NAME, DRAM_NAME = "sm_clock_mhz", "tensor_percent", "dram_percent"
PORT_PREFIX, RATE_NAME = "nic.", "gbps"
"""Readings of the host's network ports are called `nic.<port>.<reading>`."""
REASONS = {
    0x1: "idle",
    0x2: "application clocks setting",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""Bits of NVML's clocks event reasons (nvml.h, nvmlClocksEventReason…)."""
IDLE, POWER_CAP = 0x1, 0x4
USUAL_REASONS = IDLE | POWER_CAP
"""A device under full load runs at its power limit, and rests between steps: no fault."""


def hosts_of(headers: Mapping[int, RankHeader]) -> dict[int, str]:
    """Return the name of each rank's host: where the trace names none, a number told by the device
    numbers, or "" if they do not tell.
    """
    named = {rank: header.host for rank, header in headers.items()}
    devices = {rank: header.device.index for rank, header in headers.items()}
    size = max(devices.values(), default=0) + 1
    is_regular = all(rank % size == device for rank, device in devices.items())
    told = {rank: f"#{rank // size}" for rank in devices}
    if any(named.values()) or size < 2 or not is_regular or len(set(told.values())) < 2:
        return named
    return told


def are_guessed(headers: Mapping[int, RankHeader]) -> bool:
    """Return whether the trace names no hosts, so that device numbers tell them."""
    return not any(header.host for header in headers.values()) and any(hosts_of(headers).values())


def typical_readings(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Return the typical readings of every rank that recorded any."""
    readings: dict[int, dict[str, float]] = {}
    for rank, windows in timeline.windows.items():
        values = defaultdict(list)
        for window in windows:
            for name, value in window.counters.items():
                values[name].append(value)
        if values:
            readings[rank] = {name: _typical(name, values[name]) for name in sorted(values)}
    return readings


def _typical(name: str, values: Sequence[float]) -> float:
    """Return the median; the mean of a share of time, which comes and goes; of the mask of reasons
    the bits that are set in more than half of them; of what a port counts the sum.
    """
    if name == OTHERS_NAME:
        return fmean(values)
    if name.startswith(PORT_PREFIX) and not name.endswith(f".{RATE_NAME}"):
        return float(sum(values))
    if name != REASONS_NAME:
        return float(median(values))
    masks = np.array(values, dtype=np.int64)
    return float(sum(bit for bit in REASONS if 2 * np.sum((masks & bit) > 0) > len(masks)))


def peculiar_reasons(own: int, peers: Sequence[int]) -> list[str]:
    """Return the names of reasons that no peer has, unless they are usual."""
    expected = reduce(or_, peers, USUAL_REASONS)
    return [name for bit, name in REASONS.items() if own & ~expected & bit]


def is_at_rest(mask: int) -> bool:
    """Return whether a mask of reasons says that the device has no work."""
    return bool(mask & IDLE)


def is_capped(mask: int) -> bool:
    """Return whether a mask of reasons says that the device is at its power limit."""
    return bool(mask & POWER_CAP)


FORWARD, BACKWARD = 0, 1
MLP_OF_MODULES, ATTENTION_OF_MODULES, OUTPUT_OF_MODULES = 0, 1, 2
LOSS_OF_LOOKUPS = 1
PHASE_NAMES = ("forward", "backward")


def along(*axes: str) -> Mapping[str, tuple[str, ...]]:
    """Declare the axes of a field's array, tuple, or mapping of arrays, as its metadata."""
    return {"axes": axes}


def cut(record: Record, axis: str, kept: Flags | Integers) -> Record:
    """Return the record with only the places `kept` of one axis, in every field that has it.

    `kept` is one flag a place, or the numbers of the places. Records inside the record are cut,
    too; fields without the axis stay as they are.
    """
    changed: dict[str, Any] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        axes = one.metadata.get("axes", ())
        if axis in axes and value is not None:
            changed[one.name] = _cut_along(value, axes.index(axis), kept)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[one.name] = cut(value, axis, kept)
    return replace(record, **changed) if changed else record


def _cut_along(value: Any, number: int, kept: Flags | Integers) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut_along(one, number, kept) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(value[place] for place in np.arange(len(value))[kept])
    return value[(slice(None),) * number + (kept,)]


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a rank's TCP connections have carried from its host to another one, over some time."""

    rank: int
    iterations: tuple[int, int]
    """The first and the last of the window, about whose time it is."""
    sender: str
    receiver: str
    num_bytes: int
    busy_ns: int
    """For which some were on their way, and the receiver had room."""
    of_ns: int


@dataclass(frozen=True, kw_only=True)
class WorkDone:
    """What a device has done from a window to the next one, as it counts itself."""

    window: int
    multiplied: float
    """Cycles in which it multiplied matrices, in units that devices of a model share."""
    moved: float
    """What its memory carried, likewise."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """The recorded ranks: where they sit and what they run on; row order of all matrices."""

    layout: Layout
    ranks: Integers = field(metadata=along("row"))
    place: Mapping[str, Integers] = field(metadata=along("row"))
    """Coordinates by axis (tp, cp, ep, dp, pp), each (row,)."""
    labels: tuple[str, ...] = field(metadata=along("row"))
    hosts: tuple[str, ...] = field(metadata=along("row"))
    devices: tuple[str, ...] = field(metadata=along("row"))
    device_index: tuple[int, ...] = field(metadata=along("row"))
    workers: tuple[tuple[int, ...], ...] = field(metadata=along("row"))
    """Global ranks that a row stands for: itself, or its TP group where that cannot be split."""
    device_kind: str = "cpu"
    trainer: Trainer = Trainer.UNKNOWN
    own_places: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    """Host and device number of each rank where rows stand for several."""

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def stage(self) -> Integers:
        """Return the pipeline stage of each row."""
        return self.place["pp"]

    @property
    def replica(self) -> Integers:
        """Return the data-parallel rank of each row: rows of one replica work on the same data."""
        return self.place["dp"]

    @property
    def tensor_group(self) -> Integers:
        """Return a number for each row's stage and replica: the row's TP (CP, EP) group."""
        return self.numbered("dp", "pp")

    def numbered(self, *axes: str) -> Integers:
        """Return a number for each row's place on some axes, (row,): equal on equal places."""
        return numbered(*(self.place[axis] for axis in axes))

    @cached_property
    def log_for_all(self) -> Flags:
        """Flag the rows that may log for all: those of the job's first rank and of its last, which
        logs in Megatron's loop. Loops on plain PyTorch log on the first rank, or where the losses
        are: on the last stage.
        """
        is_plain = self.trainer == Trainer.TORCH
        ends = {0} if is_plain else {0, self.layout.world_size - 1}
        logs = np.array([bool(ends & set(ranks)) for ranks in self.workers], dtype=bool)
        if is_plain and self.layout.pp > 1:
            logs |= self.stage == self.layout.pp - 1
        return logs

    def other_stages(self, row: int) -> Flags:
        """Flag the rows of the row's replica that are of other stages: they get the same data."""
        same_replica = self.replica == self.replica[row]
        return np.asarray(same_replica & (self.stage != self.stage[row]))

    def row(self, rank: int) -> int:
        """Return the row of a global rank."""
        return int(np.flatnonzero(self.ranks == rank)[0])

    def rows_of_stage(self, stage: int) -> Integers:
        """Return rows of one pipeline stage: a role's peers."""
        return np.flatnonzero(self.stage == stage)

    def ranks_of(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return the global ranks that some rows stand for, ascending."""
        return tuple(sorted(rank for row in rows for rank in self.workers[int(row)]))

    def rows_with(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the rows that stand for any of some global ranks, ascending."""
        named = set(ranks)
        return tuple(row for row, own in enumerate(self.workers) if named & set(own))

    @property
    def recorded(self) -> tuple[int, ...]:
        """Return the global ranks that any row stands for, ascending."""
        return tuple(sorted(rank for ranks in self.workers for rank in ranks))

    def device_of(self, rank: int) -> tuple[str, int]:
        """Return host and device number of a rank; -1 where the device is not known."""
        return self._devices.get(rank, ("", -1))

    def hosts_of(self, ranks: Iterable[int]) -> set[str]:
        """Return the hosts of some ranks; "" among them where one is not known."""
        return {self.device_of(rank)[0] for rank in ranks}

    @cached_property
    def _devices(self) -> Mapping[int, tuple[str, int]]:
        rows = zip(self.workers, self.hosts, self.device_index, strict=True)
        return self.own_places or {ranks[0]: (host, number) for ranks, host, number in rows}

    def are_inside_a_host(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks use GPUs of one host: no network lies between them.

        Where a trace names no host, devices tell: a job whose devices all have different numbers
        runs on one. On CPUs no link lies between them.
        """
        places = [self.device_of(rank) for rank in ranks]
        if self.device_kind == "cpu" or any(device < 0 for _, device in places):
            return False
        if any(self.hosts):
            hosts = {host for host, _ in places}
            return len(hosts) == 1 and "" not in hosts
        devices = [device for _, device in self._devices.values()]
        return len(set(devices)) == len(devices) == self.layout.world_size

    def coordinates(self, row: int) -> dict[str, int]:
        """Return the place of one row on the axes that the job uses."""
        used = self.layout.used("dp", "pp", "cp", "ep", "tp")
        return {axis: int(self.place[axis][row]) for axis in used}


def place_of(coordinates: list[Coordinates]) -> dict[str, Integers]:
    """Return coordinates of the rows by axis."""
    return {
        axis: np.array([getattr(place, axis) for place in coordinates], dtype=np.int64)
        for axis in ("tp", "cp", "ep", "dp", "pp")
    }


@dataclass(frozen=True, kw_only=True)
class Work:
    """Self times of one class of operations, as logarithms of ns.

    An operation is (phase, chunk, microbatch); ranks of one stage do the same operations.
    """

    log_ns: Floats = field(metadata=along("row", "iteration", "operation"))
    phase: Integers = field(metadata=along("operation"))
    """FORWARD or BACKWARD"""
    microbatch: Integers = field(metadata=along("operation"))
    derived: dict[str, tuple[object, ...]] = field(
        init=False, default_factory=dict, compare=False, repr=False
    )
    """Cache by name: what was last computed from this work, and for which arguments. A search asks
    for the same several times in a row."""


@dataclass(frozen=True, kw_only=True)
class Boundness:
    """Profiles: work by what its kernels are bound by, comparable as `Observations.work` is."""

    memory: Work
    """Kernels that move more than they compute: activations, norms, lookups; no optimizer."""
    matrix: Work
    """Matrix products, convolutions, attention."""
    memory_ns: Floats = field(metadata=along("row", "iteration"))
    """Time in kernels that move more than they compute, those of the optimizer included."""


@dataclass(frozen=True, kw_only=True)
class Tokenwise:
    """Rank files: parts of a model that take time in proportion to the number of tokens, whatever
    the length of documents and whatever a router sends to experts. NaN where none was traced.
    """

    dense_ns: Floats = field(metadata=along("row", "iteration"))
    """Products of matrices: MLPs without experts and the output layer, forward and backward."""
    lookups_ns: Floats = field(metadata=along("row", "iteration"))
    """(row, iteration, kind): what moves memory, a span of the embedding and of the loss."""


@dataclass(frozen=True)
class UntimedIn:
    """How long a group's collectives take whose ends are bounds only: when somebody saw them done.

    Not short of a transfer, but it may hold other work, and says something beside equal ones only.
    """

    members: tuple[int, ...]
    what: str
    """Axis and operation."""
    size_bytes: int
    """-1 where unknown."""
    crosses: bool
    """Whether the members are on several hosts."""
    shortest_ns: float
    """Median span of the member that is in them for the shortest time."""


@dataclass(frozen=True)
class UnmatchedIn:
    """How long a rank's quickest collectives take of those whose counterparts nobody knows, of one
    operation and size: they waited for nobody.
    """

    rank: int
    what: str
    size_bytes: int
    """-1 where unknown."""
    number: int
    an_iteration: float
    """The number of them in an iteration."""
    quickest_ns: float


@dataclass(frozen=True)
class LateIn:
    """A rank's lateness in the operations of one edge or group, ns an iteration."""

    rank: int
    members: tuple[int, ...]
    time_ns: float


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """Transfer times of communication, one unit an edge (p2p) or a process group (collective).

    Units of one `kind` (operation, axis and size alike) are comparable with each other.
    """

    members: tuple[tuple[int, ...], ...] = field(metadata=along("unit"))
    """Global ranks of each edge or group."""
    kinds: tuple[str, ...]
    kind: Integers = field(metadata=along("unit"))
    """Index into `kinds`."""
    size_bytes: Integers = field(metadata=along("unit"))
    """-1 where unknown."""
    transfer_ns: Floats = field(metadata=along("unit", "iteration"))
    """Median of the transfers in the iteration."""
    sum_ns: Floats = field(metadata=along("unit", "iteration"))
    """Sum of the transfers in the iteration."""
    late_ns: Floats = field(metadata=along("row", "iteration"))
    """How much longer than the quickest member of the same operations the rank's own transfers
    take, summed over the iteration."""
    quick_ns: Floats = field(metadata=along("row", "iteration"))
    """Transfers of the quickest members of the rank's operations, summed over the iteration."""
    late_in: tuple[LateIn, ...] = ()
    """The edges and groups in which `late_ns` arose."""
    shortest_ns: Floats | None = field(default=None, metadata=along("unit", "iteration"))
    """Median, in the iteration, of the span of the member that is in an operation for the shortest
    time, by that member's clock."""
    untimed: tuple[UntimedIn, ...] = ()
    """Collectives that have no transfer time."""

    @cached_property
    def total_ns(self) -> Floats:
        """Return the mean over iterations of the sum of the transfers, (unit,)."""
        return np.asarray(self.sum_ns.mean(axis=1))

    @property
    def is_large(self) -> Flags:
        """Flag the units, (unit,), whose time tells of more than latency; unknown sizes count."""
        return (self.size_bytes < 0) | (self.size_bytes >= NETWORKS.min_bytes)


@dataclass(frozen=True, kw_only=True)
class EachRank:
    """What is known of each rank where a row of the observations stands for its TP group."""

    members: Members
    optimizer_ns: Floats = field(metadata=along("worker", "iteration"))
    passes_ns: Floats = field(metadata=along("worker", "iteration"))
    """(worker, iteration, phase): a forward and a backward pass on the mean."""
    output_ns: Floats = field(metadata=along("worker", "iteration"))
    """A span of the output layer on the mean; NaN where none was traced."""
    lookups_ns: Floats = field(metadata=along("worker", "iteration"))
    """(worker, iteration, kind), as in `Tokenwise`."""
    loading_ns: Floats = field(metadata=along("worker", "iteration"))
    """What loading costs the rank; NaN where it loads nothing itself."""

    @classmethod
    def of(cls, seen: Observations) -> EachRank:
        """Take what is known of each rank before rows stand for groups."""
        work, shape = seen.work, seen.optimizer_ns.shape
        with np.errstate(over="ignore"):
            time_ns = np.exp(work.log_ns)
        phases = [robust.mean(time_ns[:, :, work.phase == one], axis=2) for one in range(2)]
        nothing, modules, told = np.full((*shape, 3), np.nan), seen.modules_ns, seen.tokenwise
        modules = nothing if modules is None else modules
        return cls(
            members=seen.members,
            optimizer_ns=seen.optimizer_ns,
            passes_ns=np.stack(phases, axis=2),
            output_ns=modules[:, :, OUTPUT_OF_MODULES],
            lookups_ns=nothing[:, :, :2] if told is None else told.lookups_ns,
            loading_ns=seen.lost(Cause.LOADER),
        )


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """For how long hosts launch nothing outside passes, (row, iteration) ns, and for how much of it
    their devices have nothing to do either.

    A host that is a little slower than the others is behind in all its launches; one that loads
    without a span, or whose core somebody else has, is late outside passes only. Hosts that are
    ahead of their devices spend that time, too, and no device stands still for it. Example: 70 ms
    before each of two forward passes, as long as the device stands still; at most 2 ms elsewhere.
    """

    opening_ns: Floats = field(metadata=along("row", "iteration"))
    """From the begin of an iteration to the first launch in its first pass."""
    idle_opening_ns: Floats = field(metadata=along("row", "iteration"))
    between_ns: Floats = field(metadata=along("row", "iteration"))
    """From the last launch in a pass to the first one in the next."""
    idle_between_ns: Floats = field(metadata=along("row", "iteration"))


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
    """GPU runs: between the last span of an iteration and its end. What a rank takes longer than
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


def hidden_axes(layout: Layout, transfers: Transfers | None) -> tuple[str, ...]:
    """Return the axes of a layout for `Observations.hidden_axes`."""
    shown = set()
    if transfers is not None:
        is_large = transfers.is_large
        for unit, ranks in enumerate(transfers.members):
            axis, operation = transfers.kinds[int(transfers.kind[unit])].split()[:2]
            if axis == "p2p" and layout.cp > 1 and ranks[1] in layout.group(ranks[0], "cp"):
                axis = "cp"
            if operation not in ROOTED_OPS and is_large[unit]:
                shown.add(axis)
    return tuple(one for one in ("tp", "cp", "ep") if getattr(layout, one) > 1 and one not in shown)


def steady(observations: Observations, settings: DetectorSettings) -> Observations:
    """Return the observations without warm-up.

    The run's first iterations are left out, and leading iterations that are slow for everybody: of
    iterations 1 to 20 the first two, and the third, too, if everybody computes 15 % longer in it
    than in the rest. At least `WINDOW.min_kept` iterations, and of more than nine two thirds, are
    always kept; of three, two that are as quick as each other after a first one that is not.
    """
    observations = replace(observations, num_warmup_iterations=settings.num_warmup_iterations)
    keep = _after_warm_up(observations, settings)
    if keep.all():
        return observations
    dropped = observations.iterations[~keep]
    several = f"iterations {dropped[0]} to {dropped[-1]} were"
    which = several if len(dropped) > 1 else f"iteration {dropped[0]} was"
    kept = cut(observations, "iteration", keep)
    return replace(kept, notes=(*observations.notes, f"{which} left out as warm-up"))


def _after_warm_up(observations: Observations, settings: DetectorSettings) -> Flags:
    """Flag the iterations to keep, (iteration,)."""
    iterations = observations.iterations
    keep: Flags = iterations > settings.num_warmup_iterations
    level = _typical_level(observations)
    typical = float(robust.median(level[keep] if keep.any() else level))
    for slot in range(len(level) // 3):
        if keep[slot] and not level[slot] >= typical + np.log(WINDOW.warm_ratio):
            break
        keep[slot] = False
    if keep.sum() < min(WINDOW.min_kept, len(keep)):
        keep[:] = True
        num_early = max(0, len(keep) - WINDOW.min_kept)
        keep[:num_early] = iterations[:num_early] > 1
        is_settled = _settled(iterations, level, settings)
        keep &= is_settled | (is_settled[keep].sum() < WINDOW.min_iterations)
    return keep


def _typical_level(observations: Observations) -> Floats:
    """Return the log time that the typical rank computes, (iteration,)."""
    return robust.median(robust.median(observations.work.log_ns, axis=2), axis=0)


def num_judgeable(seen: Observations, settings: DetectorSettings) -> int:
    """Count the iterations that a verdict can stand on.

    `steady` keeps the run's first iterations where there are few others. If everybody is slow in
    them, they are warm-up, which takes each rank its own time and says nothing about the ranks.
    """
    early = seen.iterations <= settings.num_warmup_iterations
    if not early.any():  # nearly always, and asked for every slow rank
        return len(seen.iterations)
    return int(settled(seen, settings).sum())


def settled(seen: Observations, settings: DetectorSettings) -> Flags:
    """Flag the iterations, (iteration,), after the last early one that is slow for everybody."""
    return _settled(seen.iterations, _typical_level(seen), settings)


def _settled(iterations: Integers, level: Floats, settings: DetectorSettings) -> Flags:
    is_early = iterations <= settings.num_warmup_iterations
    warm = np.flatnonzero(is_early & (level >= level[-1] + np.log(WINDOW.warm_ratio)))
    last = int(warm.max(initial=-1))
    return np.asarray(np.arange(len(level)) > last)


def one_row_a_worker(seen: Observations) -> Observations:
    """Return one row for each TP (CP, EP) group whose inner communication was not traced.

    Inside such a group everybody waits for the slowest within its own passes, so their times are
    the same and only the group as a whole can be compared; it waits for the longest of its loaders.
    A group on several hosts is on none.
    """
    if seen.splits_tensor_groups:
        return seen
    members = seen.members
    group = members.tensor_group
    rows = np.sort(np.unique(group, return_index=True)[1])
    workers = tuple(tuple(members.ranks[group == group[row]].tolist()) for row in rows)
    note = (
        "communication inside TP groups was not traced (granularity base): a slow rank can be told "
        "only up to its TP group; trace with --trace-granularity full to split it"
    )
    kept = cut(seen, "row", rows)
    kept = replace(kept, workers=EachRank.of(seen))

    def longest(time_ns: Floats) -> Floats:
        return np.stack([np.fmax.reduce(time_ns[group == group[row]]) for row in rows])

    if Cause.LOADER in seen.lost_ns:
        lost_ns = longest(seen.lost(Cause.LOADER))
        kept = replace(kept, lost_ns={**kept.lost_ns, Cause.LOADER: lost_ns})
    if seen.loading_ns is not None:
        kept = replace(kept, loading_ns=longest(seen.loading_ns))
    places = {rank: members.device_of(rank) for rank in members.recorded}
    on = [{places[rank][0] for rank in ranks} for ranks in workers]
    merged = replace(
        kept.members,
        workers=workers,
        hosts=tuple(next(iter(hosts)) if len(hosts) == 1 else "" for hosts in on),
        own_places=places,
    )
    return replace(kept, members=merged, notes=(*seen.notes, note))
