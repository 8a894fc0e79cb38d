"""The plan that a job follows, chosen from its flags: without torch, and alike on all ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.errors import ConfigError, InputError
from training.arguments import Settings, Sizes
from training.pipeline.costs import Costs, even_costs, even_memory, peak_memory
from training.pipeline.generators import GENERATORS, depth_first, recompute_ahead
from training.pipeline.plan import PipelineShape, Placement, Plan, read_plan
from training.pipeline.planner import Problem, search
from training.pipeline.rebalance import Deal, even_deal, parse_deal
from training.pipeline.simulator import check, numerics_note

if TYPE_CHECKING:
    from training.pipeline.measured import Predictor

AUTO = "auto"
"""The value of --pipeline-schedule that asks for a search, of --dpp-microbatches for shares from
measured times."""


def plan_for(settings: Settings, sizes: Sizes, num_microbatches: int) -> Plan | None:
    """Return the plan of a step; None where the job follows Megatron-Core's own schedule.

    Raises ConfigError or InputError for a plan that cannot be carried out.
    """
    name = schedule_name(settings, sizes)
    if name is None:
        return None
    shape = PipelineShape(
        num_ranks=sizes.pipeline_size,
        num_microbatches=num_microbatches,
        num_chunks=sizes.model_chunks,
    )
    if name == AUTO:
        plan = _searched(settings, shape)
    else:
        plan = _named(name, shape, settings.pipeline.microbatch_group_size_per_vp_stage)
        _check_fit(name, plan, shape)
    if settings.pipeline.recompute_ahead or settings.pipeline.forward_backward_disaggregating:
        if plan.recomputes or plan.names_transfers:
            raise ConfigError(
                f"{_repeating_option(settings)}: plan {plan.name} names its recomputation or its "
                "messages itself; leave one of them out"
            )
        plan = recompute_ahead(plan)
    check(plan, memory_limit=settings.pipeline.dpp_memory_limit)
    return plan


def schedule_name(settings: Settings, sizes: Sizes) -> str | None:
    """Return the name of the schedule; None for Megatron-Core's own.

    Unequal shares of microbatches need a plan, because Megatron-Core divides each loss by the
    number of microbatches that the replica runs.
    """
    pipeline = settings.pipeline
    if pipeline.pipeline_schedule is None and pipeline.use_dpp:
        return AUTO
    if pipeline.pipeline_schedule is None and pipeline.forward_backward_disaggregating:
        return "1f1b"
    if pipeline.pipeline_schedule is None and pipeline.dpp_microbatches is not None:
        return "1f1b" if sizes.model_chunks == 1 else "dfc"
    return pipeline.pipeline_schedule


def deal_for(settings: Settings, sizes: Sizes) -> Deal | None:
    """Return the shares of microbatches at the start; None without --dpp-microbatches."""
    text = settings.pipeline.dpp_microbatches
    if text is None:
        return None
    if text == AUTO:
        return even_deal(sizes.data_size, sizes.num_microbatches)
    return parse_deal(text, sizes.data_size, sizes.num_microbatches)


def check_schedule(settings: Settings, sizes: Sizes) -> None:
    """Raise ConfigError or InputError for flags whose plan this trainer cannot carry out."""
    pipeline = settings.pipeline
    _check_group_size(settings, sizes)
    _check_order(settings, sizes)
    _check_shares(settings, sizes)
    _check_helpers(settings, sizes)
    if pipeline.plan_from is not None and schedule_name(settings, sizes) != AUTO:
        raise ConfigError(
            "--plan-from says what --pipeline-schedule auto or --use-dpp plans for; add one"
        )
    if pipeline.dpp_choice == "guided" and not pipeline.use_dpp:
        raise ConfigError("--dpp-choice guided needs --use-dpp; add it")
    repeats = pipeline.recompute_ahead or pipeline.forward_backward_disaggregating
    if repeats and settings.recompute.recompute_granularity is not None:
        raise ConfigError(
            f"{_repeating_option(settings)} and --recompute-granularity exclude each other; "
            "keep one"
        )
    if schedule_name(settings, sizes) is None:
        if pipeline.recompute_ahead:
            raise ConfigError("--recompute-ahead needs --pipeline-schedule or --use-dpp; add one")
        if pipeline.dpp_memory_limit is not None:
            raise ConfigError("--dpp-memory-limit needs --pipeline-schedule or --use-dpp; add one")
        return
    _check_plan(settings, sizes)


def _check_group_size(settings: Settings, sizes: Sizes) -> None:
    """Check the rules of --microbatch-group-size-per-virtual-pipeline-stage."""
    group_size = settings.pipeline.microbatch_group_size_per_vp_stage
    option = "--microbatch-group-size-per-virtual-pipeline-stage"
    if group_size is not None and sizes.virtual_pipeline_size is None:
        raise ConfigError(f"{option} needs several chunks on a rank; "
                          "add --num-virtual-stages-per-pipeline-rank 2")  # fmt: skip
    if group_size is not None and not sizes.pipeline_size <= group_size <= sizes.num_microbatches:
        raise ConfigError(
            f"{option} is {group_size}, expected between the pipeline size {sizes.pipeline_size} "
            f"and the {sizes.num_microbatches} microbatches of a step"
        )


def _check_plan(settings: Settings, sizes: Sizes) -> None:
    """Raise ConfigError for a plan that this job's pipeline, replicas or layers do not allow."""
    pipeline = settings.pipeline
    if sizes.pipeline_size == 1 and (pipeline.pipeline_schedule is not None or pipeline.use_dpp):
        option = "--use-dpp" if pipeline.use_dpp else "--pipeline-schedule"
        raise ConfigError(f"{option} needs --pipeline-model-parallel-size 2 or more; add it")
    if pipeline.dpp_choice == "guided" and sizes.expert_size > 1:
        raise ConfigError(
            f"--dpp-choice guided with --expert-model-parallel-size {sizes.expert_size}: replicas "
            "that share experts must run one order; take static"
        )
    plan = plan_for(settings, sizes, sizes.num_microbatches)
    assert plan is not None
    if pipeline.dpp_choice == "guided" and (note := numerics_note(plan)):
        raise ConfigError(f"--dpp-choice guided: {note}; take static, or a plan in order")
    if plan.splits_backward and settings.model.transformer_impl != "local":
        raise ConfigError(
            f"plan {plan.name} splits backward passes, which is there for --transformer-impl "
            "local only; take 1f1b, dfc or bfc"
        )


