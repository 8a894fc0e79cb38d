"""Reading op tables: what is taken, and what is said about what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from detect.optable import Operation, OpTable, build_graph, read_op_table, replay_of_op_table
from megascan.cli.options import is_op_table
from megascan.errors import InputError

Rows = Callable[..., list]


def test_a_file_and_its_sizes(op_file: Callable[..., Path], data_parallel_rows: Rows) -> None:
    path = op_file(data_parallel_rows([1, 2]))
    assert is_op_table(path)
    path.with_name("meta-job.yaml").write_text("trial_name: job\ntp_size: 4\ndsp_size: 2\n")
    replay = replay_of_op_table(read_op_table(path))
    assert replay.num_gpus == 2 * 8
    assert replay.ranks.tolist() == [[0, 1]]
    assert replay.traced_s.tolist() == pytest.approx([12.75, 12.75])


def test_without_a_sizes_file_a_rank_is_one_gpu(
    op_file: Callable[..., Path], data_parallel_rows: Rows
) -> None:
    assert read_op_table(op_file(data_parallel_rows([1, 2]))).gpus_per_worker == 1


def test_other_files_are_no_op_tables(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    assert not is_op_table(tmp_path / "x.json")
    assert not is_op_table(tmp_path)


def test_a_missing_column_is_named(op_file: Callable[..., Path], data_parallel_rows: Rows) -> None:
    with pytest.raises(InputError, match="has no column 'seq_id', it has dp_rank"):
        read_op_table(op_file(data_parallel_rows([1]), drop="seq_id"))


def test_missing_values_are_counted(op_file: Callable[..., Path], data_parallel_rows: Rows) -> None:
    with pytest.raises(InputError, match="'duration' has 1 missing values in 12 rows"):
        read_op_table(op_file(data_parallel_rows([1]), null="duration"))


def test_impossible_values_are_named(
    op_file: Callable[..., Path], data_parallel_rows: Rows
) -> None:
    rows = data_parallel_rows([1])
    with pytest.raises(InputError, match=r"an operation lasts -1\.000000 s"):
        read_op_table(op_file([*rows[:-1], (*rows[-1][:6], -1.0)]))
    with pytest.raises(InputError, match="column 'seq_id' has -1, expected 0 or more"):
        read_op_table(op_file([*rows[:-1], (*rows[-1][:4], -1, *rows[-1][5:])]))


def test_a_damaged_file_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "trace-x.parquet"
    path.write_bytes(b"PAR1 and then nothing of use")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        read_op_table(path)


def test_a_wrong_size_is_an_input_error(
    op_file: Callable[..., Path], data_parallel_rows: Rows
) -> None:
    path = op_file(data_parallel_rows([1]))
    path.with_name("meta-job.yaml").write_text("tp_size: four\n")
    with pytest.raises(InputError, match="tp_size is 'four', expected 1 or more"):
        read_op_table(path)


def test_a_step_with_a_lost_row_is_left_out(
    op_table: Callable[[Sequence], OpTable], data_parallel_rows: Rows
) -> None:
    rows = data_parallel_rows([1, 2], num_steps=3)
    rows.remove(next(row for row in rows if row[:4] == (1, 0, 1, "backward-compute")))
    replay = replay_of_op_table(op_table(rows))
    assert replay.steps.tolist() == [0, 2]
    assert replay.notes == ("1 incomplete steps left out",)
    assert replay.measured.tolist() == pytest.approx([12.75, 12.75])


def test_a_step_with_a_row_twice_is_left_out(
    op_table: Callable[[Sequence], OpTable], data_parallel_rows: Rows
) -> None:
    rows = data_parallel_rows([1, 2], num_steps=3)
    replay = replay_of_op_table(op_table([*rows, rows[-1]]))
    assert replay.steps.tolist() == [0, 1]


def test_no_complete_step_is_an_error(
    op_table: Callable[[Sequence], OpTable], data_parallel_rows: Rows
) -> None:
    rows = data_parallel_rows([1, 2], num_steps=1)
    rows = [row for row in rows if row[:4] != (1, 0, 0, "optimizer")]
    with pytest.raises(InputError, match="no step with all 6 operations of all 2 replicas"):
        replay_of_op_table(op_table(rows))


def test_an_unknown_operation_is_named(
    op_table: Callable[[Sequence], OpTable], data_parallel_rows: Rows
) -> None:
    rows = [*data_parallel_rows([1]), (0, 0, 0, "nap", 0, 0.0, 1.0)]
    with pytest.raises(InputError, match="operations of type nap, known are"):
        replay_of_op_table(op_table(rows))


def operations(rows: Sequence[tuple[int, str, int, int, float, float]]) -> list[Operation]:
    return [
        Operation(
            number=n, stage=s, optype=t, ordinal=k, chunk=c, start_s=begin, end_s=begin + length
        )
        for n, (s, t, k, c, begin, length) in enumerate(rows)
    ]


def test_messages_pair_with_the_next_stage_and_wrap_around() -> None:
    """Two stages of two chunks: stage 1 sends chunk 0's output back to stage 0."""
    graph = build_graph(
        operations(
            [
                (0, "forward-compute", 0, 0, 0, 1),
                (0, "forward-send", 0, -1, 1, 1),
                (1, "forward-recv", 0, -1, 0, 2),
                (1, "forward-compute", 0, 0, 2, 1),
                (1, "forward-send", 0, -1, 3, 1),
                (0, "forward-recv", 0, -1, 1, 3),
                (0, "forward-compute", 1, 1, 4, 1),
                (0, "optimizer", 0, -1, 5, 1),
            ]
        ),
        num_lanes=1,
        reduces_gradients=False,
    )
    pairs = {group.nodes for group in graph.groups if len(group.nodes) == 2}
    assert pairs == {(1, 2), (4, 5)}


def test_a_late_receive_is_an_empty_exchange() -> None:
    graph = build_graph(
        operations(
            [
                (0, "forward-compute", 0, 0, 0, 1),
                (0, "forward-send", 0, -1, 1, 1),
                (1, "forward-recv", 0, -1, 0, 2),
                (1, "forward-compute", 0, 0, 2, 1),
                (1, "forward-recv", 1, -1, 2.5, 0.1),
                (0, "forward-send", 1, -1, 2.5, 0.1),
                (1, "optimizer", 0, -1, 3, 1),
            ]
        ),
        num_lanes=1,
        reduces_gradients=False,
    )
    assert {group.nodes for group in graph.groups if len(group.nodes) == 2} == {(1, 2)}


def test_overlapped_gradients_follow_their_chunk() -> None:
    """With the separate all-reduce, a reduce-scatter waits for its chunk's last backward only."""
    graph = build_graph(
        operations(
            [
                (0, "forward-compute", 0, 0, 0, 1),
                (0, "forward-compute", 1, 1, 1, 1),
                (0, "backward-compute", 0, 1, 2, 1),
                (0, "grads-reduce-scatter", 0, 1, 3, 1),
                (0, "backward-compute", 1, 0, 3, 1),
                (0, "grads-reduce-scatter", 1, 0, 4, 1),
                (0, "separate-grads-all-reduce", 0, -1, 5, 1),
                (0, "optimizer", 0, -1, 6, 1),
            ]
        ),
        num_lanes=2,
        reduces_gradients=True,
    )
    assert graph.dependencies[3] == (2,)
    assert graph.dependencies[5] == (3, 4)
    assert graph.dependencies[7] == (6,)
