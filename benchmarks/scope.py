"""What looking into a model costs, and whether wrong bits are found.

    python -m benchmarks.scope [--trials 1000] [--sound 10000] [-o RESULT.md]

One process, one rank, CPU. Costs are ratios of CPU time of this process: with and without looking
take turns, the ratio of the medians over all rounds is given, with the 5th to 95th percentile of
ratios of neighbours. Wrong bits: one flipped mantissa bit in one weight or one activation of one of
four simulated replicas; a probe must name that replica with the planted layer and module.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.jobs import environment_line, publish

_ROUNDS = 15
_REPLICAS = 4


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
    parser.add_argument("--sound", type=int, default=10_000)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    _join()
    figures = [*_training(), *_speaking(), *_probing(given.trials, given.sound)]
    rows = [f"| {one.what} | {one.value} | {one.wanted} |" for one in figures]
    text = "\n".join(
        ["# Looking into a model, CPU", "", environment_line("cpu"), "",
         "`python -m benchmarks.scope`. Alternating rounds in one process; ratios of medians of "
         "CPU time, in brackets the 5th to 95th percentile of neighbours' ratios. The machine was "
         "shared.", "",
         "| what | found | wanted |", "|---|---|---|", *rows, ""]
    )  # fmt: skip
    publish(text, given.output)
    return 0


def _join() -> None:
    from training.arguments import resolve_sizes
    from training.distributed import Launch, initialize, seed_everything

    settings = _settings(2, 64)
    launch = Launch(rank=0, local_rank=0, world_size=1, local_world_size=1)
    initialize(settings, resolve_sizes(settings, 1, is_trained=False), launch, "cpu")
    seed_everything(1)


def _settings(num_layers: int, hidden: int) -> Any:
    from training.arguments.model_values import settings_to_use

    return settings_to_use(
        {"num_layers": num_layers, "hidden_size": hidden, "num_attention_heads": 8,
         "max_position_embeddings": 128, "position_embedding_type": "rope",
         "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
        "float32", hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip


def _model(num_layers: int, hidden: int, vocab_size: int = 1000) -> Any:
    """A model with random weights, ready for gradients."""
    import torch

    from training.arguments import resolve_sizes
    from training.model import build_bare_model

    settings = _settings(num_layers, hidden)
    sizes = resolve_sizes(settings, 1, is_trained=False)
    (model,) = build_bare_model(settings, sizes, vocab_size, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.05 if parameter.dim() > 1 else 1 + drawn * 0.05)
    return model


def _paired(one: Callable[[], object], other: Callable[[], object], rounds: int) -> str:
    """CPU time of `one` over `other`."""
    ones, others = [], []
    for _ in range(rounds + 2):
        for run, times in ((other, others), (one, ones)):
            begun = time.process_time()
            run()
            times.append(time.process_time() - begun)
    ones, others = ones[2:], others[2:]
    ratios = sorted(a / b for a, b in zip(ones, others, strict=True))
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    ratio = statistics.median(ones) / statistics.median(others)
    return f"× {ratio:.3f} ({low:.3f} to {high:.3f}; {1000 * statistics.median(others):.0f} ms)"


def _training() -> Iterator[Figure]:
    """A step with 5 places of all layers looked at, and what is left of it afterwards."""
    import torch

    from megascope.interventions import TensorShares
    from megascope.recorder import Limits, Recorder
    from megascope.recording import DataFile
    from megascope.request import Request, RequestFile, write_request

    model = _model(8, 512)
    tokens = torch.arange(256).view(2, 128) * 37 % 1000
    positions = torch.arange(128).expand(2, 128)

    def step() -> torch.Tensor:
        model.zero_grad()
        loss = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()
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

            def looked_at(recorder: Recorder = recorder) -> None:
                recorder.begin(1)
                step()
                recorder.end()

            wanted = "≤ 1.03" if name.endswith("rms and max") else "–"
            yield Figure(
                what=f"training step, {name}", value=_paired(looked_at, step, _ROUNDS),
                wanted=wanted,
            )  # fmt: skip
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    same = "identical" if torch.equal(before, step()) else "different"
    yield Figure(
        what="afterwards: hooks left, loss before and after", value=f"{hooks}, {same}",
        wanted="0, identical",
    )  # fmt: skip


def _speaking() -> Iterator[Figure]:
    """Decoding with strips beside decoding alone, through the server's engine."""
    import torch

    from megascope.attention import probabilities
    from megascope.frames import encode
    from megascope.session import Session
    from training.generation.engine import Engine
    from training.generation.request import Limits
    from training.generation.scope import Lent
    from training.generation.stage import Stage

    settings = _settings(8, 512)
    from training.arguments import resolve_sizes

    limits = Limits(num_rows=1, max_length=128, max_prompt_tokens=128)
    sizes = resolve_sizes(settings, 1, is_trained=False)
    stage = Stage(settings, sizes, 1000, "cpu", limits, num_extra_slots=1)
    stage.model.load_state_dict(_model(8, 512).state_dict(), strict=False)
    lent = Lent(Engine(stage, limits))
    prompt = list(range(32))

    @torch.inference_mode()
    def alone() -> None:
        tokens, start = list(prompt), 0
        for _ in range(24):
            row = lent.compute(tokens[start:], start, temperature=0.0, draw=0.0)
            start = len(tokens)
            tokens.append(int(row[0]))

    @torch.inference_mode()
    def strips() -> None:
        session = Session(lent, lambda identifier, frame: None, 1000, str)
        session.receive(
            {"do": "run", "id": 1, "prompt": prompt, "max_tokens": 24, "reduction": "rms",
             "places": ["residual", "attention_out", "fc2", "neurons", "context", "query"]}
        )  # fmt: skip
        while session.has_work:
            session.work()

    yield Figure(
        what="32 tokens read and 24 written, strips of 6 places in 8 layers",
        value=_paired(strips, alone, _ROUNDS), wanted="≤ 1.10",
    )  # fmt: skip
    query = torch.randn(2048, 1, 64)
    begun = time.process_time()
    frame = encode({}, {"weights": probabilities(query, query).half().numpy()})
    spent = time.process_time() - begun
    yield Figure(
        what="one attention head of 2,048 × 2,048: computed and packed",
        value=f"{spent:.2f} s CPU, {len(frame) / 1e6:.1f} MB", wanted="< 0.5 s on the page",
    )  # fmt: skip


def _probing(num_trials: int, num_sound: int) -> Iterator[Figure]:
    """Planted bits that are named, and accusations among sound replicas."""
    import torch

    from benchmarks.planted_bits import trials
    from detect.causes.corruption import deviations
    from megascan.probes import Prober, Probes
    from megascan.topology import Layout
    from megascope.probe import Probe

    model = _model(2, 64, 200)
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
        found += is_right and bool(places & {planted, f"layer 3 {planted}"})
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
    large = _model(8, 512)
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
