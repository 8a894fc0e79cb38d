"""What runs on the cluster: layouts, the modules of a stage with their cost, and schedules of
passes.
"""

from dataclasses import dataclass, field
from functools import cached_property

from benchmarks.grounds.cluster.hardware import MS, Machines
from benchmarks.grounds.kinds import EXPERTS, kinds_of

COMPUTE_BOUND, MIXED, MEMORY_BOUND = 1.0, 0.6, 0.3  # how much of a lower clock a module feels


@dataclass(frozen=True, kw_only=True)
class Module:
    """State what one module of a pass costs.

    `base_ns` at the nominal number of tokens; `quadratic` is the share of it that grows with their
    square; `before` and `after` name the axis of the group that meets there (`tp`, `ep`, `fsdp` or
    none).
    """

    name: str
    base_ns: float
    layer: int = -1
    clock_share: float = COMPUTE_BOUND
    quadratic: float = 0.0
    before: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a training job; `style` is `megatron`, `ddp` or `fsdp`."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    style: str = "megatron"
    num_microbatches: int = 4
    layers: int = 2  # of a chunk
    pattern: str = "A"  # of layers, repeated: A attention, M Mamba-like
    heavy_stage: tuple[int, float] = (-1, 1.0)  # a model whose layers cost more on one stage
    output_layer_ratio: float = 0.3  # output layer and loss over one layer
    layer_ns: float = 5 * MS
    launch_ratio: float = (
        0.25  # host time of a launch over the time of what it launches; above 1: host-bound
    )
    loader_ratio: float = 0.4  # producing a batch over one forward and backward of it
    message_bytes: float = 24e6  # of p2p, and of TP collectives
    gradient_bytes: float = 1.2e9  # of a rank
    sequence_parallel: bool = False
    tp_recorded: bool = True
    ep_recorded: bool = True
    overlap_gradients: bool = False
    distributed_optimizer: bool = False
    token_noise: float = 0.0  # deviation of log tokens of a microbatch
    interval: int = 5
    window: int = 2
    num_traced: int = 8
    granularity: str = "full"
    warm_up_ratio: float = 3.0  # first iteration over the others
    evaluation: bool = False
    checkpoint: bool = False
    machines: Machines = field(default_factory=Machines)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return self.tp * self.dp * self.pp

    @property
    def num_stage_ranks(self) -> int:
        """Number of ranks of a stage: rank = tp index + TP x (dp index + DP x stage)."""
        return self.tp * self.dp

    @property
    def iterations(self) -> list[int]:
        """Traced iterations i, (i - 1) mod interval < window."""
        found = (i for i in range(1, 10**6) if (i - 1) % self.interval < self.window)
        return [next(found) for _ in range(self.num_traced)]

    @property
    def nominal_iteration_ns(self) -> float:
        """Return about how long an iteration takes, for scales only."""
        passes = self.num_microbatches * self.vpp + self.pp - 1
        return passes * self.layers * self.layer_ns * 3

    def groups(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each group of `rank`, by axis."""
        tp, dp, pp, stage_size = self.tp, self.dp, self.pp, self.num_stage_ranks
        place, replica, stage = rank % tp, rank // tp % dp, rank // stage_size
        first = stage * stage_size
        replicas = tuple(first + place + tp * each for each in range(dp))
        found = {
            "tp": tuple(first + replica * tp + each for each in range(tp)),
            "dp": replicas,
            "dp_cp": replicas,
            "pp": tuple(rank % stage_size + stage_size * each for each in range(pp)),
            "mp": tuple(
                replica * tp + inner + stage_size * outer
                for outer in range(pp)
                for inner in range(tp)
            ),
            "world": tuple(range(self.num_ranks)),
        }
        if self.ep > 1:
            begin = replica - replica % self.ep
            found["ep"] = replicas[begin : begin + self.ep]
            found["expt_dp"] = replicas[replica % self.ep :: self.ep]
        return found

    def forward_modules(self, stage: int, chunk: int) -> list[Module]:
        """Return the modules of one chunk in the order of its forward."""
        return self._modules[stage, chunk]

    def backward_modules(self, stage: int, chunk: int) -> list[Module]:
        """Return the modules of one chunk in the order of its backward."""
        return self._backward[stage, chunk]

    @cached_property
    def _backward(self) -> dict[tuple[int, int], list[Module]]:
        return {
            place: [_reversed(each) for each in reversed(modules)]
            for place, modules in self._modules.items()
        }

    @cached_property
    def _modules(self) -> dict[tuple[int, int], list[Module]]:
        return {
            (stage, chunk): self._chunk(stage, chunk)
            for stage in range(self.pp)
            for chunk in range(self.vpp)
        }

    def _chunk(self, stage: int, chunk: int) -> list[Module]:
        modules = []
        if stage == 0 and chunk == 0:
            modules.append(
                Module(name="embedding", base_ns=0.04 * self.layer_ns, clock_share=MEMORY_BOUND)
            )
        for layer in self._layers_of(stage, chunk):
            modules += self._layer(layer, self._heavier(stage))
        if stage == self.pp - 1 and chunk == self.vpp - 1:
            output_ns = self.output_layer_ratio * self.layer_ns
            modules.append(Module(name="output_layer", base_ns=output_ns, before=self._gather()))
            modules.append(Module(name="loss", base_ns=0.03 * output_ns, clock_share=MEMORY_BOUND))
        return modules

    def _layers_of(self, stage: int, chunk: int) -> range:
        first = (chunk * self.pp + stage) * self.layers + 1
        return range(first, first + self.layers)

    def _heavier(self, stage: int) -> float:
        return self.heavy_stage[1] if stage == self.heavy_stage[0] else 1.0

    def _is_mamba_like(self, layer: int) -> bool:
        return self.pattern[(layer - 1) % len(self.pattern)] == "M"

    def kinds(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return which layers of a stage are alike; those of a heavier stage are wider.

        Nothing is known of a hybrid model of Megatron-Core: the tracer asks a GPTModel only.
        """
        if self.style == "megatron" and "M" in self.pattern:
            return {}
        return kinds_of(
            (layer, self._words(layer, stage))
            for chunk in range(self.vpp)
            for layer in self._layers_of(stage, chunk)
        )

    def _words(self, layer: int, stage: int) -> str:
        if self.ep > 1:
            return EXPERTS
        mixer = "state space" if self._is_mamba_like(layer) else "attention"
        return f"{self.style} layer, {mixer}, tp {self.tp}, {self._heavier(stage)} times as wide"

    def _gather(self) -> str:
        return "tp" if self.tp > 1 and self.sequence_parallel else ""

    def _layer(self, layer: int, heavier: float) -> list[Module]:
        """Return the modules of one layer; a Mamba-like one is seen by its time alone."""
        unit = self.layer_ns * heavier
        mamba_like = self._is_mamba_like(layer)
        if self.style != "megatron":
            sharded = "fsdp" if self.style == "fsdp" else ""
            base_ns, share = (0.7 * unit, MIXED) if mamba_like else (unit, 0.9)
            return [
                Module(
                    name="layer",
                    base_ns=base_ns,
                    layer=layer,
                    clock_share=share,
                    quadratic=0.2,
                    before=sharded,
                )
            ]
        meets = "tp" if self.tp > 1 else ""
        before = self._gather()
        if mamba_like:
            return [
                Module(
                    name="mamba",
                    base_ns=0.7 * unit,
                    layer=layer,
                    clock_share=MIXED,
                    before=before,
                    after=meets,
                )
            ]
        attention = Module(
            name="attention", base_ns=0.62 * unit, layer=layer, quadratic=0.4, clock_share=0.9,
            before=before, after=meets,
        )  # fmt: skip
        inner = self._gather()
        if self.ep > 1:
            router = Module(
                name="router",
                base_ns=0.05 * unit,
                layer=layer,
                clock_share=MIXED,
                before=inner,
                after="ep",
            )
            return [
                attention,
                router,
                Module(name="experts", base_ns=0.4 * unit, layer=layer, after="ep"),
            ]
        return [
            attention,
            Module(name="mlp", base_ns=0.36 * unit, layer=layer, before=inner, after=meets),
        ]

    @property
    def forward_ns(self) -> float:
        """Return the nominal time of one chunk's forward."""
        return self.layers * self.layer_ns


def _reversed(module: Module) -> Module:
    """Return a module's backward: about twice its forward, meeting where its forward did."""
    ratio = {"attention": 1.75, "mlp": 2.5, "experts": 2.4, "output_layer": 2.6}.get(
        module.name, 2.0
    )
    exchanged = {"before": module.before, "after": module.after}
    if module.before != "fsdp" and module.before:
        exchanged = {"before": module.after, "after": module.before}
    return Module(
        name=module.name, base_ns=ratio * module.base_ns, layer=module.layer,
        clock_share=module.clock_share, quadratic=module.quadratic, **exchanged,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One microbatch through one chunk."""

    forward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """Name one message between stages: the virtual stage that it leaves, its microbatch and
    direction.
    """

    forward: bool
    virtual_stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Messages that a stage sends and receives at once; it goes on when the receives are there,
    or all.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    waits_for_sends: bool = True


Action = Pass | Exchange


def schedule(job: Job, stage: int) -> list[Action]:
    """Return what a stage does in one iteration: 1F1B, interleaved where it has several chunks."""
    if job.vpp > 1:
        return _interleaved(job, stage)
    return [action for action in _one_forward_one_backward(job, stage) if action is not None]


def _one_forward_one_backward(job: Job, stage: int) -> list[Action | None]:
    count = job.num_microbatches
    warm_up = min(job.pp - 1 - stage, count)
    first, last = stage == 0, stage == job.pp - 1

    def exchange(
        *, out: tuple[bool, int] | None = None, into: tuple[bool, int] | None = None
    ) -> Exchange | None:
        sends: tuple[Message, ...] = ()
        receives: tuple[Message, ...] = ()
        if out and not (last if out[0] else first):
            sends = (Message(forward=out[0], virtual_stage=stage, microbatch=out[1]),)
        if into and not (first if into[0] else last):
            source = stage - 1 if into[0] else stage + 1
            receives = (Message(forward=into[0], virtual_stage=source, microbatch=into[1]),)
        return Exchange(sends=sends, receives=receives) if sends or receives else None

    actions: list[Action | None] = []
    for number in range(warm_up):
        actions.append(exchange(into=(True, number)))
        actions.append(Pass(forward=True, chunk=0, microbatch=number))
        actions.append(exchange(out=(True, number)))
    rest = count - warm_up
    if rest:
        actions.append(exchange(into=(True, warm_up)))
    for number in range(rest):
        actions.append(Pass(forward=True, chunk=0, microbatch=warm_up + number))
        actions.append(exchange(out=(True, warm_up + number), into=(False, number)))
        actions.append(Pass(forward=False, chunk=0, microbatch=number))
        following = (True, warm_up + number + 1) if number < rest - 1 else None
        actions.append(exchange(out=(False, number), into=following))
    for number in range(rest, count):
        actions.append(exchange(into=(False, number)))
        actions.append(Pass(forward=False, chunk=0, microbatch=number))
        actions.append(exchange(out=(False, number)))
    return actions


def _interleaved(job: Job, stage: int) -> list[Action]:
    """Megatron's interleaved 1F1B with overlapped messages: a send holds nobody up."""
    total = job.num_microbatches * job.vpp
    warm_up = min((job.pp - stage - 1) * 2 + (job.vpp - 1) * job.pp, total)
    actions: list[Action] = []
    for number in range(total + warm_up):
        if number < total:
            actions += _virtual_pass(job, stage, number, forward=True)
        if number >= warm_up:
            actions += _virtual_pass(job, stage, number - warm_up, forward=False)
    return actions


def _virtual_pass(job: Job, stage: int, number: int, *, forward: bool) -> list[Action]:
    in_round = number % (job.pp * job.vpp)
    chunk = in_round // job.pp if forward else job.vpp - 1 - in_round // job.pp
    microbatch = number // (job.pp * job.vpp) * job.pp + number % job.pp
    here, last = chunk * job.pp + stage, job.pp * job.vpp - 1
    source = here - 1 if forward else here + 1
    actions: list[Action] = []
    if 0 <= source <= last:
        message = Message(forward=forward, virtual_stage=source, microbatch=microbatch)
        actions.append(Exchange(receives=(message,), waits_for_sends=False))
    actions.append(Pass(forward=forward, chunk=chunk, microbatch=microbatch))
    if here != (last if forward else 0):
        message = Message(forward=forward, virtual_stage=here, microbatch=microbatch)
        actions.append(Exchange(sends=(message,), waits_for_sends=False))
    return actions
