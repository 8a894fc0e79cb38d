"""Flipped bits are found and named; sound replicas never are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.planted_bits import trials
from detect.causes.corruption import deviations, findings_of
from detect.report import Cause, Owner
from megascan.errors import InputError
from megascan.probes import (
    Point,
    Prober,
    Probes,
    header_line,
    probe_file_name,
    probe_line,
    read_probes,
)
from megascan.topology import Layout
from megascope.interventions import flip_bits
from megascope.probe import Probe, ProbedDevice, Size, Stack, checksum, sweep

from .conftest import run_ranks
from .scoped_model import run

PROBING = Path(__file__).with_name("probing_ranks.py")
NUM_REPLICAS = 4


@pytest.fixture(scope="module")
def model(alone: None, written: dict[str, Any]) -> Any:
    from .scoped_model import load

    return load(written["llama"].folder, 1, 1)


def job_of(probe: Probe) -> dict[int, Prober]:
    layout = Layout(dp=NUM_REPLICAS)
    return {
        rank: Prober(rank=rank, layout=layout, host=f"n{rank}", device="cpu", points=probe.points)
        for rank in range(layout.world_size)
    }


def named_points(planted: str) -> set[str]:
    """Names by which a planted fault may be called: those of the same numbers."""
    last = "layer 5 "
    return {planted, last + planted}


def test_every_planted_bit_is_found_and_named_with_rank_layer_and_module(model: Any) -> None:
    probe = Probe([model])
    sound = probe.run(lambda: run(model))
    probers = job_of(probe)
    draws = random.Random(3)
    for number, (planted, fault) in enumerate(trials(model, 200)):
        with fault:
            wrong = probe.run(lambda: run(model))
        rank = draws.randrange(NUM_REPLICAS)
        sums = {one: {number: wrong if one == rank else sound} for one in range(NUM_REPLICAS)}
        (found,) = deviations(Probes(probers=probers, sums=sums))
        assert found.ranks == (rank,) and found.is_decided, planted
        assert found.point.words in named_points(planted), (planted, found.point.words)
    assert probe.run(lambda: run(model)) == sound


def test_sound_replicas_agree(model: Any) -> None:
    probe = Probe([model])
    first = probe.run(lambda: run(model))
    sums: dict[int, dict[int, tuple[str, ...]]] = {
        rank: {n: probe.run(lambda: run(model)) for n in range(25)} for rank in range(NUM_REPLICAS)
    }
    assert deviations(Probes(probers=job_of(probe), sums=sums)) == []
    assert sums[3][24] == first


def test_a_probe_leaves_nothing_behind(model: Any) -> None:
    before = run(model)
    Probe([model]).run(lambda: run(model))
    assert torch.equal(before, run(model))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    from megatron.core.tensor_parallel import layers, mappings

    name = "reduce_from_tensor_model_parallel_region"
    assert getattr(layers, name) is getattr(mappings, name)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_a_checksum_sees_any_bit_and_any_order(kind: torch.dtype) -> None:
    tensor = (torch.randn(1000) * 100).to(kind)
    own = checksum(tensor)
    assert torch.equal(own, checksum(tensor.view(10, 100)))
    width = 8 * tensor.element_size()
    for bit in range(width):
        with flip_bits(tensor, torch.tensor([37 + bit]), torch.tensor([bit])):
            assert checksum(tensor)[0] != own[0]
    assert checksum(tensor.flip(0))[1] != own[1]


def test_large_tensors_are_summed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000)
    whole = checksum(tensor)
    monkeypatch.setattr("megascope.probe._BLOCK", 64)
    assert torch.equal(whole, checksum(tensor))


# What the comparison does with any points, without a model.

POINTS = tuple(
    Point(layer, name) for layer in (1, 2) for name in ("fc1.weight (weight)", "fc1", "fc2")
)


def probes_of(layout: Layout, wrong: dict[int, Sequence[int]], **prober: Any) -> Probes:
    """One probe of a job whose ranks have wrong bits at some points."""
    probers, sums = {}, {}
    for rank in range(layout.world_size):
        stage = layout.coordinates(rank).pp
        points = tuple(Point(one.layer + 2 * stage, one.name) for one in POINTS)
        probers[rank] = Prober(rank=rank, layout=layout, host="h", device="cpu", points=points)
        sums[rank] = {7: tuple(
            f"wrong{rank}" if number in wrong.get(rank, ()) else f"{stage}.{number}"
            for number in range(len(points))
        )}  # fmt: skip
    return Probes(probers={r: replace(p, **prober) for r, p in probers.items()}, sums=sums)


def test_what_follows_from_a_wrong_rank_is_not_blamed() -> None:
    """TP2 x PP2 x DP3: rank 3 (TP1, DP1, first stage) is wrong, its whole replica follows."""
    layout = Layout(tp=2, dp=3, pp=2)
    wrong = {3: [4, 5], 2: [5], 8: [1, 2, 4, 5], 9: [1, 2, 4, 5]}
    (found,) = deviations(probes_of(layout, wrong))
    assert (found.ranks, found.point, found.num_points) == ((3,), Point(2, "fc1"), 2)


def test_a_sum_that_is_wrong_on_all_its_ranks_names_them_together() -> None:
    (found,) = deviations(probes_of(Layout(tp=2, dp=3), {2: [2, 4, 5], 3: [2, 4, 5]}))
    assert found.ranks == (2, 3) and found.point == Point(1, "fc2")


def test_two_faults_in_two_replicas_are_two_findings() -> None:
    probes = probes_of(Layout(dp=5), {1: [1, 2], 4: [5]})
    assert [(one.ranks, one.point.words) for one in deviations(probes)] == [
        ((1,), "layer 1 fc1"), ((4,), "layer 2 fc2"),
    ]  # fmt: skip


def test_a_damaged_weight_is_named_behind_an_earlier_fault_too() -> None:
    probes = probes_of(Layout(tp=2, dp=3), {2: [1, 2, 4, 5], 3: [2, 3, 4, 5]})
    assert [(one.ranks, one.point.words) for one in deviations(probes)] == [
        ((2,), "layer 1 fc1"), ((3,), "layer 2 fc1.weight (weight)"),
    ]  # fmt: skip


def test_of_two_replicas_nobody_can_say_which_is_right() -> None:
    (finding,), notes = findings_of(probes_of(Layout(dp=2), {1: [4, 5]}))
    assert (finding.owner, finding.ranks) == (Owner.UNDECIDED, (0, 1))
    assert "one of ranks 0 and 1" in finding.headline and notes == ()


def test_replicas_that_all_differ_are_no_accusation_but_a_note() -> None:
    wrong = {rank: [1, 2, 4, 5] for rank in range(3)}
    findings, notes = findings_of(probes_of(Layout(dp=4), wrong))
    assert findings == () and "not bit-stable" in notes[0]


def test_without_a_replica_there_is_nothing_to_compare() -> None:
    findings, notes = findings_of(probes_of(Layout(tp=2, pp=2), {1: [1]}))
    assert findings == () and "nothing to compare" in notes[0]


def test_other_devices_are_not_compared() -> None:
    probes = probes_of(Layout(dp=3), {2: [0, 1, 2, 3, 4, 5]})
    probers = dict(probes.probers)
    probers[2] = replace(probers[2], device="another chip")
    assert deviations(replace(probes, probers=probers)) == []


EXPERT_POINTS = tuple(
    Point(1, name) for name in ("mlp.experts.weight1 (weight)", "qkv", "experts", "residual")
)


def expert_probes(wrong: dict[int, Sequence[int]], dp: int) -> Probes:
    """One probe of DP ranks of which two share the experts: bits of experts differ by share."""
    layout = Layout(dp=dp, ep=2)
    probers, sums = {}, {}
    for rank in range(dp):
        share = layout.coordinates(rank).ep
        probers[rank] = Prober(
            rank=rank, layout=layout, host="h", device="cpu", points=EXPERT_POINTS
        )
        sums[rank] = {7: tuple(
            f"wrong{rank}" if number in wrong.get(rank, ()) else
            f"{number}.{share if point.is_of_experts else 0}"
            for number, point in enumerate(EXPERT_POINTS)
        )}  # fmt: skip
    return Probes(probers=probers, sums=sums)


def test_experts_are_compared_with_those_of_the_same_share() -> None:
    assert deviations(expert_probes({}, 4)) == []
    (found,) = deviations(expert_probes({3: [0, 2, 3], 2: [3]}, 6))
    assert (found.ranks, found.point.is_weight, found.is_decided) == ((3,), True, True)


def test_who_got_wrong_tokens_from_a_rank_is_not_blamed_for_them() -> None:
    """Rank 2 is wrong at qkv; its partner's experts compute some of its tokens."""
    (found,) = deviations(expert_probes({2: [1, 2, 3], 3: [2]}, 4))
    assert (found.ranks, found.point) == ((2,), Point(1, "qkv"))


