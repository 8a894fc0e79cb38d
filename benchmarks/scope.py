"""What looking into a model costs, and whether wrong bits are found.

    python -m benchmarks.scope [--trials 1000] [--sound 10000] [-o RESULT.md]
    python -m benchmarks.scope --device gpu [--job [--ranks 4] | --speaking] [-o RESULT.md]
        two GPUs, under four minutes; the job alone on two or four, decoding alone on one

On the CPU: one process, one rank. Costs are ratios of CPU time of this process: with and without
looking take turns; the median of the ratios of neighbours is given with its 95 % interval, and
beside it what the calls of MegaScope alone take of the step's CPU time, which a busy machine
disturbs less. On GPUs: a data-parallel job of two ranks (or four) that is looked at in every second
block of iterations and then probed, `--sound` times while all are sound, then with one bit of one
of them wrong; one GPU decodes with and without strips, by turns, both without CUDA graphs, under
which nothing can be seen. Wrong bits: one flipped mantissa bit in one weight or one activation of
one of four replicas (on the CPU simulated ones); a probe must name that replica with the planted
layer and module. Of two replicas it must name layer and module: which of two is wrong nobody can
say.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.jobs import DATA, DEVICES, environment_line, model, publish, run_ranks
from benchmarks.scope_models import join, model_that_speaks, model_to_train

_ROUNDS = 31
_GPU_MODEL = (
    *model(layers=8, hidden=4096, heads=32, sequence=2048, micro_batch=2),
    *("--global-batch-size", "16"),
)
_CPU_MODEL = (
    *model(layers=4, hidden=256, heads=4, sequence=128), *("--global-batch-size", "8"),
)  # fmt: skip
_DEFAULT_INTERVAL = 1000
_REPLICAS = 4
_SOUND = {"cpu": 10_000, "gpu": 1000}
_PLANTED = 50


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the result."""

    what: str
    value: str
    wanted: str