def notes_on_plan(settings: Settings, sizes: Sizes) -> tuple[str, ...]:
    """Return a sentence where a plan's sums differ from those of Megatron-Core's schedule."""
    plan = plan_for(settings, sizes, sizes.num_microbatches)
    note = None if plan is None else numerics_note(plan)
    return (note,) if note else ()


def _repeating_option(settings: Settings) -> str:
    """Return the flag that makes repeated forwards actions of their own."""
    by_helpers = settings.pipeline.forward_backward_disaggregating
    return "--forward-backward-disaggregating" if by_helpers else "--recompute-ahead"


def _check_helpers(settings: Settings, sizes: Sizes) -> None:
    """Check the rules of --forward-backward-disaggregating."""
    pipeline, option = settings.pipeline, "--forward-backward-disaggregating"
    if not pipeline.forward_backward_disaggregating:
        if pipeline.fbd_port or pipeline.fbd_helpers:
            raise ConfigError(f"--fbd-port and --fbd-helpers are for {option}; add it")
        return
    if sizes.pipeline_size == 1:
        raise ConfigError(f"{option} needs --pipeline-model-parallel-size 2 or more; add it")
    for axis, size in (
        ("--tensor-model-parallel-size", sizes.tensor_size),
        ("--context-parallel-size", sizes.context_size),
        ("--expert-model-parallel-size", sizes.expert_size),
        ("--num-virtual-stages-per-pipeline-rank", sizes.model_chunks),
    ):
        if size > 1:
            raise ConfigError(
                f"{option} with {axis} {size}: a helper runs stages that are whole and lie one on "
                "a rank; leave one of the two out"
            )
    if settings.model.hidden_dropout or settings.model.attention_dropout:
        raise ConfigError(
            f"{option} with dropout: a helper would draw other masks than the pipeline; add "
            "--hidden-dropout 0 --attention-dropout 0"
        )
    if settings.parallel.overlap_param_gather:
        raise ConfigError(
            f"{option} with --overlap-param-gather: helpers need the weights before the first "
            "forward, which gathers them; leave one of the two out"
        )
    if pipeline.dpp_choice == "guided":
        raise ConfigError(f"{option} with --dpp-choice guided: steps with helpers follow their "
                          "plan; take static")  # fmt: skip
    name = pipeline.pipeline_schedule
    if name is not None and name not in ("1f1b", "zb-h1", AUTO):
        raise ConfigError(
            f"{option} makes plans of its own while helpers are there, and --pipeline-schedule "
            f"{name} is one for a step without; take 1f1b, zb-h1 or auto"
        )
    if not 0 <= pipeline.fbd_port < 65536 or pipeline.fbd_helpers < 0:
        raise ConfigError(
            f"--fbd-port is {pipeline.fbd_port} and --fbd-helpers {pipeline.fbd_helpers}, "
            "expected a port up to 65535 and a number of 0 or more"
        )


def _check_order(settings: Settings, sizes: Sizes) -> None:
    """Check the rule of --order-microbatches."""
    order = settings.pipeline.order_microbatches
    if order is not None and sizes.pipeline_size == 1:
        raise ConfigError(
            f"--order-microbatches {order} needs --pipeline-model-parallel-size 2 or more: without "
            "a pipeline every order takes as long"
        )


