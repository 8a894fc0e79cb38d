"""The Slurm scripts, run by stand-ins for sbatch, srun and scontrol that execute here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ranks, warm_python

if TYPE_CHECKING:
    from conftest import Run

REPOSITORY = Path(__file__).parents[2]
STAND_INS = Path(__file__).parent / "stand_ins"
# In place of Python: says how it was called, and is right about everything it is asked.
ECHO = """#!/usr/bin/env bash
[[ $* == *check_flags.py* || $1 == -c ]] || echo "python $*"
"""

Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that the jobs may write to."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    shutil.copytree(REPOSITORY / "scripts", folder / "scripts")
    for name in ("megascan", "training", "aggregate", "detect", "aggregate.py", "pyproject.toml",
                 "constraints.txt"):  # fmt: skip
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


@pytest.fixture
def submit(checkout: Path, tmp_path: Path) -> Submit:
    """Run a command in that checkout on a cluster of stand-ins."""

    def start(
        *words: str, timeout_s: int = 200, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        programs = tmp_path / "programs"
        return subprocess.run(
            words, cwd=checkout, capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            env={
                **warm_python.early(ranks.environment()),
                "PATH": f"{programs}:{STAND_INS}:{os.environ['PATH']}", "HOME": str(tmp_path),
                "MEGASCAN_PYTHON": sys.executable,
                "CUDA_VISIBLE_DEVICES": "", "SLURM_CPUS_PER_TASK": "99", **variables,
            },
        )  # fmt: skip

    return start


def log_of(checkout: Path, name: str) -> str:
    (path,) = (checkout / "logs").glob(f"{name}-[0-9]*.out")
    return path.read_text()


def test_preprocess_then_train_on_that_then_aggregate(
    submit: Submit, checkout: Path, tmp_path: Path
) -> None:
    """Three jobs by one command, each after the one before; the guide to Slurm trains for real."""
    corpus = checkout / "corpus"
    python = ranks.warm()
    made = submit(python, "-m", "training.sample_corpus", "-o", "corpus", "--max-megabytes", "1")
    assert made.returncode == 0, made.stderr
    programs = tmp_path / "programs"
    programs.mkdir()
    launching = programs / "launching-python"  # all is real but the ranks
    launching.write_text(
        f'#!/bin/bash\n[[ $* != *torch.distributed.run* ]] || {{ echo "python $*"; exit; }}\n'
        f'exec "{python}" "$@"\n'
    )
    launching.chmod(0o755)
    done = submit(
        "bash", "scripts/slurm/submit.sh", "--preprocess", "--nodes", "2", "--gpus-per-node", "2",
        INPUT="corpus/corpus.jsonl", OUTPUT_PREFIX="corpus/text", MEGASCAN_PYTHON=str(launching),
        VOCAB_FILE=str(corpus / "vocab.json"), MERGE_FILE=str(corpus / "merges.txt"), TP="2",
        TRAIN_FLAGS="--num-workers 0", PREPROCESS_FLAGS="--workers 1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith(
        "submitted jobs 101 102 103; next: tail -F logs/megascan-102.out"
    )
    assert "text_text_document.bin" in log_of(checkout, "megascan-preprocess")
    training = log_of(checkout, "megascan")
    assert "job 102 on 2 nodes (127.0.0.1,127.0.0.2), meeting at 127.0.0.1:20102" in training
    run_dir = checkout / "runs" / "megascan-102"
    calls = [line for line in training.splitlines() if line.startswith("python")]
    assert len(calls) == 2, training
    for call in calls:
        for flags in ("--data-path corpus/text_text_document", "--tokenizer-type GPT2BPETokenizer",
                      f"--save {run_dir}/checkpoints --load {run_dir}/checkpoints",
                      f"--tensorboard-dir {run_dir}/tensorboard"):  # fmt: skip
            assert flags in call
    assert f"there is no {run_dir}/trace" in log_of(checkout, "megascan-aggregate")


@pytest.fixture
def echo(tmp_path: Path) -> str:
    """A stand-in Python: nothing is trained."""
    folder = tmp_path / "programs"
    folder.mkdir()
    program = folder / "echo-python"
    program.write_text(ECHO)
    program.chmod(0o755)
    return str(program)


def test_the_variables_become_flags_on_every_node(
    submit: Submit, checkout: Path, echo: str
) -> None:
    done = submit(
        "bash", "scripts/slurm/submit.sh", "--nodes", "3", "--gpus-per-node", "4", "--name", "big",
        "--", "--partition", "gpu", MEGASCAN_PYTHON=echo, TP="2", PP="2", CP="1", MODEL="small",
        TRAIN_ITERS="9", MICRO_BATCH_SIZE="1", GLOBAL_BATCH_SIZE="24", SAVE_INTERVAL="0",
        RUN_DIR="here", TRAIN_FLAGS="--seed 7",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = [line for line in log_of(checkout, "big").splitlines() if line.startswith("python")]
    assert sorted(re.findall(r"--node-rank (\d)", "\n".join(calls))) == ["0", "1", "2"]
    for call in calls:
        assert "--nnodes 3 " in call
        assert "--master-addr 127.0.0.1 --master-port 20101" in call
        for flags in ("--nproc-per-node 4", "--tensor-model-parallel-size 2", "--train-iters 9",
                      "--pipeline-model-parallel-size 2", "--micro-batch-size 1", "--seed 7",
                      "--global-batch-size 24", f"--trace-dir {checkout}/here/trace"):  # fmt: skip
            assert flags in call
        assert "--save" not in call


def test_one_node_needs_no_rendezvous(submit: Submit, checkout: Path, echo: str) -> None:
    done = submit(
        "bash",
        "scripts/slurm/submit.sh",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        MEGASCAN_PYTHON=echo,
    )
    assert done.returncode == 0, done.stderr
    assert "--standalone --nproc-per-node 2" in log_of(checkout, "megascan")


def test_aggregation_runs_after_a_run_that_failed_and_training_only_after_good_data(
    submit: Submit, checkout: Path, tmp_path: Path
) -> None:
    """afterany and afterok, as they stand in what a dry run prints."""
    done = submit("bash", "scripts/slurm/submit.sh", MEGASCAN_PYTHON="/nowhere/python")
    assert done.returncode == 0, done.stderr
    assert "/nowhere/python cannot be run on" in log_of(checkout, "megascan")
    assert "look into the log of the run, it may not have started" in log_of(
        checkout, "megascan-aggregate"
    )
    assert (tmp_path / ".slurm" / "exit-101").read_text() == "1"
    (checkout / "broken.jsonl").write_text("no JSON\n")
    (checkout / "tokenizer.json").write_text("{}")
    data = {"INPUT": "broken.jsonl", "OUTPUT_PREFIX": "x", "TOKENIZER_MODEL": "tokenizer.json"}
    submit("bash", "scripts/slurm/submit.sh", "--preprocess", "--name", "second", **data)
    assert "tokenizer.json is not a tokenizer" in log_of(checkout, "second-preprocess")
    assert not list((checkout / "logs").glob("second-[0-9]*.out"))


def test_a_dry_run_prints_what_is_submitted(submit: Submit, checkout: Path, echo: str) -> None:
    words = ("bash", "scripts/slurm/submit.sh", "--nodes", "1", "--", "--account", "a b")
    variables = {"TRAIN_FLAGS": "--seed 7 --lr 1e-3", "MEGASCAN_PYTHON": echo}
    printed = submit(*words, MEGASCAN_DRY_RUN="1", **variables).stdout
    assert not (checkout / "logs").exists()
    assert "export TRAIN_FLAGS=--seed\\ 7\\ --lr\\ 1e-3" in printed
    pasted = submit("bash", "-c", printed)
    assert pasted.stdout.startswith("submitted jobs 101 102;")
    assert "--seed 7 --lr 1e-3" in log_of(checkout, "megascan")


def test_software_by_container_conda_or_venv(
    submit: Submit, checkout: Path, echo: str, tmp_path: Path
) -> None:
    """An image for srun's plugin, a file for Apptainer, an environment's own interpreter."""
    run = ("sbatch", "--nodes=1", "scripts/slurm/run.slurm")
    (checkout / "logs").mkdir()
    of_image = tmp_path / "programs" / "python3"  # trains nothing, but is sbatch's own, too
    of_image.write_text(
        f'#!/bin/bash\n[[ $1 != {STAND_INS}/* ]] || exec "{sys.executable}" "$@"\n'
        f'exec "{echo}" "$@"\n'
    )
    of_image.chmod(0o755)
    submit(
        *run,
        MEGASCAN_PYTHON="not in the image",
        CONTAINER_IMAGE="registry.invalid#team/megascan:1",
        CONTAINER_MOUNTS="/data:/data",
    )
    said = log_of(checkout, "megascan")
    assert "srun: --container-image=registry.invalid#team/megascan:1" in said
    assert f"srun: --container-mounts={checkout}:{checkout},{checkout}/runs/megascan-101" in said
    assert ":/data" in said
    assert "python -m torch.distributed.run" in said

    image = tmp_path / "megascan.sif"
    image.touch()
    apptainer = tmp_path / "programs" / "apptainer"
    apptainer.write_text('#!/bin/bash\necho "apptainer $*"\n')
    apptainer.chmod(0o755)
    submit("sbatch", "--job-name=sif", *run[1:], MEGASCAN_PYTHON="", CONTAINER_IMAGE=str(image))
    assert re.search(
        rf"apptainer exec --nv --bind \S+ --pwd \S+ {image} bash", log_of(checkout, "sif")
    )

    conda = tmp_path / "programs" / "conda"
    conda.write_text(f'#!/bin/bash\n[[ $3 == train ]] && echo "{echo}"\n')
    conda.chmod(0o755)
    submit("sbatch", "--job-name=conda", *run[1:], MEGASCAN_PYTHON="", CONDA_ENV="train")
    assert "python -m torch.distributed.run" in log_of(checkout, "conda")
    submit("sbatch", "--job-name=noenv", *run[1:], MEGASCAN_PYTHON="", CONDA_ENV="gone")
    assert "there is no conda environment gone" in log_of(checkout, "noenv")

    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(echo)
    submit("sbatch", "--job-name=venv", *run[1:], MEGASCAN_PYTHON="", VENV=str(venv.parent))
    assert "python -m torch.distributed.run" in log_of(checkout, "venv")
    submit("sbatch", "--job-name=both", *run[1:], VENV=str(venv.parent), CONDA_ENV="train")
    assert "CONDA_ENV and VENV exclude each other; set one" in log_of(checkout, "both")
    submit("sbatch", "--job-name=modules", *run[1:], MODULES="cuda/12")
    assert "there is no module command" in log_of(checkout, "modules")


@pytest.mark.parametrize(
    ("words", "variables", "code", "says"),
    [
        (["--nodes", "0"], {}, 2, "--nodes is '0', expected a whole number"),
        (["--nodes"], {}, 2, "--nodes needs a value"),
        (["--gpus-per-node", "many"], {}, 2, "--gpus-per-node is 'many'"),
        (["--time", "soon"], {}, 2, "--time is 'soon', expected an HH:MM:SS"),
        (["--name", "a b"], {}, 2, "--name is 'a b', expected letters"),
        (["--partition", "gpu"], {}, 2, "put options of sbatch after --"),
        ([], {"TP": "x"}, 2, "TP is 'x', expected a whole number"),
        ([], {"RANKS_PER_NODE": "x"}, 2, "RANKS_PER_NODE is 'x'"),
        ([], {"RANKS_PER_NODE": "8"}, 1, "and a node of this job has 4 GPUs"),
        ([], {"TRAIN_ITERS": "0"}, 2, "TRAIN_ITERS is '0'"),
        ([], {"SAVE_INTERVAL": "often"}, 2, "SAVE_INTERVAL is 'often'"),
        ([], {"MASTER_PORT": "66000"}, 2, "MASTER_PORT is '66000'"),
        ([], {"MODEL": "70b"}, 2, "MODEL is '70b', expected small or 8b"),
        ([], {"VENV": "v", "CONDA_ENV": "c"}, 2, "CONDA_ENV and VENV exclude each other; set one"),
        ([], {"VENV": "/nowhere"}, 1, "there is no /nowhere/bin/python"),
        ([], {"VOCAB_FILE": "v"}, 2, "a tokenizer is given and no data"),
        ([], {"TP": "4", "MICRO_BATCH_SIZE": "2", "GLOBAL_BATCH_SIZE": "6"}, 1,
         "GLOBAL_BATCH_SIZE 6 is not divisible by 4"),
        (["--preprocess"], {"INPUT": "gone", "OUTPUT_PREFIX": "x"}, 1, "INPUT is gone, which"),
        (["--preprocess"], {"INPUT": "aggregate.py", "OUTPUT_PREFIX": "x"}, 2,
         "the tokenizer is not clear"),
        (["--nodes=0"], {}, 2, "--nodes is '0'"),
        ([], {"TP": "3"}, 1, "8 ranks cannot be split into replicas of TP 3 x PP 1 x CP 1"),
        ([], {"DATA_PATH": "nowhere"}, 1, "there is no nowhere.bin with nowhere.idx"),
        (["--preprocess"], {}, 2, "--preprocess needs INPUT and OUTPUT_PREFIX"),
        (["--", "--no-such-option=1"], {}, 1, "sbatch refused the job; see its message above"),
    ],
)  # fmt: skip
def test_bad_arguments_submit_nothing(
    submit: Submit,
    tmp_path: Path,
    words: list[str],
    variables: dict[str, str],
    code: int,
    says: str,
) -> None:
    done = submit("bash", "scripts/slurm/submit.sh", *words, **variables)
    assert done.returncode == code
    assert says in done.stderr
    assert not list(tmp_path.glob(".slurm/job-*"))


@pytest.mark.parametrize(
    "script", ["run.slurm", "preprocess.slurm", "aggregate.slurm", "watch.slurm"]
)
@pytest.mark.parametrize("folder", ["", "/"])
def test_a_job_that_is_not_submitted_from_the_checkout(
    submit: Submit, script: str, folder: str
) -> None:
    done = submit("bash", f"scripts/slurm/{script}", SLURM_SUBMIT_DIR=folder)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: SLURM_SUBMIT_DIR is '{folder}', which is no checkout; submit this job with sbatch "
        "from the checkout\n"
    )


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_a_job_outside_slurm(submit: Submit, checkout: Path, missing: str) -> None:
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NODELIST": "a,b"}
    done = submit("bash", "scripts/slurm/run.slurm", SLURM_SUBMIT_DIR=str(checkout),
                  **{**given, missing: ""})  # fmt: skip
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"{missing} is not set; submit this job with sbatch" in done.stderr
    done = submit("bash", "scripts/slurm/node.sh")
    assert done.stderr == (
        "error: SLURM_JOB_NUM_NODES is not set; run.slurm starts this script, by srun, on every "
        "node\n"
    )


def test_without_slurm_it_says_where_to_go(run: Run) -> None:
    done = run("slurm/submit.sh")
    assert done.returncode == 1
    assert "run this on a login node" in done.stderr


def test_the_stand_ins_behave_as_slurm_does(submit: Submit, checkout: Path) -> None:
    """What real Slurm refuses must not pass here."""
    assert (
        "unrecognized option '--bogus'"
        in submit("sbatch", "--bogus", "scripts/slurm/run.slurm").stderr
    )
    late = submit("sbatch", "--dependency=afterok:7", "scripts/slurm/run.slurm")
    assert "Job dependency problem" in late.stderr
    assert submit("scontrol", "show", "hostnames", "n[08-10,12],gpu3").stdout.split() == [
        "n08",
        "n09",
        "n10",
        "n12",
        "gpu3",
    ]
    assert "specify a reason" in submit("scontrol", "update", "NodeName=n08", "State=DRAIN").stderr
    submit("scontrol", "update", "NodeName=n08", "State=DRAIN", "Reason=slow GPU")
    assert "State=IDLE+DRAIN Reason=slow GPU" in submit("scontrol", "show", "node", "n08").stdout
    assert "no job" in submit("srun", "true").stderr
