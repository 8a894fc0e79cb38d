"""Every name that can be recorded, imported or simulated is in the vocabulary."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megascan import vocabulary
from megascan.instrument.collectives import OPERATIONS as COLLECTIVE_FUNCTIONS
from megascan.instrument.table import MODULES, RECOMPUTED
from megascan.reader import original
from megascan.reader.kineto.communication import operation_name
from megascan.reader.kineto.document import axis_name
from megascan.schema import COMMUNICATION_KINDS, Kind, Phase
from megascan.simulate import JobModel, compute_bound
from megascan.simulate.program import compile_job
from megascan.topology import Layout
from megascan.vocabulary import CountsAs, backward_of, names_of, recompute_of, word_of

ROOT = Path(__file__).parents[2]
RECORDERS = [
    *(ROOT / "megascan" / "instrument").glob("*.py"),
    ROOT / "megascan" / "tracer" / "tracer.py",
]
NAMED_AT = {"add": 1, "add_pending": 2, "follow": 2, "in_span": 2, "watch": 0}
"""Where the calls that make spans take the name."""


def is_declared(kind: Kind, name: str) -> bool:
    """Whether a name stands in the vocabulary, and is not an open name of other tools."""
    word = word_of(kind, name)
    return word is not None and (word in vocabulary.WORDS or kind in COMMUNICATION_KINDS)


@pytest.mark.parametrize("name", sorted({name for name, _, _ in MODULES}))
def test_a_recorded_module_is_known_in_all_its_phases(name):
    recorded = (name, backward_of(name), recompute_of(name))
    assert [one for one in recorded if not is_declared(Kind.COMPUTE, one)] == [], (
        "its forward, backward and repeats are recorded: declare all three, by a line of "
        "`*_of_model(NAME, …)` in WORDS of megascan/vocabulary.py"
    )
    assert [word_of(Kind.COMPUTE, one).phase for one in recorded] == [
        Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE,
    ]  # fmt: skip


@pytest.mark.parametrize("name", sorted({name for name, _, _ in RECOMPUTED}))
def test_what_is_recomputed_alone_is_known(name):
    assert is_declared(Kind.COMPUTE, recompute_of(name)), (
        "declare it by a line of `_repeated_part(NAME)` in WORDS of megascan/vocabulary.py"
    )


def test_names_are_recorded_out_of_the_vocabulary_only():
    literals, found = [], 0
    for path in RECORDERS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = node.func if isinstance(node, ast.Call) else None
            place = NAMED_AT.get(getattr(called, "attr", getattr(called, "id", "")))
            if place is None or len(node.args) <= place:
                continue
            found += 1
            if "store" in ast.unparse(called):  # torch's key-value store counts with `add`
                continue
            name = node.args[place]
            if isinstance(name, ast.Constant | ast.JoinedStr):
                literals.append(f"{path.name}:{name.lineno}")
    assert found >= 15
    assert literals == [], (
        "declare the name in megascan/vocabulary.py and record it by its constant"
    )


def test_every_name_has_one_word():
    names = [(word.kind, word.name) for word in vocabulary.WORDS]
    assert len(set(names)) == len(names)


def test_every_constant_of_a_name_is_declared():
    declared = {word.name for word in vocabulary.WORDS}
    declared |= {*vocabulary.COLLECTIVES, *vocabulary.UNDIRECTED_MESSAGES}
    constants = {
        value: constant
        for constant, value in vars(vocabulary).items()
        if isinstance(value, str) and constant.isupper() and not constant.startswith("_")
    }
    assert len(constants) > 15
    assert [
        constant
        for value, constant in constants.items()
        if not {value, recompute_of(value)} & declared
    ] == [], "give these constants their words in WORDS of megascan/vocabulary.py"


def test_traced_collectives_say_whom_their_members_wait_for():
    traced = {operation.name for operation in COLLECTIVE_FUNCTIONS}
    assert traced <= set(vocabulary.COLLECTIVES), (
        "say in COLLECTIVES of megascan/vocabulary.py whom the operation's members wait for"
    )


def test_the_originals_names_become_ours():
    imported = [one for operations in original.OPERATIONS.values() for one in operations]
    undeclared = [(one.kind, one.name) for one in imported if not is_declared(one.kind, one.name)]
    assert undeclared == [], "give these names a line of WORDS in megascan/vocabulary.py"
    assert {one.op for one in imported if one.kind is Kind.COLLECTIVE and one.op} <= set(
        vocabulary.COLLECTIVES
    )
    grad_sync = original.OPERATIONS["grad-sync"][0]
    assert word_of(grad_sync.kind, grad_sync.name).counts_as is CountsAs.GRADIENT_SYNC


def test_the_originals_loss_is_no_compute_for_it_contains_communication():
    (loss,) = original.OPERATIONS["loss"]
    word = word_of(loss.kind, loss.name)
    assert word.counts_as is CountsAs.LOSS
    assert word.contains_communication
    assert word.kind is not Kind.COMPUTE
    assert (loss.op, loss.axis) == ("all_reduce", "dp")  # that of the loss, over the replicas


def test_a_profiles_names_become_ours():
    kernels = {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "all_reduce",
        "ncclDevKernel_ReduceScatter_Sum_f32": "reduce_scatter",
        "_allgather_base": "all_gather",
        "ncclDevKernel_Broadcast_RING_LL": "broadcast",
        "alltoall_base": "all_to_all",
        "reduce": "reduce",
        "send": "send",
        "recv": "recv",
        "ncclDevKernel_SendRecv": "",
    }
    assert {name: operation_name(name) for name in kernels} == kernels
    assert is_declared(Kind.P2P, vocabulary.SEND_RECV)
    assert word_of(Kind.COMPUTE, "void cutlass::Kernel2").counts_as is CountsAs.PART
    assert axis_name("EXPERT_DATA_PARALLEL_GROUP", "7") == "expt_dp"
    assert axis_name("default_pg", "0") == "world"
    assert axis_name("mesh_tp", "4") == "tp"
    assert axis_name("mesh_dp_shard", "5") == "dp-dp_shard"


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, pp=2, dp=2), Layout(dp=2, ep=2, pp=2, vpp=2), Layout(cp=2, dp=2)],
    ids=["dense", "experts", "contexts"],
)
def test_every_simulated_name_is_known(layout):
    job = JobModel(layout=layout, costs=compute_bound(layout), num_layers=8)
    spans = [span for program in compile_job(job) for span in program.spans]
    assert [span.name for span in spans if not is_declared(span.kind, span.name)] == [], (
        "give these names a line of WORDS in megascan/vocabulary.py"
    )
    assert {span.axis for span in spans} - {""} <= {axis.name for axis in vocabulary.GROUP_AXES}


def test_unknown_communication_is_said_to_be_unknown():
    assert word_of(Kind.COLLECTIVE, "all_rotate") is None
    assert not is_declared(Kind.COMPUTE, "mpl")


def test_group_ids_say_their_axis():
    name = vocabulary.group_id("tp", [6, 4])
    assert name == "tp@4"
    assert vocabulary.axis_of_group(name) == "tp"
    assert vocabulary.is_data_parallel("dp-dp_shard@0")
    assert not vocabulary.is_data_parallel("dp_gloo@0")


def test_modules_of_a_layer_follow_each_other():
    """A name more takes its time out of these; what only ever lies in another one is a PART."""
    assert set(names_of(CountsAs.MODULE, phases=[Phase.BACKWARD])) == {
        "attention-backward",
        "mlp-backward",
        "moe-backward",
    }


def test_who_reads_what_a_span_counts_as_is_said():
    """`CountsAs` says of each member whether it is read: these are, no others."""
    packages = ("megascan", "aggregate", "detect", "megascope", "training")
    sources = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    read = {
        node.attr
        for path in sources
        if path != Path(vocabulary.__file__)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "CountsAs"
    }
    assert read == {"PASS", "LAYER", "MODULE"}, "say in CountsAs who reads what, then here"