def test_of_two_shares_of_experts_nobody_can_say_which_is_right() -> None:
    found = deviations(expert_probes({3: [2, 3], 2: [3]}, 4))
    assert [(one.ranks, one.is_decided) for one in found] == [((1, 3), False)]


def test_a_finding_says_rank_layer_module_and_what_to_do() -> None:
    (finding,), _ = findings_of(probes_of(Layout(tp=2, dp=3), {4: [0, 1]}))
    assert (finding.cause, finding.owner, finding.ranks) == (Cause.CORRUPTION, Owner.NODE, (4,))
    assert "rank 4 (DP2 TP0, host h) computes wrongly" in finding.headline
    assert "first at layer 1 fc1.weight (weight)" in finding.headline
    assert "checkpoint" in finding.next_steps[1]


def written_probes(folder: Path, layout: Layout, wrong: dict[int, Sequence[int]]) -> Probes:
    probes = probes_of(layout, wrong)
    for rank, prober in probes.probers.items():
        text = header_line(prober) + probe_line(7, probes.sums[rank][7])
        (folder / probe_file_name(rank)).write_text(text)
    return probes


def test_files_are_read_back_and_the_newest_run_counts(tmp_path: Path) -> None:
    probes = written_probes(tmp_path, Layout(dp=3), {1: [4]})
    assert read_probes(tmp_path) == probes
    file = tmp_path / probe_file_name(1)
    file.write_text(file.read_text() + header_line(probes.probers[1]) + '{"iteration":9,"su')
    again = read_probes(tmp_path)
    assert again is not None and again.sums[1] == {}
    assert read_probes(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "line",
    ['{"iteration":1,"sums":["a"]}', '{"iteration":"x","sums":[]}', "[1]", "{", '{"points":3}'],
)
def test_damaged_files_are_said_in_a_sentence(line: str, tmp_path: Path) -> None:
    probes = written_probes(tmp_path, Layout(dp=2), {})
    file = tmp_path / probe_file_name(0)
    file.write_text(header_line(probes.probers[0]) + line + "\n")
    with pytest.raises(InputError, match="scope-probe-00000"):
        read_probes(tmp_path)


