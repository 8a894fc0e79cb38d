"""A session in one layout: what the page would be told; also a program for several ranks.

torchrun … session_ranks.py OUT TENSOR,PIPELINE… -- FOLDER
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scoped_model import TOKENS, join

from megascope.frames import Frame, decode
from training.distributed import finalize, read_launch
from training.generation.engine import NOTHING, Commands, GenerationCallback
from training.generation.job import open_job
from training.generation.request import Request, Sampling

PROMPT = TOKENS[0].tolist()
RUN = {
    "do": "run", "id": 1, "prompt": PROMPT, "max_tokens": 5, "reduction": "rms",
    "places": ["embedding", "residual", "neurons", "query", "key", "fc1", "qkv"],
}  # fmt: skip
CHANGED = RUN | {
    "id": 2,
    "interventions": [
        {"place": "context", "kind": "zero", "layers": [2], "units": [1, 7]},
        {"place": "residual", "kind": "noise", "layers": [3], "amount": 0.2, "seed": 5},
        {"place": "value", "kind": "scale", "layers": [1], "units": [0, 3], "amount": 0.5},
        {"place": "key", "kind": "noise", "layers": [4], "amount": 0.1, "seed": 6},
    ],
}
PATCHED = CHANGED | {
    "id": 3, "replace_from": 2,
    "interventions": [
        {"place": "residual", "kind": "replace", "layers": [2], "tokens": [23]},
        {"place": "neurons", "kind": "replace", "layers": [3]},
    ],
}  # fmt: skip
ATTENTION = {"do": "attention", "id": 4, "run": 3, "layer": 2, "heads": [0, 5, 11], "rows": []}
PCA = {"do": "pca", "id": 5, "run": 3}
LENS = {"do": "lens", "id": 6, "run": 3}


class Inspected:
    """An engine with a session on this rank, and what the session has said."""

    def __init__(self, folder: Path, tensor: int, pipeline: int) -> None:
        from training.generation.scope import Looking

        flags = ["--tensor-model-parallel-size", str(tensor), "--load-hf", str(folder)]
        flags += ["--pipeline-model-parallel-size", str(pipeline), "--distributed-backend", "gloo"]
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "202"]
        flags += ["--inference-max-requests", "2", "--inference-max-seq-length", "60"]
        job = open_job(flags, read_launch(os.environ))
        self.looking = Looking(job, GenerationCallback())
        self.engine = job.build_engine(self.looking, num_extra_slots=1)
        self.looking.attach(self.engine)
        self.said: dict[int, list[Frame | None]] = {}
        self.looking._session._send = self._hear  # type: ignore[union-attr]

    def _hear(self, identifier: int, content: bytes | None) -> None:
        frame = None if content is None else decode(content)
        self.said.setdefault(identifier, []).append(frame)

    def do(
        self, asides: Sequence[Mapping[str, Any]], requests: Sequence[Request] = ()
    ) -> list[int]:
        """Carry out commands, and requests of others beside; the tokens of the latter."""
        import json

        waiting = [Commands(asides=tuple(map(json.dumps, asides)), requests=tuple(requests))]

        def inbox(is_idle: bool) -> Commands:
            if waiting:
                return waiting.pop()
            return Commands(is_last=True) if is_idle else NOTHING

        tokens = []
        for answers in self.engine.run(inbox):
            tokens += [one.token.token for one in answers if one.token is not None]
        return tokens

    def frames(self, identifier: int) -> list[Frame]:
        """What was said to one command, which is over."""
        *frames, last = self.said[identifier]
        assert last is None
        return [frame for frame in frames if frame is not None]


def request(prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(identifier=9, prompt=tuple(prompt), max_tokens=max_tokens, sampling=Sampling())


def commands() -> Iterator[Mapping[str, Any]]:
    yield from (RUN, CHANGED, PATCHED, ATTENTION, PCA, LENS)


def main(out: Path, layouts: Sequence[str], folder: Path) -> None:
    launch = read_launch(os.environ)
    for layout in layouts:
        tensor, pipeline = map(int, layout.split(","))
        join(tensor, pipeline, launch)
        inspected = Inspected(folder, tensor, pipeline)
        inspected.do([*commands()])
        if launch.rank == 0:
            said = {
                one["id"]: [(dict(f.header), dict(f.arrays)) for f in inspected.frames(one["id"])]
                for one in commands()
            }
            (out / f"{layout}.pickle").write_bytes(pickle.dumps(said))
    finalize()


if __name__ == "__main__":
    at = sys.argv.index("--")
    main(Path(sys.argv[1]), sys.argv[2:at], Path(sys.argv[at + 1]))