def main() -> int:
    """Measure all and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--sound", type=int, help="probes of sound replicas")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--job", action="store_true", help="the data-parallel job alone")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2, help="of that job (2)")
    parser.add_argument("--speaking", action="store_true", help="decoding alone")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sound = _SOUND[given.device] if given.sound is None else given.sound
    figures: list[Figure] = []
    if given.job or (given.device == "gpu" and not given.speaking):
        figures += _told(_job(given.device, sound, given.ranks))
    if not given.job:
        join("cuda:0" if given.device == "gpu" else "cpu")
        decoding = [*_told(_speaking("cuda:0" if given.device == "gpu" else "cpu"))]
        is_whole = given.device == "cpu" and not given.speaking
        figures += (
            [*_told(_training()), *decoding, *_told(_probing(given.trials, sound))]
            if is_whole
            else decoding
        )
    rows = [f"| {one.what} | {one.value} | {one.wanted} |" for one in figures]
    text = "\n".join(
        [f"# Looking into a model, {given.device.upper()}", "", environment_line(given.device), "",
         f"`python -m benchmarks.scope {' '.join(sys.argv[1:])}`; its docstring says how.", "",
         "| what | found | wanted |", "|---|---|---|", *rows, ""]
    )  # fmt: skip
    publish(text, given.output)
    return 0


def _told(figures: Iterable[Figure]) -> Iterator[Figure]:
    """Say each figure as soon as it is there."""
    for one in figures:
        print(f"{one.what}: {one.value}", file=sys.stderr, flush=True)
        yield one


def _paired(
    one: Callable[[], object],
    other: Callable[[], object],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> str:
    """Time of `one` over `other`, neighbours compared: median, 95 % interval, time of `other`."""
    ones: list[float] = []
    others: list[float] = []
    for _ in range(rounds + 2):
        for run, times in ((other, others), (one, ones)):
            begun = clock()
            run()
            times.append(clock() - begun)
    ratios = sorted(a / b for a, b in zip(ones[2:], others[2:], strict=True))
    reach = round(0.98 * len(ratios) ** 0.5)  # ranks of the median's interval, binomial
    middle = len(ratios) // 2
    low, high = ratios[max(0, middle - reach)], ratios[min(len(ratios) - 1, middle + reach)]
    base_ms = 1000 * statistics.median(others[2:])
    return f"× {ratios[middle]:.3f} ({low:.3f} to {high:.3f}; {base_ms:.0f} ms)"


def _job(device: str, num_sound: int, num_ranks: int) -> Iterator[Figure]:
    """A data-parallel job: what looking and probing cost it, and whether bits hold."""
    import json

    from benchmarks.paired import blocks_of, cost_of
    from benchmarks.planted_bits import is_named
    from benchmarks.scope_ranks import BLOCK_LENGTH, FIRST_PLANTED, MODES, WRONG_RANK
    from detect.causes.corruption import deviations
    from megascan.probes import read_probes
    from megascope.request import Request, write_request

    flags = (*(_GPU_MODEL if device == "gpu" else _CPU_MODEL), *DATA, *DEVICES[device])
    with TemporaryDirectory() as folder:
        places = ("residual", "attention_out", "fc2", "neurons", "qkv")
        write_request(Path(folder), Request(places=places, weights=False))
        given = [folder, str(num_sound), str(_PLANTED), *flags]
        run_ranks(num_ranks, ["benchmarks.scope_ranks", *given])
        planted = json.loads((Path(folder) / "planted.json").read_text(encoding="utf-8"))
        found = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
        probes = read_probes(Path(folder))
    cost = cost_of("statistics", blocks_of(MODES, found["iterations_ms"], BLOCK_LENGTH))
    yield Figure(
        what=f"training DP{num_ranks} (`{' '.join(flags[:12])}`), rms and max of 5 places in every "
        "iteration",
        value=f"× {cost.median:.4f} ({cost.low:.4f} to {cost.high:.4f}; {cost.untraced_ms:.1f} ms)",
        wanted="≤ 1.03" if device == "cpu" else "≤ 1.01",
    )  # fmt: skip
    assert probes is not None
    named = deviations(probes)
    by_iteration = {one.iteration: one.point.words for one in named}
    accused = {one.iteration: one.ranks for one in named}
    apart = {at: words for at, words in by_iteration.items() if at < FIRST_PLANTED}
    words = f"; first {next(iter(apart.values()))}" if apart else ""
    yield Figure(
        what=f"probes of {num_ranks} sound replicas whose bits differ, of "
        f"{sum(one < FIRST_PLANTED for one in probes.iterations)}",
        value=f"{len(apart)}{words}", wanted="0",
    )  # fmt: skip
    has_majority = num_ranks > 2
    num_named = sum(
        is_named(name, by_iteration.get(int(at), ""))
        and (not has_majority or accused[int(at)] == (WRONG_RANK,))
        for at, name in planted.items()
    )
    who = "rank, layer and module are" if has_majority else "layer and module are"
    yield Figure(
        what=f"one flipped mantissa bit of one replica, weight or activation: {who} named",
        value=f"{num_named} of {len(planted)}", wanted="all",
    )  # fmt: skip
    probe_ms = statistics.median(found["probes_ms"][1:])
    share = probe_ms / cost.untraced_ms / _DEFAULT_INTERVAL
    yield Figure(
        what=f"probing after every {_DEFAULT_INTERVAL} iterations: share of the time",
        value=f"{100 * share:.3f} % ({probe_ms:.1f} ms a probe)", wanted="< 0.1 %",
    )  # fmt: skip


class _OwnTime:
    """CPU time that a recorder's own calls take, all together."""

    def __init__(self, recorder: Any) -> None:
        self.spent_s, self.num_ends = 0.0, 0
        for name in ("begin", "_take", "end"):
            setattr(recorder, name, self._timed(getattr(recorder, name), name == "end"))

    def _timed(self, call: Callable[..., None], is_end: bool) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            begun = time.thread_time()
            call(*given)
            self.spent_s += time.thread_time() - begun
            self.num_ends += is_end

        return timed


def _training() -> Iterator[Figure]:
    """A step with 5 places of all layers looked at, and what is left of it afterwards."""
    import torch

    from megascope.interventions import TensorShares
    from megascope.recorder import DataFile, Limits, Recorder
    from megascope.request import Request, RequestFile, write_request

    model = model_to_train(8, 512)
    tokens = torch.arange(256).view(2, 128) * 37 % 1000
    positions = torch.arange(128).expand(2, 128)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    places = ("residual", "attention_out", "fc2", "neurons", "qkv")
    cases = {
        "5 places, rms and max": Request(places=places, weights=False),
        "5 places, pixels and rms of each token": Request(
            places=places, reductions=("pixels", "rms"), per_token=True, weights=False
        ),
        "attention entropy of all heads": Request(places=("attention",), weights=False),
        "5 places with gradients": Request(places=places, gradients=True, weights=False),
    }
    before = step()
    with TemporaryDirectory() as folder:
        for name, request in cases.items():
            write_request(Path(folder), request)
            file = DataFile(Path(folder), 0, max_bytes=1 << 28)
            file.open(b"", continued=b"")
            recorder = Recorder(
                [model], file, RequestFile(Path(folder)), shares=TensorShares(rank=0, size=1),
                limits=Limits(budget_ratio=0.99),
            )  # fmt: skip

            own = _OwnTime(recorder)

            def looked_at(recorder: Recorder = recorder) -> None:
                recorder.begin(1)
                step()
                recorder.end()

            ratio = _paired(looked_at, step, _ROUNDS)
            wanted = "≤ 1.03" if name.endswith("rms and max") else "–"
            yield Figure(
                what=f"training step, {name}", wanted=wanted,
                value=f"{ratio}; own calls {1000 * own.spent_s / own.num_ends:.1f} ms",
            )  # fmt: skip
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    same = "identical" if torch.equal(before, step()) else "different"
    yield Figure(
        what="afterwards: hooks left, loss before and after", value=f"{hooks}, {same}",
        wanted="0, identical",
    )  # fmt: skip


