from __future__ import annotations

import numpy as np

from aggregate import merge
from aggregate.clocks import align_clocks
from aggregate.match import match_spans
from megascan.timeline import numbers
from megascan.topology import Layout

PAIR = {"tp@0": (0, 1)}


def matched(build, rows, groups=None, **options):
    trace = build.trace(rows, groups, **options)
    return match_spans(trace.spans, trace.headers)


def test_members_share_an_id_by_sequence_and_not_by_arrival(build):
    rows = [
        build.collective(0, "tp@0", 0, 10, sequence=1),
        build.collective(0, "tp@0", 20, 30, sequence=0),
        build.collective(1, "tp@0", 0, 10, sequence=0),
        build.collective(1, "tp@0", 20, 30, sequence=1),
    ]
    found = matched(build, rows, PAIR)
    assert found.match.tolist() == [1, 0, 0, 1]
    assert found.num_matches == 2
    assert found.num_unmatched == {"collective": 0, "p2p": 0}
    assert found.notes == ()


def test_a_missed_event_leaves_its_partner_unmatched_and_the_rest_in_place(build):
    rows = [build.collective(rank, "tp@0", 10 * n, 10 * n + 5, sequence=n)
            for rank in (0, 1) for n in range(4) if (rank, n) != (1, 1)]  # fmt: skip
    found = matched(build, rows, PAIR)
    assert found.match.tolist() == [0, -1, 1, 2, 0, 1, 2]
    assert found.num_unmatched == {"collective": 1, "p2p": 0}
    assert found.notes == ("1 collective span without a counterpart, most on rank 0 (1)",)


def test_groups_ops_and_iterations_are_told_apart(build):
    rows = [
        row
        for rank in (0, 1)
        for row in (
            build.collective(rank, "tp@0", 0, 1),
            build.collective(rank, "dp@0", 2, 3),
            build.collective(rank, "tp@0", 4, 5, op="all_gather"),
            build.collective(rank, "tp@0", 6, 7, iteration=2),
        )
    ]
    found = matched(build, rows, PAIR | {"dp@0": (0, 1)})
    assert found.num_matches == 4
    assert sorted(found.match[:4].tolist()) == [0, 1, 2, 3]
    assert found.match[:4].tolist() == found.match[4:].tolist()


def test_the_second_of_two_equal_keys_is_a_duplicate(build):
    rows = [
        build.collective(0, "tp@0", 0, 10),
        build.collective(0, "tp@0", 20, 30),
        build.collective(1, "tp@0", 0, 10),
    ]
    found = matched(build, rows, PAIR)
    assert found.match.tolist() == [0, -1, 0]
    assert (found.num_duplicates, found.num_unmatched["collective"]) == (1, 0)
    assert found.notes == ("1 collective span recorded twice, most on rank 0 (1)",)


def test_ids_do_not_depend_on_the_order_in_which_names_were_met(build):
    groups = {"tp@0": (0, 1), "dp@0": (0, 1)}
    rows = [build.collective(rank, name, at, at + 1)
            for rank in (0, 1) for name, at in (("tp@0", 0), ("dp@0", 5))]  # fmt: skip
    trace = build.trace(rows, groups)
    again = build.trace([build.collective(1, "dp@0", 9, 9), *rows][1:], groups)
    first = match_spans(trace.spans, trace.headers).match
    assert first.tolist() == match_spans(again.spans, again.headers).match.tolist() == [1, 0, 1, 0]


def test_present_members_match_without_a_rank_whose_file_is_missing(build):
    layout = Layout(dp=3)
    rows = [build.collective(rank, "dp@0", 0, 10) for rank in (0, 2)]
    found = matched(build, rows, {"dp@0": (0, 1, 2)}, layout=layout, ranks=[0, 2])
    assert found.match.tolist() == [0, 0]
    assert found.notes == (
        "1 process groups have members without a file: their waits are lower bounds and their "
        "transfers upper bounds",
    )


def test_a_span_whose_partners_all_have_no_file_is_unmatched(build):
    found = matched(build, [build.collective(0, "tp@0", 0, 1)], PAIR, ranks=[0])
    assert found.match.tolist() == [-1]
    assert found.num_unmatched["collective"] == 1


def test_a_group_of_one_matches_itself(build):
    rows = [build.collective(rank, f"tp@{rank}", 0, 5) for rank in (0, 1)]
    found = matched(build, rows, {"tp@0": (0,), "tp@1": (1,)})
    assert found.match.tolist() == [0, 1]


def test_a_group_that_no_header_declares_is_made_of_the_ranks_that_record_it(build):
    rows = [build.collective(rank, "comm 17", 0, 5, sequence=n)
            for rank in (0, 1) for n in range(2) if (rank, n) != (1, 1)]  # fmt: skip
    assert matched(build, rows).match.tolist() == [0, -1, 0]


def test_a_rank_outside_the_declared_group_does_not_match(build):
    rows = [build.collective(rank, "tp@0", 0, 5) for rank in (0, 1, 2)]
    found = matched(build, rows, PAIR, layout=Layout(dp=3))
    assert found.match.tolist() == [0, 0, -1]


def test_brackets_without_an_op_are_neither_matched_nor_counted(build):
    rows = [build.collective(0, "", 0, 50, op="", sequence=-1)]
    found = matched(build, rows)
    assert found.match.tolist() == [-1]
    assert found.num_unmatched["collective"] == 0