def _check_shares(settings: Settings, sizes: Sizes) -> None:
    """Check the rules of --dpp-microbatches."""
    pipeline = settings.pipeline
    deal = deal_for(settings, sizes)
    if deal is None:
        return
    option = f"--dpp-microbatches {pipeline.dpp_microbatches}"
    if sizes.data_size == 1:
        raise ConfigError(f"{option} needs a data-parallel size of 2 or more; start more ranks")
    if sizes.expert_size > 1:
        raise ConfigError(
            f"{option} with --expert-model-parallel-size {sizes.expert_size}: replicas that share "
            "experts must run equal shares; leave one of them out"
        )
    name = pipeline.pipeline_schedule
    if name is not None and name != AUTO and name not in GENERATORS:
        raise ConfigError(
            f"{option} needs a plan for each share, and --pipeline-schedule {name} is for one; "
            f"take one of {', '.join((AUTO, *GENERATORS))}"
        )
    if settings.parallel.overlap_grad_reduce and sizes.model_chunks > 1:
        raise ConfigError(
            f"{option} with several chunks on a rank and --overlap-grad-reduce: replicas would "
            "reduce their chunks in different orders; leave one of them out"
        )


def _searched(settings: Settings, shape: PipelineShape) -> Plan:
    """Return the fastest plan found, for even stages or for the stages of a trace."""
    pipeline = settings.pipeline
    splits_backward = settings.model.transformer_impl == "local"
    return _fastest(shape, pipeline.dpp_memory_limit, pipeline.plan_from, splits_backward)


@cache
def _fastest(
    shape: PipelineShape, limit: float | None, traced: Path | None, splits_backward: bool
) -> Plan:
    """Search for that plan; each rank asks for it while it reads its flags, and once more later."""
    memory = even_memory(shape)
    if limit is None:
        limit = max(peak_memory(depth_first(shape), memory))
    costs = even_costs(shape) if traced is None else _measured_costs(traced, shape)
    problem = Problem(
        shape=shape,
        table=costs.table(shape),
        memory=memory,
        memory_limit=limit,
        splits_backward=splits_backward,
    )
    return search(problem).plan.renamed(AUTO)


@cache
def _traced_job(path: Path) -> Predictor:
    """Return the job of a timeline; each rank reads the file once."""
    from megascan.reader import read_timeline
    from training.pipeline.measured import Predictor, measure

    if path.is_dir():
        raise InputError(
            f"--plan-from {path} is a folder, expected a timeline; make one with "
            f"python aggregate.py -b {path} -o timeline.json.gz"
        )
    return Predictor(measure(read_timeline(path)), {})


def _measured_costs(path: Path, shape: PipelineShape) -> Costs:
    """Return the costs of the replica that the traced job waited for."""
    from training.pipeline.measured import AS_TRACED

    job = _traced_job(path)
    traced = job.job.shape
    if (traced.num_ranks, traced.num_chunks) != (shape.num_ranks, shape.num_chunks):
        raise ConfigError(
            f"--plan-from {path} is of {traced.num_ranks} pipeline ranks with {traced.num_chunks} "
            f"chunk(s), but the job has {shape.num_ranks} with {shape.num_chunks}; trace this job, "
            "or leave it out"
        )
    return job.costs(job.slowest_replica(), AS_TRACED)


def _named(name: str, shape: PipelineShape, group_size: int | None) -> Plan:
    if name == "dfc" and group_size is not None:
        return depth_first(shape, group_size=group_size)
    if name in GENERATORS:
        return GENERATORS[name](shape)
    if not Path(name).is_file():
        raise ConfigError(
            f"--pipeline-schedule {name} is neither a schedule nor a file; take one of "
            f"{', '.join((AUTO, *GENERATORS))}, or a plan that megascan plan wrote"
        )
    return read_plan(Path(name))


def _check_fit(name: str, plan: Plan, shape: PipelineShape) -> None:
    """Check that a plan, which may be from a file, has the sizes of the job."""
    found = plan.shape
    for what, of_plan, of_job in (
        ("pipeline ranks", found.num_ranks, shape.num_ranks),
        ("chunks on a rank", found.num_chunks, shape.num_chunks),
        ("microbatches", found.num_microbatches, shape.num_microbatches),
    ):
        if of_plan != of_job:
            raise ConfigError(
                f"--pipeline-schedule {name} is a plan of {of_plan} {what}, but the job has "
                f"{of_job}; make a plan for this job or change its sizes"
            )
    if found.placement is not Placement.LOOP:
        raise ConfigError(
            f"--pipeline-schedule {name} places stages in a V, which Megatron-Core's chunks cannot "
            "be; take a plan whose stages run in a loop"
        )