def _speaking(device: str) -> Iterator[Figure]:
    """Decoding with strips beside decoding alone, through the server's engine."""
    import torch

    from megascope.capture import probabilities
    from megascope.frames import encode
    from megascope.session import Session

    num_layers, hidden = (8, 512) if device == "cpu" else (32, 4096)
    lent = model_that_speaks(num_layers, hidden, 1000, device)
    prompt = list(range(32))

    @torch.inference_mode()
    def alone() -> None:
        tokens, start = list(prompt), 0
        for _ in range(24):
            following = lent.compute(tokens[start:], start, temperature=0.0, draw=0.0)
            start = len(tokens)
            tokens.append(following.token)

    session = Session(lent, lambda identifier, frame: None, 1000, str)

    @torch.inference_mode()
    def strips() -> None:
        session.receive(
            {"do": "run", "id": 1, "prompt": prompt, "max_tokens": 24, "reduction": "rms",
             "places": ["residual", "attention_out", "fc2", "neurons", "context", "query"]}
        )  # fmt: skip
        while session.has_work:
            session.work()

    clock = time.process_time if device == "cpu" else time.perf_counter  # every token is waited for
    yield Figure(
        what=f"32 tokens read and 24 written, strips of 6 places in {num_layers} layers",
        value=_paired(strips, alone, _ROUNDS, clock), wanted="≤ 1.10",
    )  # fmt: skip
    query = torch.randn(2048, 1, 64, device=device)
    probabilities(query, query)
    begun = clock()
    frame = encode({}, {"weights": probabilities(query, query).half().cpu().numpy()})
    spent = clock() - begun
    yield Figure(
        what="one attention head of 2,048 × 2,048: computed and packed",
        value=f"{spent:.2f} s, {len(frame) / 1e6:.1f} MB", wanted="< 0.5 s on the page",
    )  # fmt: skip


def _probing(num_trials: int, num_sound: int) -> Iterator[Figure]:
    """Planted bits that are named, and accusations among sound replicas."""
    import torch

    from benchmarks.planted_bits import is_named, trials
    from detect.causes.corruption import deviations
    from megascan.probes import Prober, Probes
    from megascan.topology import Layout
    from megascope.probe import Probe

    model = model_to_train(2, 64, 200)
    tokens = torch.arange(32)[None] * 7 % 200
    positions = torch.arange(32)[None]

    def forward() -> None:
        model(tokens, positions, None, labels=tokens)

    probe = Probe([model])
    sound = probe.run(forward)
    layout = Layout(dp=_REPLICAS)
    probers = {
        rank: Prober(rank=rank, layout=layout, host="h", device="cpu", points=probe.points)
        for rank in range(_REPLICAS)
    }
    draws, found = random.Random(3), 0
    for planted, fault in trials(model, num_trials, seed=17):
        with fault:
            wrong = probe.run(forward)
        rank = draws.randrange(_REPLICAS)
        sums = {one: {1: wrong if one == rank else sound} for one in range(_REPLICAS)}
        named = deviations(Probes(probers=probers, sums=sums))
        places = {one.point.words for one in named}
        is_right = [one.ranks for one in named] == [(rank,)]
        found += is_right and any(is_named(planted, words) for words in places)
    yield Figure(
        what="one flipped mantissa bit, weight or activation: named with rank, layer, module",
        value=f"{found} of {num_trials}", wanted="all",
    )  # fmt: skip
    false = 0
    for _ in range(num_sound // _REPLICAS):
        sums = {rank: {1: probe.run(forward)} for rank in range(_REPLICAS)}
        false += bool(deviations(Probes(probers=probers, sums=sums)))
    yield Figure(
        what=f"sound probes in groups of {_REPLICAS}: somebody named",
        value=f"{false} of {num_sound // _REPLICAS * _REPLICAS}", wanted="0",
    )  # fmt: skip
    large = model_to_train(8, 512)
    probing = Probe([large])
    ids = torch.arange(256).view(2, 128) * 37 % 1000
    at = torch.arange(128).expand(2, 128)

    def step() -> None:
        large.zero_grad()
        large(ids, at, None, labels=ids).mean().backward()

    value = _paired(lambda: probing.run(lambda: large(ids, at, None, labels=ids)), step, 7)
    yield Figure(
        what="one probe over one training step (forward and backward)", value=value,
        wanted="below 0.1 % at an interval of a thousand times that",
    )  # fmt: skip


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
