"""Plans as text: torch's CSV, in and out."""

import pytest
from torch.distributed.pipelining.schedules import _Action

from megascan.errors import InputError
from tests.pipeline.shapes import shape
from training.pipeline.generators import depth_first, one_forward_one_backward, zero_bubble_h1
from training.pipeline.plan import Placement, format_plan, parse_plan, read_plan

PLANS = [
    one_forward_one_backward(shape(4, 8)),
    zero_bubble_h1(shape(3, 5)),
    depth_first(shape(2, 4, 2)),
    depth_first(shape(2, 4, 2)).with_transfers(ahead=1),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_what_is_written_is_read_again(plan, tmp_path):
    path = tmp_path / f"{plan.name}.csv"
    path.write_text(format_plan(plan))
    assert read_plan(path) == plan


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_torch_reads_the_same_actions(plan):
    rows = [line.split(",") for line in format_plan(plan).splitlines()]
    read = [[_Action.from_str(cell) for cell in row] for row in rows]
    written = [[(a.stage, a.kind.value, a.microbatch) for a in listed] for listed in plan.actions]
    assert [
        [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in row] for row in read
    ] == written


def test_idle_cells_of_torch_are_skipped():
    plan = parse_plan("0F0,,0B0\n,1F0,1B0\n")
    assert [len(listed) for listed in plan.actions] == [2, 2]


def test_sizes_follow_from_the_file():
    plan = parse_plan("0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n")
    assert plan.shape == shape(2, 1, 2)


def test_a_second_chunk_that_turns_back_is_a_v():
    plan = parse_plan("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    assert plan.shape.placement is Placement.V
    assert [plan.shape.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X3\n", "line 1, cell 2: '0X3' is no action"),
        ("0F0\n\n1F0\n", "line 2: no action"),
        ("0F0\n1F0\n2F0,2B0\n0B0\n", "3 stages on 4 lines"),
        ("0F99999999\n", "is no action"),
        ("", "line 1: no action"),
    ],
)
def test_a_file_that_is_no_plan_is_refused_with_its_place(text, words):
    with pytest.raises(InputError, match=r"plan\.csv") as caught:
        parse_plan(text, name="plan.csv")
    assert words in str(caught.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such plan"):
        read_plan(tmp_path / "plan.csv")
    (tmp_path / "plan.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "plan.csv")
