"""The manifests' containers, started here with the variables that the manifests give them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launcher import free_port

Finish = Callable[[subprocess.Popen[str]], str]
Render = Callable[[str], list[dict[str, Any]]]
MakePod = Callable[..., Any]


@pytest.mark.distributed
@pytest.mark.timeout(280)
def test_the_smoke_overlay_runs_from_the_check_to_the_verdict(
    render: Render, make_pod: MakePod, finish: Finish
) -> None:
    objects = render("overlays/cpu-smoke")
    changed = {"MASTER_PORT": str(free_port())}
    pods = [make_pod(objects, "train", index=index, changed=changed) for index in range(2)]
    (preflight,) = pods[0].spec["initContainers"]
    finish(pods[0].start(preflight))
    (container,) = pods[0].spec["containers"]
    started = [pod.start(container) for pod in pods]
    printed = [finish(process) for process in started]
    assert any("iteration       20/      20" in text for text in printed), printed
    run = pods[0].workspace / "run"
    assert len(list((run / "trace").glob("benchmark-data-*.json"))) == 4

    aggregate = make_pod(objects, "aggregate")
    text = finish(aggregate.start(aggregate.spec["containers"][0]))
    assert "rank 3" in text
    verdict = json.loads((run / "verdict.json").read_text())["detect"]
    assert [found["ranks"] for found in verdict["findings"] if found["owner"] == "node"] == [[3]]
    assert (run / "timeline.json.gz").stat().st_size > 1000


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe"])
def test_the_probes_answer_in_time(
    render: Render, make_pod: MakePod, finish: Finish, probe: str
) -> None:
    pod = make_pod(render("overlays/2x4"), "train")
    (container,) = pod.spec["containers"]
    check = container[probe]
    assert check["timeoutSeconds"] >= 10
    finish(pod.start({**container, "command": check["exec"]["command"], "args": []}))


def test_pods_name_each_other_as_jobset_does(
    render: Render, make_pod: MakePod, finish: Finish
) -> None:
    names = {"jobset.sigs.k8s.io/coordinator": "megascan-train-0-0.megascan"}
    pod = make_pod(render("overlays/2x4"), "train", index=1, annotations=names,
                   changed={"MEGASCAN_DRY_RUN": "1"})  # fmt: skip
    printed = finish(pod.start(pod.spec["containers"][0]))
    command = " ".join(printed.replace("\\\n", " ").split())
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 4" in command
    assert "--master-addr megascan-train-0-0.megascan --master-port 29500" in command
    assert "--tensor-model-parallel-size 4" in command
    assert f"--trace-dir {pod.workspace}/run/trace" in command


@pytest.mark.parametrize("missing", ["NUM_NODES", "MASTER_ADDR", "RUN_DIR"])
def test_a_setting_that_is_missing_is_one_sentence(
    render: Render, make_pod: MakePod, missing: str
) -> None:
    pod = make_pod(render("overlays/2x4"), "train", changed={missing: ""})
    process = pod.start(pod.spec["containers"][0])
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert printed == (
        f"error: {missing} is not set; start this script from the manifests in scripts/k8s\n"
    )


def test_preparing_makes_what_training_is_told_to_read(
    render: Render, make_pod: MakePod, finish: Finish
) -> None:
    objects = render("overlays/4x8")
    pod = make_pod(objects, "prepare")
    data = pod.workspace / "data"
    data.mkdir()
    symbols = json.loads(_byte_symbols())
    (data / "vocab.json").write_text(json.dumps({**symbols, "<|endoftext|>": 256}))
    (data / "merges.txt").write_text("#version: 0.2\n")
    (data / "corpus.jsonl.xz").write_text('{"text": "a real text"}\n')
    pod.changed["PREPARE_WORKERS"] = "1"
    (container,) = pod.spec["containers"]
    assert "1 documents, 12 tokens" in finish(pod.start(container))
    told = make_pod(objects, "train").settings["DATA_PATH"]
    assert Path(told.replace("/workspace", str(pod.workspace)) + ".idx").exists()
    assert "is there already" in finish(pod.start(container))


def _byte_symbols() -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    return json.dumps({symbol: number for number, symbol in enumerate(alphabet)})
