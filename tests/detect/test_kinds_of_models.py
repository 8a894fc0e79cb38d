"""Models with experts and models of plain PyTorch are judged as dense Megatron models are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aggregate import build_timeline
from benchmarks.grounds.kernels.cluster import Trouble
from benchmarks.grounds.kernels.job import Job
from benchmarks.grounds.kernels.run import Plan
from detect import detect
from detect.observe.extract import observe
from detect.observe.operations import BACKWARD
from megascan.reader import read_trace
from megascan.simulate import JobModel, compute_bound, parse_fault, simulate_trace
from megascan.timeline import equals, numbers
from megascan.topology import Layout
from megascan.vocabulary import CountsAs, names_of

MODELS = ("dense", "experts", "plain")
SLOW = 2
STALL_NS = 300_000_000


def job_of(model, *, fault=None, tp=1, iterations=6):
    layout = Layout(tp=tp, dp=4, ep=2 if model == "experts" else 1)
    job = JobModel(
        layout=layout,
        costs=compute_bound(layout),
        iterations=iterations,
        num_layers=6,
        num_microbatches=3,
    )
    timeline = build_timeline(simulate_trace(job, [parse_fault(fault)] if fault else []))
    return as_plain_torch(timeline) if model == "plain" else timeline


def as_plain_torch(timeline):
    """What hooks on a plain model would have seen of it: passes and layers, but no modules."""
    spans = timeline.spans
    inside = names_of(CountsAs.MODULE, CountsAs.MODEL_END, CountsAs.LOSS)
    spans = spans.filter(pa.array(~equals(spans, "name", *inside)))
    names = pc.replace_substring(spans["name"].cast(pa.string()), "transformer_layer", "layer")
    column = spans.schema.get_field_index("name")
    renamed = spans.set_column(column, "name", names.combine_chunks().dictionary_encode())
    return replace(timeline, spans=renamed.cast(timeline.spans.schema))


def with_stalls(timeline, name):
    """Every fifth span of this name on the rank lasts on, with what contains it; and their number.

    Only lengths change: where spans begin says in which pass they lie.
    """
    spans = timeline.spans
    start, length = numbers(spans, "start_ns"), numbers(spans, "duration_ns")
    work = equals(spans, "kind", "compute") & (numbers(spans, "rank") == SLOW)
    chosen = np.flatnonzero(work & equals(spans, "name", name))[::5]
    added = np.zeros(len(start), dtype=np.int64)
    for row in chosen:
        around = (start <= start[row]) & (start[row] + length[row] <= start + length)
        added[work & around] += STALL_NS
    for column in ("duration_ns", "self_ns"):
        values = pa.array(numbers(spans, column) + added, spans.schema.field(column).type)
        spans = spans.set_column(spans.schema.get_field_index(column), column, values)
    return replace(timeline, spans=spans.cast(timeline.spans.schema)), len(chosen)


def with_more_tokens(timeline, factor):
    """Experts of one rank take longer, and so do its passes, in the second half of the iterations:
    they are made shorter in the first.
    """
    spans = timeline.spans
    start, length = numbers(spans, "start_ns"), numbers(spans, "duration_ns")
    early = numbers(spans, "iteration") <= np.median(numbers(spans, "iteration"))
    work = equals(spans, "kind", "compute") & (numbers(spans, "rank") == SLOW)
    less = np.zeros(len(start), dtype=np.int64)
    for row in np.flatnonzero(work & early & equals(spans, "name", "moe", "moe-backward")):
        around = (start <= start[row]) & (start[row] + length[row] <= start + length)
        less[work & around] += int((1.0 - 1.0 / factor) * length[row])
    for column in ("duration_ns", "self_ns"):
        values = pa.array(numbers(spans, column) - less, spans.schema.field(column).type)
        spans = spans.set_column(spans.schema.get_field_index(column), column, values)
    return replace(timeline, spans=spans.cast(timeline.spans.schema))


def test_experts_that_get_more_tokens_do_not_stand_still():
    """Attention and the dense layers run as fast as ever, and the passes take longer."""
    busier = observe(with_more_tokens(job_of("experts", iterations=12), 1.8))
    assert busier.stalled_ns.max() == 0
    assert busier.busy_ns[SLOW, -1] > 1.2 * busier.busy_ns[SLOW, 1]


@pytest.mark.parametrize("model", MODELS)
def test_a_starved_device_is_seen(model):
    starved = observe(job_of(model, fault=f"rank={SLOW},kind=host,factor=1.3")).starved_share
    shares = starved.mean(axis=1)
    assert shares[SLOW] > 0.9
    assert np.delete(shares, SLOW).max() < 0.1


@pytest.mark.parametrize("model", MODELS)
def test_a_stalled_device_is_seen(model):
    healthy = job_of(model)
    assert observe(healthy).stalled_ns.max() == 0
    name = {"dense": "mlp", "experts": "moe", "plain": "layer"}[model]
    stalled, count = with_stalls(healthy, name)
    lost_ns = observe(stalled).stalled_ns.sum(axis=1)
    assert lost_ns[SLOW] == pytest.approx(count * STALL_NS, rel=0.15)
    assert np.delete(lost_ns, SLOW).max() == 0


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_waiting_for_the_tensor_group_inside_modules_is_told_from_work(model):
    timeline = job_of(model, fault=f"rank={SLOW},kind=compute,factor=1.2", tp=2, iterations=12)
    assert observe(timeline).entangled_phases == (BACKWARD,)
    (finding,) = detect(timeline).findings
    assert finding.ranks == (SLOW,)
    assert finding.slowdown == pytest.approx(1.2, rel=0.01)


def test_a_module_inside_another_counts_once(tmp_path):
    """The experts of a layer are an `mlp` inside `moe`."""
    job = Job(name="experts", dp=2, ep=2, experts=True, windows=2, layers=2, vocabulary=8192)
    Plan(job=job).write(1, tmp_path)
    timeline = build_timeline(read_trace(tmp_path))
    without = ~equals(timeline.spans, "name", "mlp", "mlp-backward")
    assert not without.all()
    outer = replace(timeline, spans=timeline.spans.filter(pa.array(without)))
    both, alone = observe(timeline), observe(outer)
    assert np.array_equal(both.starved_share, alone.starved_share)
    assert np.array_equal(both.stalled_ns, alone.stalled_ns)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_waiting_for_sharded_parameters_is_told_from_work(tmp_path, factor):
    """With FSDP every pass is as long as the slowest replica's."""
    job = Job(name="fsdp", dp=4, fsdp=True, layers=4, microbatches=3, windows=5)
    slow = Trouble(kind="gpu_clock", cause="compute", ranks=(SLOW,), factor=factor)
    Plan(job=job, troubles=(slow,) if factor > 1 else ()).write(3, tmp_path)
    timeline = as_plain_torch(build_timeline(read_trace(tmp_path)))
    found = [(one.ranks, str(one.cause), one.slowdown) for one in detect(timeline).findings]
    if factor == 1.0:
        assert found == []
    else:
        assert found == [((SLOW,), "compute", pytest.approx(factor, rel=0.05))]


def test_unmarked_work_counts_without_the_waiting_inside(job, slow):
    """Spans of no known name hold their reductions: on all ranks they last as long as on rank 2."""
    timeline = job(layout=Layout(tp=4), work=slow(SLOW, 1.4), noise=0.005).timeline()
    spans = timeline.spans
    names = pc.replace_substring(spans["name"].cast(pa.string()), "ward", "_part")
    own_ns = numbers(spans, "self_ns")
    waits = equals(spans, "kind", "compute") & (numbers(spans, "rank") != SLOW)
    lasts_ns = np.where(waits, 1.4 * own_ns, own_ns).astype(np.int64)
    for name, values in (("name", names.combine_chunks().dictionary_encode()),
                         ("duration_ns", pa.array(lasts_ns))):  # fmt: skip
        place = spans.schema.get_field_index(name)
        spans = spans.set_column(place, name, values)
    (finding,) = detect(replace(timeline, spans=spans.cast(timeline.spans.schema))).findings
    assert (finding.ranks, str(finding.cause)) == ((SLOW,), "compute")
    assert finding.slowdown == pytest.approx(1.4, rel=0.02)
