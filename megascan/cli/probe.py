"""Say which rank, or which device of this host, computes wrongly: whose bits are not its peers'.

With DIR, the folder of a training job that ran with --probe-interval, its probes are compared.
Without, every GPU of this host (or every core) computes the same transformer layers, round after
round, and the bits are compared: a check before a job begins. The exit code is 3 when somebody is
named.

examples:
  megascan probe trace_output
  megascan probe --rounds 100
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from megascan.cli.output import check_folder, check_outputs, require, say, stage, write_json
from megascan.errors import EXIT_FINDING, InputError, MissingError, UsageError
from megascan.header import Json
from megascan.probes import Probes, read_probes

if TYPE_CHECKING:
    from detect.report import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="folder of a job")
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N",
        help="rounds on this host's devices, without DIR (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="compare cores although there are GPUs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--force", action="store_true", help="replace an existing --json file")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print."""
    require("detect")
    from detect.causes.corruption import findings_of

    _check(arguments)
    if arguments.folder is None:
        probes, names = _sweep(arguments)
    else:
        probes = _recorded(arguments.folder)
        names = dict.fromkeys(probes.probers, "")
    findings, notes = findings_of(probes)
    for finding in findings:
        say(_words(finding, names))
    if not findings:
        first, last = probes.iterations[0], probes.iterations[-1]
        unit = "rounds" if arguments.folder is None else "probes, after iterations"
        say(
            f"no wrong bits: {len(probes.probers)} {'devices' if names[0] else 'ranks'} agree in "
            f"{len(probes.iterations)} {unit} ({first} to {last})"
        )
    for note in notes:
        say(f"note: {note}")
    if arguments.json:
        record: dict[str, Json] = {
            "schema": 1,
            "num_probes": len(probes.iterations),
            "findings": [finding.to_json() for finding in findings],
            "notes": list(notes),
        }
        write_json(arguments.json, record, force=arguments.force)
        say(f"wrote {arguments.json}")
    return EXIT_FINDING if findings else 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.rounds < 1:
        raise UsageError(f"--rounds is {arguments.rounds}, expected 1 or more")
    read: list[Path] = []
    if arguments.folder is not None:
        check_folder(
            arguments.folder, "give the folder of a job that trained with --probe-interval"
        )
        read = list(arguments.folder.glob("*.jsonl"))
    check_outputs([arguments.json], read=read, force=arguments.force)


def _recorded(folder: Path) -> Probes:
    """Return the probes of a job. Raises InputError where there are none."""
    probes = read_probes(folder)
    if probes is None:
        raise InputError(
            f"{folder} holds no probes (scope-probe-*.jsonl); train with --probe-interval N"
        )
    return probes


def _sweep(arguments: argparse.Namespace) -> tuple[Probes, dict[int, str]]:
    """Probe this host's devices; return the probes, and the devices' names by number."""
    require("megascope")
    if importlib.util.find_spec("torch") is None:
        raise MissingError("probing devices needs torch: pip install torch")
    from megascope.probe import CPU_SIZE, GPU_SIZE, Stack, find_devices, sweep

    devices = find_devices(use_cpu=arguments.cpu)
    size = CPU_SIZE if devices[0].kind == "cpu" else GPU_SIZE
    with stage(f"probing {len(devices)} devices, {arguments.rounds} rounds"):
        probes = sweep([Stack(size, device) for device in devices], arguments.rounds)
    return probes, {number: device.name for number, device in enumerate(devices)}


def _words(finding: Finding, names: dict[int, str]) -> str:
    """Put a finding into words; devices of this host are named."""
    if not names[finding.ranks[0]]:
        return "\n".join(
            [f"WRONG BITS: {finding.headline}", *(f"   {line}" for line in finding.evidence),
             *(f"   next: {line}" for line in finding.next_steps)]
        )  # fmt: skip
    who = " and ".join(names[rank] for rank in finding.ranks)
    rounds = f"in {finding.share_of_iterations:.0%} of the rounds"
    return f"WRONG BITS: {who} of {finding.host} {rounds}; {'; '.join(finding.evidence)}"
