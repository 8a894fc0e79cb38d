"""Rank files of the original MegaScan: names, groups, times, copies, and what is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import pyarrow as pa
import pytest

from megascan.errors import InputError
from megascan.parallel import Here
from megascan.reader import read_ends, read_trace
from megascan.schema import OWN_END
from megascan.timeline import END_COLUMNS, in_order, is_end
from megascan.topology import Layout

if TYPE_CHECKING:
    from conftest import Original

pytestmark = pytest.mark.usefixtures("each_way")


def spans(path: Path) -> pd.DataFrame:
    table: pd.DataFrame = read_trace(path).spans.to_pandas()
    return table


def test_one_rank_in_our_words(original: Original) -> None:
    original.num_steps = 1
    original.num_microbatches = 1
    table = spans(original.write())
    columns = ["kind", "name", "phase", "op", "group", "peer", "direction", "size_bytes"]
    one = table[table["rank"] == 1][columns].astype(object).values.tolist()
    assert one == [
        ["iteration", "iteration", "", "", "", -1, "", -1],
        ["host", "recv-extra", "", "", "", -1, "", -1],
        ["compute", "forward", "forward", "", "", -1, "", -1],
        ["compute", "decoder", "forward", "", "", -1, "", -1],
        ["compute", "attention", "forward", "", "", -1, "", -1],
        ["collective", "all_reduce", "", "all_reduce", "tp@0", -1, "", -1],
        ["p2p", "send_forward", "", "send", "pp@1", 5, "forward", 4096],
        ["p2p", "recv_backward", "", "recv", "pp@1", 5, "backward", 4096],
        ["compute", "backward", "backward", "", "", -1, "", -1],
        ["host", "send-extra", "", "", "", -1, "", -1],
        ["collective", "all_reduce", "", "all_reduce", "dp@1", -1, "", -1],
        ["optimizer", "optimizer", "", "", "", -1, "", -1],
    ]
    last = table[(table["rank"] == 7) & (table["kind"] == "p2p")]
    assert last[["name", "peer"]].values.tolist() == [["recv_forward", 3], ["send_backward", 3]]


def test_the_logged_loss_is_reduced_over_the_replicas(original: Original) -> None:
    """Its end is the same moment on all of them; that of the gradients is not where the embeddings
    of first and last stage are added within it.
    """
    original.has_loss = True
    table = spans(original.write())
    loss = table[table["name"] == "loss-sync"]
    assert set(loss["rank"]) == {4, 5, 6, 7}
    assert set(loss["group"]) == {"dp@4", "dp@5"}
    assert set(loss["size_bytes"]) == {4}
    gradients = table[(table["op"] == "all_reduce") & (table["name"] == "all_reduce")]
    gradients = gradients[gradients["group"].str.startswith("dp")]
    assert set(gradients["end_is_bound"]) == {OWN_END}
    original.pp = 3
    original.path = original.path.with_name("three stages")
    table = spans(original.write())
    middle = table[table["rank"].between(4, 7) & (table["group"].str.startswith("dp"))]
    assert set(middle["end_is_bound"]) == {-1}


def test_headers_and_layout(original: Original) -> None:
    trace = read_trace(original.write())
    assert trace.layout == Layout(tp=2, dp=2, pp=2)
    assert trace.headers[5].coordinates == trace.layout.coordinates(5)
    assert trace.headers[5].groups == {"tp@4": (4, 5), "dp@5": (5, 7), "pp@1": (1, 5)}
    assert len({header.clock.domain for header in trace.headers.values()}) == 8


def test_microbatch_is_handed_down_and_messages_are_numbered(original: Original) -> None:
    table = spans(original.write())
    second = table[(table["rank"] == 4) & (table["iteration"] == 2)]
    inner = second[second["name"].isin(["decoder", "attention", "all_reduce"])]
    assert inner["microbatch"].tolist() == [0, 0, 0, 1, 1, 1, -1]
    received = second[second["name"] == "recv_forward"]
    assert received["sequence"].tolist() == [0, 1]
    assert second[second["group"] == "tp@4"]["sequence"].tolist() == [0, 1]


def test_misnumbered_message_names_no_microbatch(original: Original) -> None:
    table = spans(original.write())
    sent = table[(table["rank"] == 7) & (table["name"] == "send_backward")]
    received = table[(table["rank"] == 7) & (table["name"] == "recv_forward")]
    assert set(sent["microbatch"]) == {-1}
    assert set(received["microbatch"]) == {0, 1}


def test_steps_lie_one_after_the_other_on_an_axis_all_ranks_share(original: Original) -> None:
    table = spans(original.write())
    steps = table[table["kind"] == "iteration"].set_index(["rank", "iteration"])
    longest_ns = steps["duration_ns"].groupby("iteration").max()[1] + 700
    first, second = steps["start_ns"].xs(1, level=1), steps["start_ns"].xs(2, level=1)
    assert first.nunique() == 1
    assert (second - first).unique().tolist() == [longest_ns + 5_000_000]
    inside = table[table["name"] == "forward"].groupby("rank")["start_ns"].min()
    assert inside[3] == 3 + 40  # behind its empty message


def test_files_without_passes_count_decoders(original: Original) -> None:
    path = original.write_rank(0, 0, 0)
    records = [
        record
        for record in json.loads(path.read_text())
        if record["name"] in ("iteration", "decoder", "attention", "_reduce", "optimizer")
    ]
    path.write_text(json.dumps(records, indent=2))
    table = spans(path)
    inner = table[table["name"].isin(["decoder", "attention"])]
    assert inner["microbatch"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_layers_in_names_of_early_versions_are_layers(original: Original) -> None:
    path = original.write_rank(0, 0, 0)
    layers = {"decoder": "transformer_layer_2", "attention": "mlp_2"}
    records = [
        record | {"name": layers.get(record["name"], record["name"])}
        for record in json.loads(path.read_text())
    ]
    path.write_text(json.dumps(records, indent=2))
    table = spans(path).set_index("name")["layer"]
    assert set(table["transformer_layer"]) == set(table["mlp"]) == {2}
    assert set(table["forward"]) == {-1}
    assert not {"transformer_layer_2", "mlp_2"} & set(table.index)


def edit(original: Original, change: object) -> Path:
    path = original.write_rank(0, 0, 0)
    records = json.loads(path.read_text())
    change(records)  # type: ignore[operator]
    path.write_text(json.dumps(records, indent=2))
    return path


def test_identical_copies_of_a_step_are_left_out(original: Original) -> None:
    expected = spans(original.write_rank(0, 0, 0))

    def copy_first_step(records: list[dict[str, object]]) -> None:
        length = next(n for n, record in enumerate(records) if "duration_wall" in record) + 1
        for number in range(3):  # the host looks at its clock again for each copy
            end = {**records[length - 1], "duration_wall": 1_000 + number}
            records[length:length] = [*records[: length - 1], end]

    path = edit(original, copy_first_step)
    trace = read_trace(path)
    pd.testing.assert_frame_equal(trace.spans.to_pandas(), expected)
    assert "rank 0: left out 3 identical copies of a step" in trace.completeness.notes


def test_scopes_outside_of_steps_and_instants_are_counted(original: Original) -> None:
    def add(records: list[dict[str, object]]) -> None:
        begin, end = dict(records[1]), {**records[1], "ph": "E"}
        records += [{**begin, "ph": "i"}, begin, end]

    trace = read_trace(edit(original, add))
    assert "rank 0: left out 1 scopes outside of steps, 1 instants" in trace.completeness.notes
    assert trace.windows[0][0].last_iteration == 2


def test_step_whose_scopes_do_not_nest_is_left_out(original: Original) -> None:
    trace = read_trace(edit(original, lambda records: records.pop(4)))
    assert "rank 0: left out 1 steps whose scopes do not nest" in trace.completeness.notes
    assert trace.windows[0][0].last_iteration == 1


def test_cut_anywhere_keeps_whole_steps(original: Original) -> None:
    path = original.write_rank(0, 0, 0)
    text = path.read_bytes()
    whole = spans(path)
    first_step = whole[whole["iteration"] == 1]
    at = text.index(b'"duration_cuda"')
    for cut in range(at + 300, len(text) - 400, 997):
        path.write_bytes(text[:cut])
        trace = read_trace(path)
        assert trace.spans.num_rows == len(first_step)
        assert trace.completeness.notes[-1].endswith("is cut off")
        assert trace.completeness.num_unfinished_spans > 0 or cut < at + 600


def test_other_layouts_of_the_json(original: Original) -> None:
    path = original.write_rank(0, 0, 0)
    expected = spans(path)
    records = json.loads(path.read_text())
    lines = ",\n".join(json.dumps(record) for record in records)
    for text in (json.dumps(records), json.dumps(records, indent=4), f"[\n{lines}\n]"):
        path.write_text(text)
        pd.testing.assert_frame_equal(spans(path), expected)


def test_blocks_cut_between_records(original: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    path = original.write_rank(1, 1, 1)
    expected = spans(path)
    monkeypatch.setattr("megascan.reader.lines.BLOCK_BYTES", 250)
    pd.testing.assert_frame_equal(spans(path), expected)


def test_texts_with_escapes_are_read_a_line_each(original: Original) -> None:
    path = original.write_rank(1, 0, 1)
    expected = spans(path)
    path.write_text(path.read_text().replace('"attention"', '"att\\u0065ntion"'))
    pd.testing.assert_frame_equal(spans(path), expected)


def test_what_stands_behind_the_array_is_no_record(original: Original) -> None:
    path = original.write_rank(0, 0, 1)
    expected = spans(path)
    path.write_text(path.read_text() + '\n,\n  {\n    "name": "mlp"\n  },\n  {\n  }\n]')
    pd.testing.assert_frame_equal(spans(path), expected)


def test_what_the_caller_has_to_do_is_done_while_files_are_read(original: Original) -> None:
    original.write()
    done = []

    class Watched(Here):
        def keep(self, work, tasks):
            for number, made in enumerate(super().keep(work, tasks)):
                done.append(f"read {number}")
                yield made

    def meanwhile() -> None:
        done.append("meanwhile")

    read_ends(original.path, Watched(1), meanwhile=meanwhile)
    assert done.count("meanwhile") == 1 and done[0] == "meanwhile"


@pytest.mark.parametrize("shard_bytes", [1, 8 << 20])
def test_spans_stay_with_who_read_them(
    original: Original, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    original.write()
    killed = (original.path / "benchmark-data-0-pipeline-0-tensor-0.json").read_text()[:90]
    (original.path / "benchmark-data-9-pipeline-9-tensor-9.json").write_text(killed)  # says no rank
    whole = read_trace(original.path)
    monkeypatch.setattr("megascan.reader.trace.SHARD_BYTES", shard_bytes)
    trace, kept = read_ends(original.path, Here(1))
    assert len(kept) == (9 if shard_bytes == 1 else 1)
    columns = whole.spans.column_names
    found = pa.concat_tables([one.open().select(columns) for one in kept]).unify_dictionaries()
    assert in_order(found).to_pylist() == in_order(whole.spans).to_pylist()
    assert trace.headers == whole.headers
    assert trace.spans.num_rows == sum(is_end(whole.spans))
    assert trace.spans.column_names == list(END_COLUMNS)


def test_damaged_record_is_named(original: Original) -> None:
    path = original.write_rank(0, 0, 0)
    path.write_text(path.read_text().replace('"rel_ts": 0,', '"rel_ts": 0.,', 1))
    with pytest.raises(InputError, match="record 2 is not a JSON event; restore the file"):
        read_trace(path)


def test_missing_rank(original: Original) -> None:
    original.write()
    (original.path / "benchmark-data-1-pipeline-0-tensor-0.json").unlink()
    with pytest.raises(InputError, match=r"found 7 in .*: rank 2 is missing"):
        read_trace(original.path)
    trace = read_trace(original.path, allow_missing_ranks=True)
    assert trace.completeness.missing_ranks == (2,)


def test_one_file_alone_tells_the_smallest_job_it_fits(original: Original) -> None:
    trace = read_trace(original.write_rank(1, 1, 0))
    assert trace.layout == Layout(tp=1, dp=5, pp=2)
    assert trace.completeness.ranks == (6,)


def test_ranks_of_different_jobs(original: Original) -> None:
    original.write_rank(0, 1, 0)
    original.tp = 3
    original.write_rank(1, 0, 0)
    with pytest.raises(InputError, match="fit no TP×DP×PP job together"):
        read_trace(original.path)