def test_points_are_in_the_order_of_computing(model: Any) -> None:
    probe = Probe([model])
    probe.run(lambda: run(model))
    layers = [point.layer for point in probe.points]
    assert layers == sorted(layers) and set(layers) == set(range(6))
    for _, group in itertools.groupby(probe.points, key=lambda point: point.layer):
        kinds = [point.is_weight for point in group]
        assert kinds == sorted(kinds, reverse=True)


@pytest.mark.parametrize("num_iterations", [1, 12])
def test_verdict_of_a_trace_has_the_corruption_of_its_folder(
    num_iterations: int, tmp_path: Path, megascan: Callable[..., Any]
) -> None:
    """A trace that is too short to judge speeds shows wrong bits all the same."""
    trace, page = tmp_path / "trace", tmp_path / "page.html"
    made = megascan("simulate", "--dp", "4", "--iterations", num_iterations, "-o", trace)
    assert made.returncode == 0, made.stderr
    written_probes(trace, Layout(dp=4), {2: [1, 2]})
    found = megascan("detect", trace, "--fail-on-finding")
    assert found.returncode == 3, found.stdout + found.stderr
    assert "DEGRADED: rank 2 (DP2, host h) computes wrongly in 1 of 1 probe" in found.stdout
    assert "cause     corruption, owner: the node" in found.stdout
    assert "slowdown" not in found.stdout.split("What this trace")[0]
    alone = megascan("probe", trace)
    assert alone.returncode == 3 and "layer 1 fc1" in alone.stdout
    drawn = megascan("report", trace, "-o", page)
    assert drawn.returncode == 0 and drawn.stdout.startswith("DEGRADED: rank 2"), drawn.stderr
    assert "rank 2 (DP2, host h) computes wrongly" in page.read_text()


