"""What the pipeline's flags make of a job, and what they refuse, without starting one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megascan.errors import MegaScanError
from training.arguments import parse_settings, resolve_sizes
from training.arguments.settings import (
    add_original_arguments,
    build_parser,
    notes_on_original,
    stages_of,
)
from training.pipeline.costs import peak_memory
from training.pipeline.plan import Plan
from training.pipeline.schedule import check_schedule, deal_for, notes_on_plan, plan_for

MODEL = """
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3
    --micro-batch-size 1 --train-iters 2
"""


SEARCH_S = 1.5
"""Of a plan of 8 ranks, 2 chunks, 32 microbatches, which is searched for twice."""
FBD = "--forward-backward-disaggregating --hidden-dropout 0 --attention-dropout 0"
EXAMPLES = Path(__file__).parents[2] / "examples"
TIMELINE = f"{EXAMPLES}/h200-pp2-dp2-rank-2-slow.json.gz"


def plan_of(flags: str, num_ranks: int) -> Plan | None:
    """The plan of a job, checked as the trainer does."""
    settings = parse_settings([*MODEL.split(), *flags.split()])
    sizes = resolve_sizes(settings, num_ranks)
    check_schedule(settings, sizes)
    return plan_for(settings, sizes, sizes.num_microbatches)


def refusal(flags: str, num_ranks: int = 4) -> str:
    """The sentence with which flags are refused."""
    with pytest.raises(MegaScanError) as caught:
        plan_of(flags, num_ranks)
    return str(caught.value)


def test_without_flags_the_schedule_is_megatron_cores() -> None:
    assert plan_of("--pipeline-model-parallel-size 4 --global-batch-size 8", 4) is None


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("--pipeline-schedule 1f1b", "1f1b"),
        ("--pipeline-schedule zb-h1", "zb-h1"),
        ("--pipeline-schedule bfc --num-virtual-stages-per-pipeline-rank 2", "bfc"),
        ("--use-dpp", "auto"),
        ("--use-dpp --pipeline-schedule zb-h1 --dpp-choice guided", "zb-h1"),
    ],
)
def test_flags_name_the_plan(flags: str, name: str) -> None:
    plan = plan_of(f"--pipeline-model-parallel-size 4 --global-batch-size 8 {flags}", 4)
    assert plan is not None
    assert plan.name == name
    assert plan.shape.num_microbatches == 8


def test_a_memory_limit_holds_what_is_searched_and_refuses_what_is_named() -> None:
    base = "--pipeline-model-parallel-size 4 --global-batch-size 8 --dpp-memory-limit 2.5"
    plan = plan_of(f"{base} --use-dpp", 4)
    assert plan is not None
    assert max(peak_memory(plan)) <= 2.5
    assert "holds activations of 4 at most, the limit is 2.5" in refusal(
        f"{base} --pipeline-schedule zb-h1"
    )
    assert "one was found for" in refusal(f"{base.replace('2.5', '0.5')} --use-dpp")


def test_a_larger_limit_gives_no_slower_plan() -> None:
    base = "--pipeline-model-parallel-size 4 --global-batch-size 8 --use-dpp"
    chunks = "--num-virtual-stages-per-pipeline-rank 2"
    little, much = (plan_of(f"{base} {chunks} --dpp-memory-limit {n}", 4) for n in (4, 5))
    assert little is not None
    assert much is not None
    assert max(peak_memory(little)) <= 4.0 < max(peak_memory(much))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pipeline-schedule zigzag", "--pipeline-schedule zigzag is neither a schedule nor"),
        ("--pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2", "one model chunk"),
        ("--dpp-choice guided", "--dpp-choice guided needs --use-dpp; add it"),
        ("--dpp-memory-limit 3", "--dpp-memory-limit needs --pipeline-schedule or --use-dpp"),
        ("--recompute-ahead", "--recompute-ahead needs --pipeline-schedule or --use-dpp"),
        (
            "--use-dpp --recompute-ahead --recompute-granularity selective",
            "--recompute-ahead and --recompute-granularity exclude each other",
        ),
        ("--dpp-microbatches 5", "names 1 replicas, but the data-parallel size is 2"),
        ("--dpp-microbatches 5,x", "is neither auto nor numbers with commas"),
        ("--dpp-microbatches 5,4", "makes 9 microbatches, but a step has 2 x 4 = 8"),
        ("--dpp-microbatches 8,0", "leaves a replica without work"),
        (
            "--dpp-microbatches 5,3 --num-experts 4 --expert-model-parallel-size 2",
            "replicas that share experts must run equal shares",
        ),
        (
            "--use-dpp --dpp-choice guided --num-experts 4 --expert-model-parallel-size 2",
            "replicas that share experts must run one order",
        ),
        (
            "--dpp-microbatches 5,3 --overlap-grad-reduce --num-virtual-stages-per-pipeline-rank 2",
            "would reduce their chunks in different orders",
        ),
        ("--microbatch-group-size-per-virtual-pipeline-stage 4", "needs several chunks on a rank"),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 1 "
            "--num-virtual-stages-per-pipeline-rank 2",
            "expected between the pipeline size 2 and the 4 microbatches",
        ),
        ("--fbd-helpers 1", "--fbd-port and --fbd-helpers are for --forward-backward-disagg"),
        (f"{FBD} --recompute-granularity selective", "and --recompute-granularity exclude each"),
        (f"{FBD} --tensor-model-parallel-size 2", "a helper runs stages that are whole"),
        (f"{FBD} --num-virtual-stages-per-pipeline-rank 2", "lie one on a rank"),
        (f"{FBD} --pipeline-schedule bfc", "take 1f1b, zb-h1 or auto"),
        (f"{FBD} --use-dpp --dpp-choice guided", "steps with helpers follow their plan"),
        (f"{FBD} --fbd-port 70000", "expected a port up to 65535"),
        (
            f"{FBD} --overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
            "helpers need the weights before the first forward",
        ),
        ("--forward-backward-disaggregating", "a helper would draw other masks"),
        (f"--plan-from {TIMELINE}", "--plan-from says what"),
        (f"--use-dpp --plan-from {EXAMPLES}", "is a folder, expected a timeline; make one with"),
        ("--use-dpp --plan-from nowhere.json", "nowhere.json"),
        (
            f"--use-dpp --num-virtual-stages-per-pipeline-rank 2 --plan-from {TIMELINE}",
            "is of 2 pipeline ranks with 1 chunk(s), but the job has 2 with 2",
        ),
        ("--pipeline-model-parallel-layout Et|tL", "has 2 layers, and it must be E, the"),
        ("--pipeline-model-parallel-layout Et*4|tt|ttL", "has 3 stages, expected a multiple of"),
        ("--pipeline-model-parallel-layout x", "is no layout; write E for the embedding"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(flags: str, words: str) -> None:
    sentence = refusal(f"--pipeline-model-parallel-size 2 --global-batch-size 8 {flags}")
    assert words in sentence
    assert "\n" not in sentence


def test_one_rank_has_no_pipeline_to_plan() -> None:
    assert refusal("--use-dpp", 1) == (
        "--use-dpp needs --pipeline-model-parallel-size 2 or more; add it"
    )


def test_a_plan_of_a_file_must_be_of_the_jobs_sizes(tmp_path: Path) -> None:
    """And one that hangs, or is out of order where order matters, is refused as well."""
    good = "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n"
    base = "--pipeline-model-parallel-size 2 --global-batch-size {size} --pipeline-schedule {file}"
    file = tmp_path / "plan.csv"
    file.write_text(good)
    plan = plan_of(base.format(size=2, file=file), 2)
    assert plan is not None
    assert plan.name == "plan"
    longer = refusal(base.format(size=4, file=file), 2)
    assert "is a plan of 2 microbatches, but the job has 4" in longer
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    assert plan_of(base.format(size=2, file=file), 2) is not None
    out_of_order = refusal(base.format(size=2, file=file) + " --use-dpp --dpp-choice guided", 2)
    assert "sums are formed in another order" in out_of_order
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert "plan plan hangs: rank 0 at 0B0 waits for 1B0" in refusal(
        base.format(size=2, file=file), 2
    )


def test_shares_are_even_or_as_they_are_given() -> None:
    for flags, expected in (("", None), ("auto", (4, 4)), ("5,3", (5, 3))):
        words = f"--pipeline-model-parallel-size 2 --global-batch-size 8 {MODEL}".split()
        words += ["--dpp-microbatches", flags] if flags else []
        settings = parse_settings(words)
        deal = deal_for(settings, resolve_sizes(settings, 4))
        assert (deal.shares if deal else None) == expected


def test_a_layout_gives_each_stage_its_layers() -> None:
    assert stages_of("Ettt|ttt|t|tL") == ["Ettt", "ttt", "t", "tL"]
    assert stages_of("E,t*3|(tt|)*2,tL") == ["Ettt", "tt", "tt", "tL"]
    settings = parse_settings(
        [
            *MODEL.split(),
            *("--pipeline-model-parallel-size", "2", "--global-batch-size", "4"),
            *("--pipeline-model-parallel-layout", "Ettt|tt|tt|tL"),
        ]
    )
    assert resolve_sizes(settings, 2).virtual_pipeline_size == 2


def test_a_job_that_takes_helpers_repeats_its_forwards_when_it_is_alone() -> None:
    base = "--pipeline-model-parallel-size 4 --global-batch-size 8"
    for schedule, splits in (("", False), ("--pipeline-schedule zb-h1", True)):
        plan = plan_of(f"{base} {FBD} {schedule}", 4)
        assert plan is not None
        assert plan.recomputes
        assert plan.splits_backward == splits


def test_a_trace_makes_another_plan_than_even_stages() -> None:
    """One rank of the traced job is slow; what is even there gets the plan of even stages."""
    base = "--pipeline-model-parallel-size 2 --global-batch-size 16 --use-dpp --dpp-memory-limit 3"
    traced, even = plan_of(f"{base} --plan-from {TIMELINE}", 4), plan_of(base, 4)
    assert traced is not None
    assert even is not None
    assert traced.actions != even.actions
    assert max(peak_memory(traced)) <= 3.0


def test_a_search_of_the_largest_size_named_is_short() -> None:
    """Processor time: a bound on the clock would fail on a loaded machine."""
    began_s = time.process_time()
    plan_of(
        "--pipeline-model-parallel-size 8 --global-batch-size 32 --num-layers 16 --use-dpp "
        "--num-virtual-stages-per-pipeline-rank 2",
        8,
    )
    assert time.process_time() - began_s < 2 * SEARCH_S


def test_forwards_of_another_tensor_parallel_size_are_refused() -> None:
    parser = build_parser("training", "trainer flags")
    add_original_arguments(parser)
    given = parser.parse_args(["--ignore-forward-tensor-parallel"])
    with pytest.raises(MegaScanError, match="add up in another order"):
        list(notes_on_original(given))


def test_flags_of_the_first_megadpp_are_taken_with_a_note() -> None:
    parser = build_parser("program", "text")
    add_original_arguments(parser)
    given = parser.parse_args(["--node-ips", "10.0.0.1", "--multi-node", "--workload", "8"])
    assert list(notes_on_original(given)) == [
        "--node-ips has no effect: torchrun brings the nodes together",
        "--workload has no effect: messages have the size of the model's activations",
        "--multi-node has no effect: torchrun knows how many nodes there are",
    ]


def test_a_plan_with_sums_in_another_order_is_said_to_differ(tmp_path: Path) -> None:
    plan = tmp_path / "own.csv"
    words = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"]
    settings = parse_settings([*MODEL.split(), *words, "--pipeline-schedule", str(plan)])
    sizes = resolve_sizes(settings, 2)
    plan.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert notes_on_plan(settings, sizes) == ()
    plan.write_text("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n")
    (note,) = notes_on_plan(settings, sizes)
    assert "differ within rounding" in note