def test_messages_pair_by_channel_although_chunks_differ(build):
    rows = [
        build.send(0, 1, 0, 5, microbatch=0, chunk=0, sequence=0),
        build.send(0, 1, 10, 15, microbatch=1, chunk=0, sequence=1),
        build.receive(0, 1, 20, 25, direction="backward", microbatch=0),
        build.receive(1, 0, 1, 6, microbatch=-1, chunk=1, sequence=0),
        build.receive(1, 0, 11, 16, microbatch=1, chunk=-1, sequence=1),
        build.send(1, 0, 20, 24, direction="backward", microbatch=0),
    ]
    found = matched(build, rows)
    assert found.num_matches == 3
    assert found.match[:3].tolist() == found.match[3:].tolist()
    assert found.num_unmatched["p2p"] == 0


def test_pairs_that_name_different_microbatches_are_left_unmatched(build):
    rows = [
        build.send(0, 1, 0, 5, microbatch=0),
        build.send(0, 1, 10, 15, microbatch=1, sequence=1),
        build.receive(1, 0, 0, 5, microbatch=3),
        build.receive(1, 0, 10, 15, microbatch=1, sequence=1),
    ]
    found = matched(build, rows)
    assert found.match.tolist() == [-1, 0, -1, 0]
    assert found.num_unmatched["p2p"] == 2
    assert "1 send/recv pairs name different microbatches and are left unmatched" in found.notes


def test_a_collective_and_a_message_never_share_an_id(build):
    rows = [
        build.collective(0, "tp@0", 0, 5),
        build.send(0, 1, 6, 8),
        build.collective(1, "tp@0", 0, 5),
        build.receive(1, 0, 6, 8),
    ]
    assert matched(build, rows, PAIR).match.tolist() == [0, 1, 0, 1]


def test_every_event_of_a_large_job_matches_exactly_once(build):
    trace, _ = build.skewed_job(Layout(tp=2, dp=3, pp=2), 30)
    found = match_spans(trace.spans, trace.headers)
    sizes = np.bincount(found.match)
    assert (found.match >= 0).all()
    assert sizes.sum() == trace.spans.num_rows
    assert sorted(set(sizes.tolist())) == [2, 3]
    group = np.array(trace.spans.column("group").to_pylist())
    sequence = numbers(trace.spans, "sequence")
    for match in range(0, found.num_matches, 7):
        members = found.match == match
        assert len(set(group[members])) == len(set(sequence[members])) == 1


def test_nothing_to_match_is_no_error(build):
    found = matched(build, [build.span(0, "compute", "forward", 0, 5)])
    assert (found.match.tolist(), found.num_matches) == ([-1], 0)


def many_iterations(build):
    """Rows with all that can go wrong: a missed event, one twice, microbatches that contradict."""
    rows = []
    for iteration in (3, 1, 7, 2, 5):
        at = 1_000_000 * iteration
        for rank in (0, 1):
            common = {"iteration": iteration}
            rows += [
                build.collective(rank, "tp@0", at + 90 * n + 9 * rank, at + 90 * n + 70,
                                 sequence=n, **common)
                for n in range(4) if (rank, n, iteration) != (1, 2, 7)
            ]  # fmt: skip
            rows.append(
                build.collective(rank, "tp@0", at + 400, at + 460, op="broadcast", **common)
            )
        rows.append(build.collective(0, "tp@0", at + 500, at + 510, sequence=0, **common))
        rows.append(build.send(1, 0, at + 600, at + 650, microbatch=0, **common))
        rows.append(build.receive(0, 1, at + 605, at + 660, microbatch=iteration // 5, **common))
    return rows


def test_iterations_matched_in_parts_give_what_they_give_together(build, monkeypatch):
    trace = build.trace(many_iterations(build), PAIR)
    together = match_spans(trace.spans, trace.headers)
    clocks = align_clocks(trace.spans, together, trace.headers)
    waits = merge.split_waits(trace.spans, together, clocks)
    assert together.num_duplicates == 5
    assert together.num_unmatched == {"collective": 1, "p2p": 4}
    assert together.match.max() > 0 and (waits > 0).any()
    monkeypatch.setattr("aggregate.match._BLOCK_ENDS", 7)
    monkeypatch.setattr(merge, "_BLOCK_ENDS", 3)
    apart = match_spans(trace.spans, trace.headers)
    for name in ("match", "members"):
        assert getattr(apart, name).tolist() == getattr(together, name).tolist()
    for name in (
        "num_matches",
        "num_collective_members",
        "num_unmatched",
        "num_duplicates",
        "notes",
    ):
        assert getattr(apart, name) == getattr(together, name)
    assert merge.split_waits(trace.spans, apart, clocks).tolist() == waits.tolist()


def test_members_stand_in_the_order_of_matches_also_when_rows_are_reordered(build):
    trace = build.trace(many_iterations(build), PAIR)
    found = match_spans(trace.spans, trace.headers)
    order = np.random.default_rng(0).permutation(trace.spans.num_rows)
    turned = found.reordered(order)
    assert turned.match.tolist() == found.match[order].tolist()
    assert order[turned.members].tolist() == found.members.tolist()
    assert (np.diff(turned.match[turned.members]) >= 0).all()
