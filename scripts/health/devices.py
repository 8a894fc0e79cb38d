"""Check the GPUs that driver and torch see, and that the packages for training can be imported."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import warnings
from dataclasses import dataclass

from health.check import Check, Status
from megascan.header import Json

_TIMEOUT_S = 20
_BASE_FIELDS = ("index", "name", "uuid", "memory.total", "temperature.gpu", "clocks.max.sm")
_HEALTH_FIELDS = (
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_slowdown",
    "clocks_event_reasons.hw_thermal_slowdown",
)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    uuid: str
    memory: str
    temperature: str
    num_memory_errors: int = 0
    held_down: tuple[str, ...] = ()


def query_gpus() -> list[Gpu] | str:
    """Return the driver's GPUs, or the reason why the driver cannot be asked."""
    if shutil.which("nvidia-smi") is None:
        return []
    answer = _query((*_BASE_FIELDS, *_HEALTH_FIELDS))
    if isinstance(answer, str):  # a driver that does not know all fields
        answer = _query(_BASE_FIELDS)
    if isinstance(answer, str):
        return answer
    return [_read_gpu(fields) for fields in answer]


def _query(names: tuple[str, ...]) -> list[list[str]] | str:
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nvidia-smi did not answer within {_TIMEOUT_S} s"
    except OSError as error:
        return f"nvidia-smi cannot be run ({error.strerror})"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return f"nvidia-smi failed: {said[0] if said else f'exit code {done.returncode}'}"
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(names)]


def _read_gpu(fields: list[str]) -> Gpu:
    health = fields[len(_BASE_FIELDS) :]
    reasons = zip(("hardware slowdown", "thermal slowdown"), health[1:], strict=False)
    return Gpu(
        index=int(fields[0]),
        name=fields[1],
        uuid=fields[2],
        memory=fields[3],
        temperature=fields[4],
        num_memory_errors=int(health[0]) if health and health[0].isdigit() else 0,
        held_down=tuple(name for name, state in reasons if state == "Active"),
    )


def check_gpus(expected: int | None) -> Check:
    """Check that the driver answers, with at least the expected GPUs, none with errors."""
    gpus = query_gpus()
    if isinstance(gpus, str):
        text = f"{gpus}; the driver hangs or does not fit, reset the node"
        return Check(name="GPUs", status=Status.PROBLEM, text=text)
    values: dict[str, Json] = {
        "num_gpus": len(gpus),
        "gpus": [{"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid,
                  "num_memory_errors": gpu.num_memory_errors, "held_down": list(gpu.held_down)}
                 for gpu in gpus],
    }  # fmt: skip
    status, text = _judge_gpus(gpus, expected)
    return Check(name="GPUs", status=status, text=text, values=values)


def _judge_gpus(gpus: list[Gpu], expected: int | None) -> tuple[Status, str]:
    if expected is not None and len(gpus) < expected:
        return Status.PROBLEM, f"{len(gpus)} found, expected {expected}; see nvidia-smi and dmesg"
    for gpu in gpus:
        if gpu.num_memory_errors:
            errors = f"{gpu.num_memory_errors} uncorrected memory errors"
            return Status.PROBLEM, f"GPU {gpu.index} ({gpu.uuid}) has {errors}; reset or replace it"
    for gpu in gpus:
        if gpu.held_down:
            text = f"GPU {gpu.index} ({gpu.uuid}) is held down by {' and '.join(gpu.held_down)}"
            return Status.WARNING, f"{text} at {gpu.temperature} °C; see its cooling and power"
    if not gpus:
        return Status.OK, "none; training runs on the CPU over gloo"
    return Status.OK, f"{len(gpus)} × {gpus[0].name}, {gpus[0].memory} each"


def check_torch(num_driver_gpus: int) -> Check:
    """Check that torch can be imported and sees the driver's GPUs."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        text = f"cannot be imported ({error}); install MegaScan with the extra train"
        return Check(name="torch", status=Status.PROBLEM, text=text)
    num_gpus = torch.cuda.device_count()
    cuda, nccl = torch.version.cuda, None
    if num_gpus:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    values = {"version": torch.__version__, "cuda": cuda, "nccl": nccl, "num_gpus": num_gpus}
    if num_driver_gpus and not num_gpus:
        why = "a build for the CPU" if cuda is None else f"a build for CUDA {cuda}"
        text = f"{torch.__version__}, {why}, sees none of the driver's {num_driver_gpus} GPUs"
        return Check(name="torch", status=Status.PROBLEM, text=text, values=values)
    text = f"{torch.__version__}, " + (
        f"CUDA {cuda}, NCCL {nccl}, {num_gpus} GPUs" if num_gpus else "no GPU in use"
    )
    return Check(name="torch", status=Status.OK, text=text, values=values)


def check_megatron() -> Check:
    """Check that Megatron-Core can be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about optional packages
            core = importlib.import_module("megatron.core")
    except Exception as error:  # any error on import: it is not usable
        text = f"cannot be imported ({error}); install MegaScan with the extra train"
        return Check(name="megatron.core", status=Status.PROBLEM, text=text)
    version = str(getattr(core, "__version__", "unknown"))
    return Check(name="megatron.core", status=Status.OK, text=version, values={"version": version})
