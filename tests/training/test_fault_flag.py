"""Reading --inject-fault."""

from __future__ import annotations

import pytest

from megascan.errors import ConfigError
from training.arguments import Sizes, parse_settings, resolve_sizes
from training.faults.fault import FaultKind, FaultSpec, loading_ranks, parse_fault, parse_faults

FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 50 --lr 0.1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
)


@pytest.fixture
def sizes() -> Sizes:
    return resolve_sizes(parse_settings(FLAGS.split()), 8)


def test_all_keys_are_read() -> None:
    assert parse_fault("rank=3,kind=compute,factor=1.5,from=20,to=60") == FaultSpec(
        rank=3, kind=FaultKind.COMPUTE, factor=1.5, first_iteration=20, last_iteration=60
    )
    assert parse_fault("kind=link, delay=2.5, peer=0, rank=1") == FaultSpec(
        rank=1, kind=FaultKind.LINK, delay_ms=2.5, peer=0
    )


def test_a_fault_acts_in_its_iterations_both_ends_included() -> None:
    fault = parse_fault("rank=0,kind=host,factor=2,from=3,to=4")
    assert [i for i in range(1, 7) if fault.acts_in(i)] == [3, 4]
    assert parse_fault("rank=0,kind=host,factor=2").acts_in(10**6)


def test_several_faults_at_once(sizes: Sizes) -> None:
    texts = [f"rank=0,kind={kind},factor=2" for kind in FaultKind]
    assert [fault.kind for fault in parse_faults(texts, sizes)] == list(FaultKind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind=compute,factor=2", "rank= is missing"),
        ("rank=1,factor=2", "kind= is missing"),
        ("rank=1,kind=cpu,factor=2", "kind 'cpu' is unknown"),
        ("rank=1,kind=compute,speed=2", "cannot read 'speed=2'"),
        ("rank=1,kind=compute,factor", "cannot read 'factor'"),
        ("", "cannot read ''"),
        ("rank=1,rank=2,kind=compute,factor=2", "rank= is given twice"),
        ("rank=-1,kind=compute,factor=2", "rank is '-1'"),
        ("rank=x,kind=compute,factor=2", "rank is 'x'"),
        ("rank=1,kind=compute,factor=fast", "factor is 'fast'"),
        ("rank=1,kind=compute,factor=nan", "factor is 'nan'"),
        ("rank=1,kind=compute,factor=1", "factor is 1, expected more than 1"),
        ("rank=1,kind=compute", "expected either factor= or delay="),
        ("rank=1,kind=loader,factor=2,delay=5", "expected either factor= or delay="),
        ("rank=1,kind=gc,delay=0", "delay is 0"),
        ("rank=1,kind=compute,delay=5", "kind compute takes factor="),
        ("rank=1,kind=host,factor=2,peer=2", "peer= belongs to kind=link"),
        ("rank=1,kind=link,factor=2,peer=1", "rank and peer are the same"),
        ("rank=1,kind=host,factor=2,from=9,to=8", "to=8 is before from=9"),
        ("rank=1,kind=host,factor=2,from=0", "from is '0'"),
        ("rank=8,kind=host,factor=2", "rank 8 is not one of the 8 ranks"),
        ("rank=1,kind=link,factor=2,peer=8", "peer 8 is not one of the 8 ranks"),
        ("rank=1,kind=host,factor=2,from=51", "after the last of 50 iterations"),
        ("rank=1,kind=loader,factor=2", "rank 1 loads no data, only these do: 0, 2, 4, 6"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, message: str, sizes: Sizes) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults([text], sizes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_outer_stages_load(sizes: Sizes) -> None:
    assert loading_ranks(sizes) == [0, 2, 4, 6]
    four_stages = FLAGS.replace("parallel-size 2 --pipeline-model-parallel-size 2",
                                "parallel-size 1 --pipeline-model-parallel-size 4")  # fmt: skip
    assert loading_ranks(resolve_sizes(parse_settings(four_stages.split()), 4)) == [0, 3]
