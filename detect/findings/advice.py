"""What to do about a finding: which counter to read, which test to run, where to look."""

from __future__ import annotations

from detect.observations import Members
from detect.report import Cause, Owner

LOOK = "look at the spot: megascan view FILE --at {rank}:{iteration}"


def next_steps(
    cause: Cause, owner: Owner, ranks: tuple[int, ...], iteration: int, members: Members
) -> tuple[str, ...]:
    """Sentences in the order in which they are worth doing."""
    steps = list(_by_cause(cause, owner, members.device_kind != "cpu", ranks))
    if ranks and members.device_kind:  # an op table has no timeline to look at
        steps.append(LOOK.format(rank=ranks[0], iteration=iteration))
    return tuple(steps)


def _by_cause(cause: Cause, owner: Owner, has_gpu: bool, ranks: tuple[int, ...]) -> list[str]:
    if cause == Cause.COMPUTE and owner == Owner.UNDECIDED:
        return [
            "run the same GEMM benchmark on this rank's device and on a peer's: slower there, too, "
            "means the device; as fast means the work or the place",
            "or trace again with the two hosts exchanged: a fault of the hardware moves with it",
        ]
    by_cause = {
        Cause.COMPUTE: _compute(has_gpu),
        Cause.LINK: _link(has_gpu, ranks),
        Cause.HOST: [
            "on that host: read the load (top, pidstat -t), CPU frequency and affinity of the "
            "rank's process, and what else runs there",
            "if nothing else runs there, restart the rank on another host",
        ],
        Cause.LOADER: [
            "time the data loader alone on that host; read its disk and network file system "
            "latency (iostat -x 1) and the number of loader workers",
        ],
        Cause.GC: [
            "collect on all ranks at the same iterations (gc.disable(), then gc.collect() every N "
            "iterations), and see what that rank allocates that its peers do not",
        ],
        Cause.STAGE_IMBALANCE: [
            "give the heavy stage fewer layers (--decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers) or split the output layer; no node is at fault",
        ],
        Cause.SEQUENCE_IMBALANCE: [
            "balance the documents of a global batch over the data-parallel ranks by their cost "
            "(length squared for attention); no node is at fault",
        ],
        Cause.UNKNOWN: ["trace again at granularity full, over more iterations"],
    }
    return by_cause[cause]


def _compute(has_gpu: bool) -> list[str]:
    if not has_gpu:
        return [
            "on that host: read CPU frequency and throttling (turbostat, or /proc/cpuinfo), and "
            "which cores the rank's process may use (taskset -p PID)",
            "run the same matrix product alone on that host and on a peer's",
        ]
    return [
        "read that GPU's clock and throttle reasons, and whether another process is on it: "
        "nvidia-smi -i GPU -q -d CLOCK,PERFORMANCE,TEMPERATURE,POWER,PIDS, beside a peer's",
        "measure it against the node's other GPUs with the job away: python scripts/healthcheck.py "
        "--sweep; replace the node when it is slow alone",
    ]


def _link(has_gpu: bool, ranks: tuple[int, ...]) -> list[str]:
    test = "all_reduce_perf (nccl-tests)" if has_gpu else "iperf3"
    where = "between these two hosts" if len(ranks) == 2 else "from that host to two others"
    return [
        f"run {test} {where} and between two hosts that are fine",
        "read the ports' error and congestion counters (ethtool -S, ibstat, perfquery)"
        + ("; nvidia-smi nvlink -e on that host" if has_gpu else ""),
    ]
