"""Capturing in a training: what the request asks for, into this rank's file.

    recorder = Recorder(chunks, file, …)
    recorder.begin(iteration)      # looks for a request; sets hooks if the iteration is due
    …                              # forward and backward passes
    recorder.before_step(); …; recorder.after_step()      # around the optimizer
    recorder.end()                 # removes hooks; one transfer from the device, one frame

Nothing here may harm the training: every moment is guarded; the first failure is reported once and
ends the recording. The cost of looking is measured; above the budget fewer iterations are captured.

Ranks append to files in the job's folder (`DataFile`, `ProbeFile`), which the job never reads; no
port is opened, and nothing travels between the ranks.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist

from megascan.errors import ConfigError, InputError
from megascan.probes import Point, Prober, header_line, probe_file_name, probe_line
from megascan.topology import Layout
from megascope.capture import Capture, Sight, Spot, entropy, find_spots, probabilities
from megascope.frames import encode, whole_frames
from megascope.interventions import Intervening, TensorShares
from megascope.reductions import reduce, rms_by_expert, width_of
from megascope.request import Request, RequestFile

if TYPE_CHECKING:
    from megascope.one_pass import Magnitudes

_LOG = logging.getLogger(__name__)
MOST_NUMBERS = 1 << 22
"""Most numbers of one iteration on one rank (16 MiB). The frame says when some were left out."""
_ENTROPY_ROWS = 16
"""About how many queries a head's entropy is computed from."""
_SAMPLE = 4096
"""About how many numbers of a parameter its norms are estimated from."""
_WEIGHTS_EVERY = 8
"""Iterations between two norms of parameters; a power of two, like the factors by which a budget
makes captures rarer."""
_PATIENCE = 3
"""Captured iterations in a row above the budget until fewer iterations are captured."""
_FAR_ABOVE = 4
"""From this multiple of the budget on, fewer iterations are captured at once."""
_MOST_OF_ITERATION, _MOST_S = 0.5, 1.0
"""Looking stops within an iteration when it has taken more than `_MOST_S`, plus this share (or the
budget's, if larger) of the time that the iteration has taken so far without looking."""


@dataclass(frozen=True)
class Key:
    """What an array of a frame holds."""

    place: str
    reduction: str
    is_gradient: bool


