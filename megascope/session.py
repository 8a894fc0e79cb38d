"""Looking into a model that generates: one prompt at a time, on every rank of a serving job.

The same commands reach all ranks in the same order; each rank looks at its own layers and shares,
and rank 0 collects the pieces and answers. Between two tokens the server serves other requests:
`work` does only one step. What was seen of the newest runs is kept, so that attention maps, the
logit lens, PCA and patching need no second run.

    session.receive({"do": "run", "id": 1, "prompt": [5, 7], "max_tokens": 4, …})
    while session.has_work:
        session.work()
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from megascan.errors import ConfigError
from megascope.capture import Notes, Spot, Strip, find_spots, in_order, probabilities, tables_of
from megascope.frames import Array, Frame, decode, encode
from megascope.interventions import Intervening, TensorShares
from megascope.reductions import Part, join_table
from megascope.request import PLACES, Intervention, Kind, read_interventions, read_whole

NUM_ALTERNATIVES = 20
MOST_TOKENS = 1024
MOST_HEADS = 64
MOST_WEIGHTS = 1 << 25
"""Most attention weights of one answer; they take 128 MB while they are computed."""
LENS_TOP = 5
_MOST_LENS_TOKENS = 64
_MOST_PCA_POINTS = 4096
_KEPT_RUNS = 2
_KEPT_TEXTS = 1 << 16
SHOWN_EVERY_S = 0.05
"""Seconds between two packings of strips: to pack many steps costs little more than one, and a page
draws no faster. A model that takes this long for a token shows each token at once."""
_KEPT = ("residual", "query", "key")
"""Places whose whole tensors are kept after every run, in addition to the places of its strips:
attention maps, the logit lens, PCA and patching read them."""
STRIP_PLACES = frozenset(PLACES) - {
    "attention",
    "loss",
    "logits",
    "router",
    "experts",
    "expert_load",
}


@dataclass(frozen=True)
class NextToken:
    """The token that a model chose next, the same on all ranks."""

    token: int
    log_probability: float
    alternatives: Sequence[tuple[int, float]]
    """Tokens and their log probabilities, best first; `NUM_ALTERNATIVES` at most."""
    chosen_at_s: float
    """Time on the clock of the rank that chose; all ranks get it, so that they act the same."""


class LentModel(Protocol):
    """What the server lends: this rank's part of the model, and communication with other ranks."""

    module: torch.nn.Module
    shares: TensorShares
    pp: int
    """This rank's pipeline stage."""
    num_stages: int
    max_length: int

    def compute(
        self, tokens: Sequence[int], start: int, *, temperature: float, draw: float
    ) -> NextToken:
        """Compute tokens from position `start` on; return on all ranks the token that follows."""

    def unembed(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(state, token)` of hidden states `(state, 1, feature)` in any number
        format; call this on the last stage only."""

    def share(self, content: bytes) -> bytes:
        """Return rank 0's bytes on every rank."""

    def collect(self, content: bytes) -> list[bytes] | None:
        """Return every rank's bytes on rank 0, by rank; None on other ranks."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A prompt to continue while somebody looks, and what to show and change meanwhile."""

    identifier: int
    prompt: tuple[int, ...]
    max_tokens: int
    places: tuple[str, ...]
    reduction: str
    temperature: float
    seed: int
    interventions: tuple[Intervention, ...]
    replace_from: int | None
    """Identifier of the run whose values replace this run's (patching)."""

    @property
    def patched_places(self) -> list[str]:
        """Return the places whose values are replaced by those of another run."""
        return [one.place for one in self.interventions if one.kind == Kind.REPLACE]


@dataclass
class Seen:
    """What is kept of a run: its tokens, and whole tensors of this rank, one a step."""

    tokens: list[int]
    places: frozenset[str]
    tensors: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Return the layers of this rank that were seen, sorted."""
        return sorted(layer for place, layer in self.tensors if place == "residual")

    def whole(self, place: str, layer: int) -> torch.Tensor:
        """Return what a place of a layer has computed for all tokens, (token, row, …)."""
        return in_order(place, torch.cat(self.tensors[place, layer]))

    def joined(self, place: str, layer: int) -> torch.Tensor | None:
        """Return what a place of a layer has computed for the only row, (token, …).

        Return None where this rank does not hold the place.
        """
        return self.whole(place, layer)[:, 0] if self.tensors.get((place, layer)) else None


@dataclass(frozen=True)
class _Step:
    """The tokens that one step has computed, from position `start` on, and the next token."""

    start: int
    tokens: Sequence[int]
    following: NextToken


@dataclass
class _Active:
    run: Run
    seen: Seen
    random: np.random.Generator
    spots: list[Spot]
    num_computed: int = 0
    steps: list[_Step] = field(default_factory=list)
    """Steps that are not shown yet."""
    num_shown: int = 0
    """Number of steps that were shown already."""
    shown_s: float = 0.0
    notes: Notes | None = None
    hooks: ExitStack = field(default_factory=ExitStack)
    changes: Intervening | None = None

    def gather(self) -> None:
        """Keep what was computed since the last call; later steps do not write to these tensors."""
        if self.notes is None:
            return
        for spot, tensors in self.notes.take():
            self.seen.tensors.setdefault((spot.place.name, spot.layer), []).extend(tensors)

    def strips(self) -> dict[str, dict[int, Strip]]:
        """Return, by place and layer, what was computed in the steps that are not shown yet."""
        self.gather()
        made: dict[str, dict[int, Strip]] = {}
        for spot in self.spots:
            place, layer = spot.place.name, spot.layer
            if place in self.run.places:
                newest = self.seen.tensors.get((place, layer), [])[self.num_shown :]
                if newest:
                    made.setdefault(place, {})[layer] = Strip(spot.share, newest)
        return made

    def look_away(self) -> None:
        """Take hooks and changes out of the model."""
        self.gather()
        self.hooks.close()
        self.changes = self.notes = None


Send = Callable[[int, bytes | None], None]
"""Takes the id of a command and one of its answers; None follows the last answer."""


class Session:
    """Carries out the commands of a page on one rank."""

    def __init__(
        self, model: LentModel, send: Send, vocab_size: int, text_of: Callable[[int], str]
    ) -> None:
        self._model = model
        self._text_of = lru_cache(maxsize=_KEPT_TEXTS)(text_of)
        self._send = send
        self._vocab_size = vocab_size
        self._commands: deque[Mapping[str, Any]] = deque()
        self._active: _Active | None = None
        self._seen: OrderedDict[int, Seen] = OrderedDict()
        self._spots: list[Spot] = find_spots([model.module])

    @property
    def has_work(self) -> bool:
        """Return whether `work` has anything to do; the same on all ranks."""
        return self._active is not None or bool(self._commands)

    def receive(self, command: Mapping[str, Any]) -> None:
        """Queue a command that `read_command` has checked; carry out ``stop`` at once."""
        if command["do"] == "stop":
            self._stop(int(command["id"]))
        else:
            self._commands.append(command)

    def work(self) -> None:
        """Do one step: compute a token of the run under way, or carry out the next command."""
        if self._active is not None:
            self._advance(self._active)
            return
        if not self._commands:
            return
        command = self._commands.popleft()
        answers = {"attention": self._attention, "lens": self._lens, "pca": self._pca}
        try:
            if command["do"] == "run":
                self._begin(read_run(command, self._model.max_length, self._vocab_size))
                return
            answers[command["do"]](command)
        except ConfigError as error:
            self._say(command["id"], {"kind": "error", "text": str(error)}, {})
        self._send(command["id"], None)

    def _stop(self, identifier: int) -> None:
        self._commands = deque(one for one in self._commands if one["id"] != identifier)
        active = self._active
        if active is not None and active.run.identifier == identifier:
            if active.steps:
                self._show_steps(active)
            self._end_run()
        self._send(identifier, None)

    def look_away(self) -> None:
        """Take our hooks and changes out of the model until our next step."""
        if self._active is not None:
            self._active.look_away()

    def _end_run(self) -> None:
        self.look_away()
        self._active = None

    def _begin(self, run: Run) -> None:
        self._check_patches(run)
        places = frozenset({*run.places, *_KEPT})
        seen = Seen(tokens=list(run.prompt), places=places)
        self._seen[run.identifier] = seen
        self._seen.move_to_end(run.identifier)
        while len(self._seen) > _KEPT_RUNS:
            self._seen.popitem(last=False)
        random = np.random.default_rng(run.seed)
        spots = [spot for spot in self._spots if spot.place.name in places]
        self._active = _Active(run=run, seen=seen, random=random, spots=spots)

    def _check_patches(self, run: Run) -> None:
        if not run.patched_places:
            return
        source = self._source_of(run)
        if source is None:
            raise ConfigError("the run to patch from is not here any more; run it again")
        unseen = [place for place in run.patched_places if place not in source.places]
        if unseen:
            raise ConfigError(
                f"the run to patch from kept nothing of {unseen[0]}: choose it among the strips "
                "and run that again"
            )

    def _advance(self, active: _Active) -> None:
        run, seen = active.run, active.seen
        start = active.num_computed
        tokens = seen.tokens[start:]
        self._look(active)
        if active.changes is not None:
            active.changes.restart(start)
        following = self._model.compute(
            tokens, start, temperature=run.temperature, draw=float(active.random.random())
        )
        active.num_computed += len(tokens)
        active.steps.append(_Step(start, tokens, following))
        seen.tokens.append(following.token)
        is_full = len(seen.tokens) >= self._model.max_length
        is_over = len(seen.tokens) - len(run.prompt) >= run.max_tokens or is_full
        if is_over or following.chosen_at_s - active.shown_s >= SHOWN_EVERY_S:
            active.shown_s = following.chosen_at_s
            self._show_steps(active)
        if is_over:
            self._end_run()
            self._send(run.identifier, None)

    def _look(self, active: _Active) -> None:
        """Put hooks and interventions into the model; they stay there until `look_away`."""
        if active.notes is None:
            if active.run.interventions:
                active.changes = active.hooks.enter_context(self._changes(active.run))
            active.notes = Notes(active.spots)
            active.hooks.callback(active.notes.close)

    def _changes(self, run: Run) -> Intervening:
        source = self._source_of(run)
        replacements = {}
        if source is not None:
            for place, layer in source.tensors:
                if place in run.patched_places:
                    replacements[place, layer] = source.whole(place, layer)
        return Intervening(
            [self._model.module], run.interventions, shares=self._model.shares,
            replacements=replacements,
        )  # fmt: skip

    def _source_of(self, run: Run) -> Seen | None:
        """Return what is kept of the run to patch from; None without such a run."""
        return None if run.replace_from is None else self._seen.get(run.replace_from)

    def _show_steps(self, active: _Active) -> None:
        """Send the frames of the steps that were computed but not shown yet."""
        run, steps = active.run, active.steps
        items, arrays = tables_of(run.reduction, active.strips())
        active.steps, active.num_shown = [], active.num_shown + len(steps)
        parts = self._collect({"per_token": True, "items": items}, arrays)
        if parts is None:
            return
        joined: dict[str, Array] = {}
        layers_of: dict[str, list[int]] = {}
        known = {item["place"] for part in parts for item in part.frame.header["items"]}
        for place in run.places:
            if place not in known:  # layers of experts have no fc1
                continue
            layers_of[place], table = join_table(
                parts, place, run.reduction, num_shares=self._model.shares.size
            )
            joined[place] = table[:, 0, :, 0].astype(np.float32)
        first = 0
        for step in steps:
            end = first + len(step.tokens)
            own = {place: table[:, first:end] for place, table in joined.items()}
            self._say(run.identifier, {**self._header_of(step), "layers": layers_of}, own)
            first = end

    def _header_of(self, step: _Step) -> dict[str, object]:
        following, text_of = step.following, self._text_of
        return {
            "kind": "step", "start": step.start, "tokens": list(step.tokens),
            "next": following.token, "texts": [text_of(one) for one in step.tokens],
            "text": text_of(following.token), "logprob": following.log_probability,
            "top": [[token, logprob, text_of(token)] for token, logprob in following.alternatives],
        }  # fmt: skip

    def _attention(self, command: Mapping[str, Any]) -> None:
        """Send attention maps `(head, query, key)` over all tokens, for chosen heads of a layer."""
        seen, layer = self._seen_of(command), int(command["layer"])
        num_tokens = len(seen.tokens)
        num_weights = len(command["heads"]) * (len(command["rows"]) or num_tokens) * num_tokens
        if num_weights > MOST_WEIGHTS:
            raise ConfigError(
                f"these are {num_weights} weights of attention, and at most {MOST_WEIGHTS} are "
                "computed at once; ask for fewer heads, or for some rows"
            )
        query, key = seen.joined("query", layer), seen.joined("key", layer)
        arrays: dict[str, Array] = {}
        own: list[int] = []
        if query is not None and key is not None:
            first = self._model.shares.rank * query.shape[1]
            here = range(first, first + query.shape[1])
            own = [head for head in command["heads"] if head in here]
            rows = [row for row in command["rows"] if row < query.shape[0]]
            if own:
                weights = probabilities(query, key, heads=[one - first for one in own], rows=rows)
                arrays["weights"] = weights.half().cpu().numpy()
        parts = self._collect({"heads": own}, arrays)
        if parts is None:
            return
        found = {
            head: weights
            for part in parts
            for head, weights in zip(
                part.frame.header["heads"], part.frame.arrays.get("weights", ()), strict=True
            )
        }
        if not found:
            raise ConfigError(f"layer {layer} or its heads are not in this model")
        heads = sorted(found)
        header = {"kind": "attention", "layer": layer, "heads": heads, "tokens": seen.tokens}
        self._say(command["id"], header, {"weights": np.stack([found[head] for head in heads])})

    def _lens(self, command: Mapping[str, Any]) -> None:
        """Send the logit lens: the best tokens that the output layer gives for residual streams.

        Streams of all layers are taken, for the newest tokens.
        """
        seen, model = self._seen_of(command), self._model
        own = [(layer, seen.joined("residual", layer)) for layer in seen.layers]
        newest = {layer: one[-_MOST_LENS_TOKENS:] for layer, one in own if one is not None}
        streams = self._on_last_stage(newest)
        arrays: dict[str, Array] = {}
        if model.pp == model.num_stages - 1:
            layers = sorted(streams)
            stacked = torch.stack([streams[layer] for layer in layers])
            logits = model.unembed(stacked.flatten(0, 1)[:, None]).float()
            logits = logits.view(*stacked.shape[:2], -1).log_softmax(-1)
            best = logits.topk(min(LENS_TOP, logits.shape[-1]), dim=-1)
            arrays = {"ids": best.indices.cpu().numpy(), "logprobs": best.values.cpu().numpy(),
                      "layers": np.array(layers)}  # fmt: skip
        parts = self._collect({}, arrays)
        if parts is None:
            return
        found = next(part.frame.arrays for part in parts if part.frame.arrays)
        num_computed = len(own[0][1]) if own and own[0][1] is not None else 0
        header = {
            "kind": "lens", "layers": found["layers"].tolist(), "tokens": seen.tokens,
            "first": num_computed - found["ids"].shape[1],
            "texts": {one: self._text_of(one) for one in {*found["ids"].flatten().tolist()}},
        }  # fmt: skip
        self._say(command["id"], header, {"ids": found["ids"], "logprobs": found["logprobs"]})

    def _on_last_stage(self, streams: Mapping[int, torch.Tensor]) -> Mapping[int, torch.Tensor]:
        """Return the residual streams of all layers; those of other stages come through rank 0."""
        if self._model.num_stages == 1:
            return streams
        own: dict[str, Array] = {}
        if self._model.shares.rank == 0:
            own = {str(layer): one.float().cpu().numpy() for layer, one in streams.items()}
        parts = self._collect({}, own)
        together = {name: one for part in parts or () for name, one in part.frame.arrays.items()}
        shared = decode(self._model.share(encode({}, together)))
        return {int(name): torch.tensor(one) for name, one in shared.arrays.items()}

    def _pca(self, command: Mapping[str, Any]) -> None:
        """Send residual streams of all layers, for the newest tokens, on their three main axes."""
        seen = self._seen_of(command)
        arrays = {}
        for layer in seen.layers:
            stream = seen.joined("residual", layer)
            if stream is not None and self._model.shares.rank == 0:
                arrays[str(layer)] = stream.float().cpu().numpy()
        parts = self._collect({"layers": list(arrays)}, arrays)
        if parts is None:
            return
        streams = {
            int(layer): stream for part in parts for layer, stream in part.frame.arrays.items()
        }
        layers = sorted(streams)
        num_tokens = max(1, _MOST_PCA_POINTS // len(layers))
        points = np.stack([streams[layer][-num_tokens:] for layer in layers]).astype(np.float64)
        broken = [
            layer
            for layer, stream in zip(layers, points, strict=True)
            if not np.isfinite(stream).all()
        ]
        if broken:
            raise ConfigError(
                f"the stream is not finite from layer {broken[0]} on, so it has no main axes; the "
                "strips show where that begins"
            )
        places, shares = principal_axes(points.reshape(-1, points.shape[-1]))
        header = {
            "kind": "pca", "layers": layers, "tokens": seen.tokens, "shares": shares,
            "first": len(streams[layers[0]]) - points.shape[1],
        }  # fmt: skip
        self._say(command["id"], header, {"points": places.reshape(*points.shape[:2], -1)})

    def _seen_of(self, command: Mapping[str, Any]) -> Seen:
        seen = self._seen.get(int(command["run"]))
        if seen is None or not seen.tensors:
            raise ConfigError("that run is not here any more; run the prompt again")
        return seen

    def _collect(
        self, header: Mapping[str, object], arrays: Mapping[str, Array]
    ) -> list[Part] | None:
        """Return the pieces of all ranks on rank 0; None on other ranks."""
        if self._model.num_stages == self._model.shares.size == 1:
            return [Part(tp=0, pp=0, frame=Frame(header=header, arrays=arrays))]
        place = {"tp": self._model.shares.rank, "pp": self._model.pp}
        found = self._model.collect(encode({**header, **place}, arrays))
        if found is None:
            return None
        frames = [decode(one) for one in found]
        return [Part(tp=frame.header["tp"], pp=frame.header["pp"], frame=frame) for frame in frames]

    def _say(
        self, identifier: int, header: Mapping[str, object], arrays: Mapping[str, Array]
    ) -> None:
        self._send(identifier, encode({**header, "run": identifier}, arrays))


def principal_axes(points: Array) -> tuple[Array, list[float]]:
    """Return `(point, 3)` coordinates on the main axes, and each axis's share of the variance.

    The sign of each axis makes its largest coordinate positive, so that pictures do not flip.
    """
    centred = points - points.mean(0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    count = min(3, len(sizes))
    places = left[:, :count] * sizes[:count]
    at = np.abs(places).argmax(0)
    places = places * np.sign(places[at, np.arange(count)] + 1e-300)
    total = float(np.square(sizes).sum()) or 1.0
    return places, [float(one) for one in np.square(sizes[:count]) / total]


_RUN_PARTS = (
    "do", "prompt", "max_tokens", "places", "reduction", "temperature", "seed", "interventions",
    "replace_from",
)  # fmt: skip


def read_command(command: object, max_length: int, vocab_size: int) -> dict[str, Any]:
    """Check a client's command and return its parts; ConfigError names the first wrong thing."""
    if not isinstance(command, dict):
        raise ConfigError("a command must be an object")
    kind = command.get("do")
    if kind == "run":
        read_run({**command, "id": 0}, max_length, vocab_size)
        return {name: command[name] for name in _RUN_PARTS if name in command}
    shapes: dict[str, dict[str, int]] = {
        "attention": {"run": 2**53, "layer": 4096},
        "lens": {"run": 2**53},
        "pca": {"run": 2**53},
    }
    if not isinstance(kind, str) or kind not in shapes:
        raise ConfigError(f"do is {str(kind)[:40]!r}, expected run, attention, lens or pca")
    made: dict[str, Any] = {"do": kind}
    for name, most in shapes[kind].items():
        made[name] = read_whole(name, command.get(name), 0, most)
    if kind == "attention":
        made["heads"] = _wholes(command, "heads", 4096, MOST_HEADS)
        made["rows"] = _wholes(command, "rows", max_length, MOST_TOKENS)
    return made


def read_run(command: Mapping[str, Any], max_length: int, vocab_size: int) -> Run:
    """Check a command to run a prompt; ConfigError names the first thing that is wrong."""
    prompt = _wholes(command, "prompt", vocab_size - 1, max_length - 1)
    if not prompt:
        raise ConfigError("the prompt has no tokens")
    places = command.get("places", [])
    if not isinstance(places, list) or not all(
        isinstance(one, str) and one in STRIP_PLACES for one in places
    ):
        raise ConfigError(f"places must be a list of some of {', '.join(sorted(STRIP_PLACES))}")
    reduction = command.get("reduction", "rms")
    if reduction not in ("rms", "max", "mean", "zeros", "entropy", "pixels"):
        raise ConfigError(f"reduction {str(reduction)[:40]!r} cannot be drawn as a strip")
    temperature = command.get("temperature", 0.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise ConfigError("temperature must be a number")
    if not 0 <= temperature <= 100:
        raise ConfigError("temperature must be from 0 to 100")
    changes = read_interventions(command.get("interventions", []))
    for one in changes:
        if one.place == "logits":
            raise ConfigError("logits cannot be changed here; change the last layer's residual")
    source = command.get("replace_from")
    return Run(
        identifier=int(command["id"]),
        prompt=tuple(prompt),
        max_tokens=read_whole("max_tokens", command.get("max_tokens"), 1, MOST_TOKENS),
        places=tuple(dict.fromkeys(places)),
        reduction=reduction,
        temperature=float(temperature),
        seed=read_whole("seed", command.get("seed", 0), 0, 2**31),
        interventions=changes,
        replace_from=None if source is None else read_whole("replace_from", source, 0, 2**53),
    )


def _wholes(command: Mapping[str, Any], name: str, high: int, most: int) -> list[int]:
    values = command.get(name, [])
    if not isinstance(values, list) or len(values) > most:
        raise ConfigError(f"{name} must be a list of at most {most} numbers")
    return [read_whole(name, one, 0, high) for one in values]