FAULTS = [
    {"rank": 3, "after": 2, "module": "decoder.layers.0.mlp.linear_fc1"},
    {"rank": 4, "after": 4, "weight": "decoder.layers.1.self_attention.linear_qkv.weight"},
]
"""TP2 x DP3: once a wrong activation, later a weight that stays damaged."""
FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --make-vocab-size-divisible-by 16
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1
    --global-batch-size 3 --lr 5e-3 --log-interval 1 --num-workers 0 --distributed-backend gloo
    --train-iters 5 --eval-iters 0 --tensor-model-parallel-size 2 --sequence-parallel
"""


@pytest.mark.distributed
def test_a_training_job_finds_who_computes_wrongly(tmp_path: Path) -> None:
    import json

    run_ranks(
        6, PROBING, json.dumps(FAULTS), *FLAGS.split(), "--probe-interval", "1",
        "--trace-dir", tmp_path,
    )  # fmt: skip
    probes = read_probes(tmp_path)
    assert probes is not None and probes.iterations == (1, 2, 3, 4, 5)
    found = [(one.iteration, one.ranks, one.point.words) for one in deviations(probes)]
    weight = "layer 2 self_attention.linear_qkv.weight (weight)"
    assert found[:2] == [(2, (3,), "layer 1 fc1"), (4, (4,), weight)]
    findings, _ = findings_of(probes)
    assert [one.ranks for one in findings[:2]] == [(3,), (4,)]
    assert "comes and goes" in findings[0].evidence[1]
    assert "before its sum over tensor ranks" in str(probes.probers[0].points)


def test_a_devices_fault_is_found_before_a_job_begins(capsys: pytest.CaptureFixture[str]) -> None:
    size = Size(num_layers=2, hidden=32, heads=2, num_tokens=16, dtype=torch.float32)
    devices = [ProbedDevice(name=f"core {n}", kind="cpu", torch_name="cpu") for n in range(3)]

    def spoil(point: Point, tensor: torch.Tensor) -> torch.Tensor:
        if point == Point(2, "attention"):
            flip_bits(tensor, torch.tensor([5]), torch.tensor([0]))
        return tensor

    stacks = [Stack(size, one) for one in devices]
    assert deviations(sweep(stacks, 3)) == []
    stacks[1].spoil = spoil
    found = deviations(sweep(stacks, 2))
    assert [(one.iteration, one.ranks, one.point) for one in found] == [
        (1, (1,), Point(2, "attention")), (2, (1,), Point(2, "attention")),
    ]  # fmt: skip


def test_the_command_probes_this_hosts_cores(megascan: Callable[..., Any]) -> None:
    done = megascan("probe", "--cpu", "--rounds", "2")
    if "one core to use" in done.stderr:
        pytest.skip("this machine has one core")
    assert done.returncode == 0, done.stderr
    assert "no wrong bits" in done.stdout and "agree in 2 rounds (1 to 2)" in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--rounds", "0"], 2, "--rounds is 0"),
        (["{folder}"], 1, "holds no probes"),
    ],
)
def test_what_cannot_be_probed_is_said(
    words: list[str], code: int, said: str, tmp_path: Path, megascan: Callable[..., Any]
) -> None:
    done = megascan("probe", *(word.format(folder=tmp_path) for word in words))
    assert done.returncode == code and said in done.stderr