@dataclass
class Group:
    """The partial numbers of one `Key`, by layer and microbatch."""

    share: str
    width: int
    numbers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a viewer may ask of a training."""

    budget_ratio: float = 0.05
    """Time that looking may take, over the time that the training itself takes."""
    interventions: bool = False
    """Whether requests may change what is computed."""


class Recorder:
    """Carries out the request of the folder on one rank."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        file: DataFile,
        requests: RequestFile,
        *,
        shares: TensorShares,
        limits: Limits,
    ) -> None:
        self._chunks = list(chunks)
        self._file = file
        self._requests = requests
        self._shares = shares
        self._limits = limits
        self._request = Request()
        self._spots: list[Spot] | None = None
        self._every = 1
        self._over_budget = 0
        self._is_broken = False
        self._is_due = False
        self._iteration = 0
        self._open: ExitStack | None = None
        self._groups: dict[Key, Group] = {}
        self._order: list[tuple[Key, int, int]] = []
        self._num_numbers = 0
        self._queries: dict[int, torch.Tensor] = {}
        self._weights: _Weights | None = None
        self._spent_s = 0.0
        self._started_s = 0.0
        self._is_cut = False
        self._pending: _Pending | None = None
        self._warned_of: set[str] = set()
        self._magnitudes = _one_pass(self._chunks)

    def begin(self, iteration: int) -> None:
        """Look for a new request, and set hooks if the iteration is due."""
        self._guarded(lambda: self._begin(iteration))

    def before_step(self) -> None:
        """Remember a sample of the parameters, before the optimizer changes them."""
        self._guarded(self._before_step)

    def after_step(self) -> None:
        """Compare the parameters with the sample from before the optimizer's step."""
        self._guarded(self._after_step)

    def end(self) -> None:
        """Remove the hooks and write what was captured."""
        self._guarded(self._end)

    def close(self) -> None:
        """Write the last captured iteration, whose numbers may still be on the way to the host."""
        self._guarded(self._write_pending)

    def _guarded(self, moment: Callable[[], None]) -> None:
        if not self._is_broken:
            try:
                moment()
            except Exception as error:
                self._fail(error)
        if self._is_broken and self._open is not None:
            self._open.close()
            self._open = None

    def _fail(self, error: Exception) -> None:
        self._is_broken = True
        _LOG.warning("looking into the model has ended (%s); training goes on", error)

    def _begin(self, iteration: int) -> None:
        self._iteration = iteration
        self._look_for_request()
        request = self._request
        self._started_s, self._spent_s = time.perf_counter(), 0.0
        self._is_due = request.is_due(iteration) and iteration % self._every == 0
        changes = request.interventions if request.first <= iteration <= request.last else ()
        if not self._is_due and not changes:
            return
        self._groups, self._order, self._num_numbers = {}, [], 0
        self._is_cut = False
        self._open = ExitStack()
        if changes:
            inside = Intervening(self._chunks, changes, shares=self._shares)
            self._open.enter_context(inside)
            inside.restart(iteration)
        if self._is_due:
            if self._spots is None:
                self._spots = self._spots_of(request)
            looking = Capture(self._spots, self._take, gradients=request.gradients)
            self._open.enter_context(looking)

    def _look_for_request(self) -> None:
        try:
            request = self._requests.changed()
        except ConfigError as error:
            if str(error) not in self._warned_of:
                self._warned_of.add(str(error))
                _LOG.warning("a request to look into the model is left alone: %s", error)
            return
        if request is None:
            return
        if request.interventions and not self._limits.interventions:
            _LOG.warning(
                "a request wants to change what is computed, which this run does not allow "
                "(--scope-interventions); it is left alone"
            )
            return
        self._request, self._every, self._over_budget = request, 1, 0
        self._spots = None

    def _spots_of(self, request: Request) -> list[Spot]:
        wanted = set(request.places)
        if "attention" in wanted:
            wanted |= {"query", "key"}
        if "expert_load" in wanted:
            wanted.add("experts")
        return find_spots(self._chunks, tuple(wanted), request.layers)

    def _take(self, sight: Sight) -> None:
        begun = time.perf_counter()
        computed_s = begun - self._started_s - self._spent_s
        most = max(_MOST_OF_ITERATION, self._limits.budget_ratio)
        if self._spent_s > _MOST_S + most * computed_s:
            self._is_cut = True
            return
        try:
            with torch.no_grad():
                self._look_at(sight)
        except Exception as error:  # a hook must not end the training
            self._fail(error)
        self._spent_s += time.perf_counter() - begun

    def _look_at(self, sight: Sight) -> None:
        request, spot = self._request, sight.spot
        if sight.call >= request.num_microbatches or self._is_broken:
            return
        if "attention" in request.places and not sight.is_gradient:
            self._look_at_attention(sight)
        if sight.counts is not None:
            self._look_at_experts(sight, sight.counts)
            return
        if spot.place.name not in request.places:
            return
        made = self._in_one_pass(sight)
        missing = [name for name in request.reductions if name not in made]
        if missing:
            tensor = sight.tensor
            made |= {name: reduce(name, tensor, per_token=request.per_token) for name in missing}
        for name in request.reductions:
            width = width_of(name, sight.without_bias, per_token=request.per_token)
            self._keep(Key(spot.place.name, name, sight.is_gradient), sight, made[name], width)

    def _in_one_pass(self, sight: Sight) -> dict[str, torch.Tensor]:
        """Return the reductions that one pass over a tensor gives; empty without the kernel."""
        request = self._request
        wants_magnitudes = "rms" in request.reductions or "max" in request.reductions
        if self._magnitudes is None or request.per_token or not wants_magnitudes:
            return {}
        energy, largest = self._magnitudes.of(sight.without_bias, sight.bias)
        return {"rms": energy, "max": largest}

    def _look_at_experts(self, sight: Sight, counts: torch.Tensor) -> None:
        """Keep two numbers for each expert of this rank: rms of its output, number of tokens."""
        places, num_experts = self._request.places, len(counts)
        # With tensor parallelism inside experts a rank holds only an addend of the output.
        if "experts" in places and not _is_split(sight.spot):
            made = rms_by_expert(sight.tensor, counts)
            self._keep(Key("experts", "rms", sight.is_gradient), sight, made, num_experts)
        if "expert_load" in places and not sight.is_gradient:
            load = counts.to(sight.tensor.device).float().view(1, 1, -1)
            self._keep(Key("expert_load", "mean", False), sight, load, num_experts)

    def _keep(self, key: Key, sight: Sight, made: torch.Tensor, width: int) -> None:
        if self._num_numbers + made.numel() > MOST_NUMBERS:
            self._is_cut = True
            return
        self._num_numbers += made.numel()
        group = self._groups.setdefault(key, Group(sight.share.value, width))
        group.numbers[sight.spot.layer, sight.call] = made
        self._order.append((key, sight.spot.layer, sight.call))

    def _look_at_attention(self, sight: Sight) -> None:
        """Keep the entropy of each head's attention, once a layer's queries and keys are there."""
        place, layer = sight.spot.place.name, sight.spot.layer
        if place == "query":
            self._queries[layer] = sight.tensor
        if place != "key" or layer not in self._queries:
            return
        queries = self._queries.pop(layer)
        step = max(1, queries.shape[0] // _ENTROPY_ROWS)
        rows = range(step - 1, queries.shape[0], step)
        found = [
            entropy(probabilities(queries[:, row], sight.tensor[:, row], rows=rows)).mean(-1)
            for row in range(queries.shape[1])
        ]
        made = torch.stack(found).mean(0).view(1, 1, -1)
        self._keep(Key("attention", "entropy", False), sight, made, made.shape[-1])

    def _before_step(self) -> None:
        wanted = self._request.weights and self._is_due
        if wanted and self._iteration % _WEIGHTS_EVERY == 0:
            begun = time.perf_counter()
            self._weights = _Weights(self._chunks)
            self._spent_s += time.perf_counter() - begun

    def _after_step(self) -> None:
        if self._weights is not None:
            begun = time.perf_counter()
            self._weights.compare()
            self._spent_s += time.perf_counter() - begun

    def _end(self) -> None:
        if self._open is None:
            return
        self._open.close()
        self._open = None
        if not self._is_due:
            return
        begun = time.perf_counter()
        self._write_pending()
        if self._magnitudes is not None:
            self._magnitudes.finish()
        header: dict[str, object] = {
            "kind": "data", "iteration": self._iteration, "request": self._request.identifier,
            "per_token": self._request.per_token, "every": self._every * self._request.every,
            "is_cut": self._is_cut,
        }  # fmt: skip
        parts = [one for group in self._groups.values() for one in group.numbers.values()]
        if self._weights is not None:
            header["weights"] = self._weights.names
            parts.append(self._weights.table())
            self._weights = None
        self._pending = _Pending(header, self._groups, self._order, _to_host(parts))
        if not self._pending.on_host.is_on_its_way:
            self._write_pending()
        self._groups = {}
        self._spent_s += time.perf_counter() - begun
        self._heed_budget(time.perf_counter() - self._started_s)

    def _write_pending(self) -> None:
        """Write the newest captured iteration when its numbers have come from the device."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        items, arrays, rest = _unpacked(pending.groups, pending.on_host.numbers())
        header = {**pending.header, "items": items}
        if "weights" in header:
            arrays["weights"] = rest.reshape(-1, 3)
        broken = _first_broken(pending.order, items, arrays)
        if broken is not None:
            header["broken"] = broken
            layer, place = broken["layer"], broken["place"]
            _LOG.warning(
                "iteration %d, microbatch %d: the first number that is not finite is in %s%s",
                header["iteration"], broken["microbatch"],
                f"layer {layer} {place}" if layer else place,
                " (gradient)" if broken["gradient"] else "",
            )  # fmt: skip
        self._file.append(encode(header, arrays))

    def _heed_budget(self, duration_s: float) -> None:
        """Capture fewer iterations once looking costs more than the budget.

        Do so immediately where looking costs more than `_FAR_ABOVE` times the budget, otherwise
        after `_PATIENCE` captures in a row above the budget. Twice the budget halves the number of
        captures.
        """
        share = self._spent_s / max(duration_s - self._spent_s, 1e-9) / self._every
        excess = share / self._limits.budget_ratio
        self._over_budget = self._over_budget + 1 if excess > 1 else 0
        if self._over_budget >= _PATIENCE or excess > _FAR_ABOVE:
            self._every *= 2 ** math.ceil(math.log2(excess))
            self._over_budget = 0


def _one_pass(chunks: Sequence[torch.nn.Module]) -> Magnitudes | None:
    """Return the kernel that reduces a tensor to rms and max in one pass; None without a GPU or
    where the kernel cannot be built."""
    device = next((one.device for chunk in chunks for one in chunk.parameters()), None)
    if device is None or device.type != "cuda":
        return None
    try:
        from megascope.one_pass import Magnitudes

        magnitudes = Magnitudes(device)
        magnitudes.of(torch.ones(16, device=device), torch.ones(16, device=device))
        magnitudes.finish()
    except Exception as error:  # no Triton, or not the compiler that Triton needs
        _LOG.info("looking reads each tensor twice: no kernel of Triton can be made (%s)", error)
        return None
    return magnitudes


@dataclass(frozen=True)
class _OnHost:
    """Numbers that are in the host's memory, or on the way there until the event `copied`."""

    flat: torch.Tensor
    copied: torch.cuda.Event | None = None

    @property
    def is_on_its_way(self) -> bool:
        return self.copied is not None

    def numbers(self) -> np.ndarray[Any, Any]:
        """Return the numbers; wait for the copy if it is still under way."""
        if self.copied is not None:
            self.copied.synchronize()
        return cast("np.ndarray[Any, Any]", self.flat.numpy())


def _to_host(parts: Sequence[torch.Tensor]) -> _OnHost:
    """Start one transfer of all numbers to the host, without waiting for it."""
    if not parts:
        return _OnHost(torch.empty(0))
    flat = torch.cat([part.reshape(-1).float() for part in parts])
    if not flat.is_cuda:
        return _OnHost(flat)
    there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    there.copy_(flat, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    return _OnHost(there, copied)


@dataclass(frozen=True)
class _Pending:
    """A captured iteration that is not written yet: its numbers may be on the way to the host."""

    header: dict[str, object]
    groups: Mapping[Key, Group]
    order: Sequence[tuple[Key, int, int]]
    on_host: _OnHost


def _is_split(spot: Spot) -> bool:
    """Return whether tensor parallelism splits each expert."""
    config = cast(Any, spot.module).config
    return int(getattr(config, "expert_tensor_parallel_size", 1) or 1) > 1


def _unpacked(
    groups: Mapping[Key, Group], flat: np.ndarray[Any, Any]
) -> tuple[list[dict[str, Any]], dict[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return items and arrays of all groups, and the rest of `flat`.

    Arrays are (layer, microbatch, token, row, partial).
    """
    items: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    start = 0
    for number, (key, group) in enumerate(groups.items()):
        layers = sorted({layer for layer, _ in group.numbers})
        calls = sorted({call for _, call in group.numbers})
        shape = tuple(next(iter(group.numbers.values())).shape)
        size = math.prod(shape)
        table = np.full((len(layers), len(calls), *shape), np.nan, dtype=np.float32)
        for layer, call in group.numbers:
            at = layers.index(layer), calls.index(call)
            table[at] = flat[start : start + size].reshape(shape)
            start += size
        arrays[str(number)] = table
        items.append(
            {"place": key.place, "reduction": key.reduction, "gradient": key.is_gradient,
             "share": group.share, "width": group.width, "layers": layers,
             "microbatches": calls}
        )  # fmt: skip
    return items, arrays, flat[start:]


def _first_broken(
    order: Sequence[tuple[Key, int, int]],
    items: Sequence[Mapping[str, Any]],
    arrays: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any] | None:
    """Return the first place, in the order of computing, whose number is infinite or NaN."""
    tables = {
        Key(item["place"], item["reduction"], item["gradient"]): (item, arrays[str(number)])
        for number, item in enumerate(items)
    }
    if all(np.isfinite(table).all() for _, table in tables.values()):
        return None
    for key, layer, call in order:
        item, table = tables[key]
        at = item["layers"].index(layer), item["microbatches"].index(call)
        if not np.isfinite(table[at]).all():
            return {"layer": layer, "place": key.place, "microbatch": call,
                    "gradient": key.is_gradient}  # fmt: skip
    return None


class _Weights:
    """Norms of parameters, their gradients and updates, from a sample of each parameter."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._named = list(_named_parameters(chunks))
        self.names = [name for name, _ in self._named]
        self._before = [_sampled(parameter).clone() for _, parameter in self._named]
        self._gradients = [_gradient(parameter) for _, parameter in self._named]
        self._rows: list[torch.Tensor] = []

    def compare(self) -> None:
        """Take the norms of parameters, gradients and updates; call it after the optimizer."""
        for (_, parameter), before, gradient in zip(
            self._named, self._before, self._gradients, strict=True
        ):
            update = _rms(_sampled(parameter) - before)
            self._rows.append(torch.stack((_rms(before), gradient, update)))

    def table(self) -> torch.Tensor:
        """Return root mean squares of parameter, gradient, update: `(parameter, 3)`."""
        return torch.stack(self._rows)


def _named_parameters(
    chunks: Sequence[torch.nn.Module],
) -> Iterator[tuple[str, torch.Tensor]]:
    from megatron.core.utils import unwrap_model

    for chunk in unwrap_model(list(chunks)):
        numbers = {str(at): str(one.layer_number) for at, one in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts = ["layer", numbers[parts[2]], *parts[3:]]
            yield ".".join(parts), parameter


def _sampled(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a parameter's reduced gradient; NaN without one."""
    found = getattr(parameter, "main_grad", None)
    found = parameter.grad if found is None else found
    if found is None:
        return torch.tensor(float("nan"), device=parameter.device)
    return _rms(_sampled(found))


def _rms(values: torch.Tensor) -> torch.Tensor:
    return values.float().square().mean().sqrt()


class ProbeFile:
    """This rank's file of probes, one line each; a line is on the disk when `append` returns.

    A folder that cannot be written is reported once and ends the recording, never the training.
    """

    def __init__(self, folder: Path, *, layout: Layout, device: str) -> None:
        self._rank = dist.get_rank()
        self._path = folder / probe_file_name(self._rank)
        self._layout, self._device = layout, device
        self._is_open = False
        self._is_broken = False

    def append(self, iteration: int, points: Sequence[Point], sums: Sequence[str]) -> None:
        """Write one probe, and before the first probe of a run a header."""
        if self._is_broken:
            return
        text = probe_line(iteration, sums)
        if not self._is_open:
            text = header_line(self._prober(points)) + text
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._is_open:
                end_line(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._is_open = True
        except OSError as error:
            self._is_broken = True
            _LOG.warning("no more probes are written: %s", error)

    def _prober(self, points: Sequence[Point]) -> Prober:
        return Prober(
            rank=self._rank, layout=self._layout, host=socket.gethostname(),
            device=self._device, points=tuple(points),
        )  # fmt: skip


def end_line(path: Path) -> None:
    """Cut off a last line that an earlier run could not finish."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


class DataFile:
    """This rank's file of frames; two files take at most `max_bytes` on the disk.

    A file that would grow beyond half of that becomes the older file and replaces the one before.
    """

    def __init__(self, folder: Path, rank: int, *, max_bytes: int) -> None:
        self._path = folder / data_file_name(rank)
        self._max_bytes = max_bytes
        self._continued = b""
        self._size = 0

    def open(self, header: bytes, *, continued: bytes) -> None:
        """Begin a run with its frame `header`; OSError when the folder cannot be written.

        `continued` is the frame that begins each later file of the same run.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._continued = continued
        if self._path.exists():
            _cut_unfinished(self._path)
        self._append(header)

    def append(self, frame: bytes) -> None:
        """Append a frame; OSError when it cannot be written."""
        if self._size + len(frame) > self._max_bytes // 2:
            self._path.replace(self._path.with_suffix(".old.bin"))
            self._append(self._continued)
        self._append(frame)

    def _append(self, content: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(content)
            self._size = file.tell()


def _cut_unfinished(path: Path) -> None:
    """Cut off a last frame that an earlier run did not finish; rename a file of another kind."""
    content = path.read_bytes()
    try:
        end = max((end for _, end in whole_frames(content)), default=0)
    except InputError:
        path.replace(path.with_suffix(".damaged"))
        return
    if end < len(content):
        os.truncate(path, end)


def data_file_name(rank: int) -> str:
    """Return the name of a rank's file of frames."""
    return f"scope-data-{rank:05d}.bin"
