from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from megascan.errors import ConfigError
from megascan.schema import Phase
from megascan.simulate.stage_order import Exchange, Pass, stage_steps

SIZES = [(1, 1, 3), (2, 1, 1), (2, 1, 4), (4, 1, 2), (4, 1, 8), (2, 2, 4), (2, 3, 2), (4, 2, 8)]


def short(steps) -> list[str]:
    names = []
    for step in steps:
        if isinstance(step, Pass):
            names.append(f"{step.phase[0].upper()}{step.microbatch}")
        else:
            parts = [f"{t.op} {t.direction[0].upper()}{t.microbatch}" for t in step.transfers]
            names.append("+".join(parts))
    return names


def test_one_f_one_b_of_two_stages_is_the_textbook_order():
    first, second = stage_steps(2, 1, 2)
    assert short(first) == ["F0", "send F0", "F1", "send F1+recv B0", "B0", "recv B1", "B1"]
    assert short(second) == ["recv F0", "F0", "B0", "send B0+recv F1", "F1", "B1", "send B1"]


def test_without_pipeline_every_forward_is_followed_by_its_backward():
    (only,) = stage_steps(1, 1, 2)
    assert short(only) == ["F0", "B0", "F1", "B1"]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SIZES)
def test_every_microbatch_passes_every_chunk_once_in_each_direction(stages, chunks, microbatches):
    for steps in stage_steps(stages, chunks, microbatches):
        passes = Counter(step for step in steps if isinstance(step, Pass))
        expected = {
            Pass(phase, chunk, microbatch)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for chunk in range(chunks)
            for microbatch in range(microbatches)
        }
        assert set(passes) == expected
        assert set(passes.values()) == {1}


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SIZES)
def test_the_kth_send_and_the_kth_receive_carry_the_same_tensor(stages, chunks, microbatches):
    sent, received = {}, {}
    for stage, steps in enumerate(stage_steps(stages, chunks, microbatches)):
        for step in steps:
            for transfer in step.transfers if isinstance(step, Exchange) else ():
                ends = (stage, transfer.peer_stage)
                side = sent if transfer.op == "send" else received
                key = ends if transfer.op == "send" else ends[::-1]
                step_along = transfer.chunk * stages + stage
                if transfer.op == "recv":
                    step_along += -1 if transfer.direction == Phase.FORWARD else 1
                side[(*key, transfer.direction, transfer.sequence)] = (
                    transfer.microbatch,
                    step_along,
                )
    assert sent == received
    assert len(sent) == 2 * microbatches * (stages * chunks - 1)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SIZES[5:])
def test_interleaved_order_is_megatrons(stages, chunks, microbatches):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    table = schedules.get_schedule_table(microbatches, chunks, stages)
    for stage, steps in enumerate(stage_steps(stages, chunks, microbatches)):
        communicator = SimpleNamespace(
            pp_group=SimpleNamespace(size=lambda: stages, rank=lambda stage=stage: stage),
            virtual_pipeline_model_parallel_size=chunks,
        )
        *_, num_warmup, _ = schedules.get_pp_rank_microbatches(
            microbatches, chunks, stages, p2p_communicator=communicator
        )
        passes = [step for step in steps if isinstance(step, Pass)]
        first_backward = next(i for i, p in enumerate(passes) if p.phase == Phase.BACKWARD)
        assert first_backward == min(num_warmup + 1, microbatches * chunks)
        forwards = [(p.microbatch, p.chunk) for p in passes if p.phase == Phase.FORWARD]
        backwards = [(p.microbatch, p.chunk) for p in passes if p.phase == Phase.BACKWARD]
        assert forwards == table
        assert backwards == [(m, chunks - 1 - c) for m, c in table]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 2, 4), "needs pp of 2"),
        ((2, 2, 3), "multiples of pp"),
        ((2, 1, 0), "microbatches is 0"),
    ],
)
def test_sizes_megatron_refuses_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        stage_steps(*sizes)
