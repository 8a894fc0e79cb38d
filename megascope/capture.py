"""Places in a GPT of Megatron-Core, and hooks that show what the model computes there.

A **place** is named once for all layers; a spot is a place in one layer of this rank. Tensors are
(token, row, feature); queries, keys and values are (token, row, head, channel). Tensor-parallel
ranks hold contiguous shares of features or heads, or of the tokens with sequence parallelism, so
that all shares can be joined by concatenation.

To add a place: a line in `PLACES`.

**Hooks** are there only while somebody looks:

    with Capture(find_spots(chunks, ["residual"]), take):
        model(tokens, positions, None)      # take(Sight) is called on the spot, on the device

A hook changes nothing: the model computes the same bits with and without it. What is computed again
in the backward pass (activation recomputation) is not shown twice. Each sight says which call of
its module it was. In training this is the microbatch, because every chunk computes its microbatches
in order, whatever the pipeline schedule.

Fused kernels do not return attention probabilities: `probabilities` computes them again from the
queries and keys that a hook has seen, for the heads and rows that were asked for.

A model that generates is looked at for many steps at once, in **strips**: one or a few numbers for
each token and layer at some places.

    notes = Notes(spots)
    model(…); model(…)
    for spot, tensors in notes.take():      # one tensor a pass
        …                                   # a Strip of each spot
    tables_of(reduction, strips)            # all of one shape reduced as one
    notes.close()

For one token of a small model each operation is short, and whatever Python does between two
operations empties caches: reducing each tensor in its hook costs several times as much as reducing
all of them later. No step writes to the tensors of an earlier step, so they may wait. An operation
on so little data takes as long as its launch, so tensors are put together over steps, layers and
places.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from megascope.frames import Array
from megascope.reductions import reduce, width_of

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Side(StrEnum):
    """Whether a place is among a module's inputs or outputs."""

    IN = "in"
    OUT = "out"


class Share(StrEnum):
    """What a tensor-parallel rank holds of a place."""

    WHOLE = "whole"
    FEATURES = "features"
    """A contiguous part of the features, or of the heads."""
    GATED = "gated"
    """A contiguous part of the gates, then the same part of the values they gate."""
    TOKENS = "tokens"
    """A contiguous part of the tokens (sequence parallelism)."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One kind of tensor, in every layer or once in the model."""

    name: str
    meaning: str
    reach: Callable[[Any], object]
    """Returns the module from a layer, or from the model; None where there is none."""
    side: Side = Side.OUT
    index: int = 0
    """Index of the tensor among the module's inputs or outputs."""
    share: Share = Share.WHOLE
    is_layered: bool = True
    follows_sequence: bool = False
    """Whether sequence parallelism cuts the tensor by tokens."""


def _path(dotted: str) -> Callable[[Any], object]:
    """Return a function that follows attributes from an object; None where one is missing."""

    def reach(start: Any) -> object:
        for name in dotted.split("."):
            start = getattr(start, name, None)
        return start

    return reach


def _attention(layer: Any) -> object:
    """Return the module whose inputs are queries, keys and values as they are used.

    The generating engine's attention rotates queries and keys itself, and passes all three through
    a module `heads` before keys and values go into the cache.
    """
    core = _path("self_attention.core_attention")(layer)
    return getattr(core, "heads", core)


PLACES: tuple[Place, ...] = (
    Place(
        name="embedding", meaning="what enters the first layer", reach=_path("embedding"),
        is_layered=False, follows_sequence=True,
    ),
    Place(
        name="qkv", meaning="queries, keys, values as projected, by group",
        reach=_path("self_attention.linear_qkv"), share=Share.FEATURES,
    ),
    Place(
        name="query", meaning="queries as used: normalized, rotated", reach=_attention,
        side=Side.IN, index=0, share=Share.FEATURES,
    ),
    Place(
        name="key", meaning="keys as used", reach=_attention, side=Side.IN, index=1,
        share=Share.FEATURES,
    ),
    Place(
        name="value", meaning="values as used", reach=_attention, side=Side.IN, index=2,
        share=Share.FEATURES,
    ),
    Place(
        name="context", meaning="what each head has gathered", side=Side.IN,
        reach=_path("self_attention.linear_proj"), share=Share.FEATURES,
    ),
    Place(
        name="attention_out", meaning="what attention adds to the stream",
        reach=_path("self_attention.linear_proj"), follows_sequence=True,
    ),
    Place(
        name="fc1", meaning="neurons before their activation function",
        reach=_path("mlp.linear_fc1"), share=Share.FEATURES,
    ),
    Place(
        name="neurons", meaning="neurons after it", reach=_path("mlp.linear_fc2"), side=Side.IN,
        share=Share.FEATURES,
    ),
    Place(
        name="fc2", meaning="what the MLP adds to the stream", reach=_path("mlp.linear_fc2"),
        follows_sequence=True,
    ),
    Place(
        name="router", meaning="weights of the experts that each token is sent to",
        reach=_path("mlp.router"), follows_sequence=True,
    ),
    Place(
        name="experts", meaning="what each expert of this rank returns", reach=_path("mlp.experts"),
    ),
    Place(
        name="residual", meaning="the stream after the layer", reach=lambda layer: layer,
        follows_sequence=True,
    ),
    Place(
        name="logits", meaning="scores of the next token", reach=_path("output_layer"),
        is_layered=False, share=Share.FEATURES,
    ),
    Place(
        name="loss", meaning="loss of each token, where the model is given labels",
        reach=lambda model: model if getattr(model, "post_process", False) else None,
        is_layered=False,
    ),
)  # fmt: skip
BY_NAME = {place.name: place for place in PLACES}
ATTENTION_INPUTS = frozenset({"query", "key", "value"})


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A place in one layer of this rank."""

    place: Place
    layer: int
    """Number of the layer, from 1 over the whole model; 0 for what the model has once."""
    chunk: int
    """Index among this rank's model chunks (interleaved schedules)."""
    module: torch.nn.Module
    share: Share

    @property
    def name(self) -> str:
        """Return the name of the spot, as in ``layer 3 fc1``."""
        return f"layer {self.layer} {self.place.name}" if self.layer else self.place.name

    def is_in(self, layers: Collection[int]) -> bool:
        """Return whether the spot is in one of some layers; empty means all.

        What the model has once is in all layers.
        """
        return not layers or self.layer == 0 or self.layer in layers


def find_spots(
    chunks: Sequence[torch.nn.Module],
    places: Sequence[str] | None = None,
    layers: Sequence[int] = (),
) -> list[Spot]:
    """Return the spots of the model chunks of this rank, in the order in which they are computed.

    `places` are names from `PLACES`, None means all; `layers` count from 1, empty means all.
    Wrapped chunks (data parallelism, half precision) are unwrapped. Places that the model does not
    have are left out.
    """
    from megatron.core.utils import unwrap_model

    wanted = set(BY_NAME if places is None else places)
    return [
        spot
        for number, chunk in enumerate(unwrap_model(list(chunks)))
        for spot in _spots_of(chunk, number)
        if spot.place.name in wanted and spot.is_in(layers)
    ]


def _spots_of(model: GPTModel, chunk: int) -> Iterator[Spot]:
    layered = [place for place in PLACES if place.is_layered]
    after_layers = [place for place in PLACES if not place.is_layered and place.name != "embedding"]
    owners = [(0, model, [BY_NAME["embedding"]])]
    owners += [(int(layer.layer_number), layer, layered) for layer in model.decoder.layers]
    owners += [(0, model, after_layers)]
    for number, owner, places in owners:
        for place in places:
            module = place.reach(owner)
            if isinstance(module, torch.nn.Module):
                share = _share(place, model.config)
                yield Spot(place=place, layer=number, chunk=chunk, module=module, share=share)


def _share(place: Place, config: Any) -> Share:
    if config.tensor_model_parallel_size == 1:
        return Share.WHOLE
    if place.follows_sequence and config.sequence_parallel:
        return Share.TOKENS
    if place.name == "fc1" and config.gated_linear_unit:
        return Share.GATED
    return place.share


Output: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]


class Sight(NamedTuple):
    """One tensor as the model had it; in a training it may be used only until `take` returns.

    This is a tuple because thousands are made each second.
    """

    spot: Spot
    call: int
    """How often the spot was computed before this call, since the capture began."""
    without_bias: torch.Tensor
    """(token, row, feature), or (token, row, head, channel)."""
    share: Share
    is_gradient: bool = False
    """Whether this is the gradient of the loss by the tensor, not the tensor itself."""
    counts: torch.Tensor | None = None
    """At `experts`: how many tokens each expert of this rank had; tokens are sorted by expert."""
    bias: torch.Tensor | None = None
    """Bias (feature,) that Megatron-Core adds to the tensor later."""

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor with its bias, which each call adds anew."""
        return self.without_bias if self.bias is None else self.without_bias + self.bias


Take = Callable[[Sight], None]


def is_repeated() -> bool:
    """Return whether the forward pass that is under way repeats an earlier one.

    Only recomputation runs modules inside a backward pass.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class Calls:
    """Counts the calls of each spot; recomputed calls are counted separately, from 0 as well."""

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], int] = {}

    def next(self, *key: object) -> int:
        """Return how often a key was counted before, in passes that are (or are not) repeated."""
        key = (*key, is_repeated())
        before = self._counts.get(key, 0)
        self._counts[key] = before + 1
        return before

    def restart(self) -> None:
        """Begin at 0 again."""
        self._counts.clear()


_ODD = ATTENTION_INPUTS | {"loss", "logits", "experts"}
"""Places whose tensors need `in_order`, or which need more than one tensor."""


@dataclass(slots=True)
class _View:
    """A spot that is looked at, and how often it was shown."""

    spot: Spot
    is_plain: bool
    """Whether a tensor of three dimensions is this rank's share of (token, row, feature)."""
    index: int
    num_calls: int = 0
    num_gradients: int = 0

    @classmethod
    def of(cls, spot: Spot) -> _View:
        """Return a view of a spot that was not shown yet."""
        return cls(spot, is_plain=spot.place.name not in _ODD, index=spot.place.index)


class _Watched(NamedTuple):
    """The views of one module's inputs and outputs."""

    inputs: list[_View]
    outputs: list[_View]


class Capture:
    """Hooks on some spots; `close`, or leaving the `with`, removes all of them.

    With `gradients` the gradients of these tensors are shown as well. A module has one hook for all
    of its spots, because what torch does around hooks costs more than a look.
    """

    def __init__(self, spots: Sequence[Spot], take: Take, *, gradients: bool = False) -> None:
        self._take = take
        self._gradients = gradients
        by_module: dict[torch.nn.Module, list[Spot]] = {}
        for spot in spots:
            by_module.setdefault(spot.module, []).append(spot)
        self._handles = [self._watch(module, own) for module, own in by_module.items()]

    def _watch(self, module: torch.nn.Module, spots: Sequence[Spot]) -> RemovableHandle:
        """Hook one module: after it has run, or before where only its inputs are looked at."""
        watched = _Watched(
            inputs=[_View.of(spot) for spot in spots if spot.place.side is Side.IN],
            outputs=[_View.of(spot) for spot in spots if spot.place.side is Side.OUT],
        )
        see = self._see

        def before(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            see(watched, inputs, None)

        def after(module: torch.nn.Module, inputs: tuple[Any, ...], output: Output) -> None:
            see(watched, inputs, output)

        if watched.outputs:
            return module.register_forward_hook(after)
        return module.register_forward_pre_hook(before)

    def _see(self, watched: _Watched, inputs: tuple[Any, ...], output: Output | None) -> None:
        for view in watched.inputs:
            self._show(view, inputs[view.index])
        if output is None:
            return
        for view in watched.outputs:
            if view.is_plain:
                self._show(view, *_value_and_bias(output))
            elif view.spot.place.name != "loss" or _is_loss(output):
                counts = inputs[1] if view.spot.place.name == "experts" else None
                self._show(view, value_of(output), counts=counts)

    def _show(
        self,
        view: _View,
        tensor: torch.Tensor,
        bias: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> None:
        if tensor.requires_grad:
            if self._gradients:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    lambda gradient: self._show_gradient(view, gradient, counts)
                )
            tensor = tensor.detach()
        if is_repeated():
            return
        call = view.num_calls
        view.num_calls = call + 1
        bias = None if bias is None else bias.detach()
        if view.is_plain and tensor.dim() == 3:
            self._take(Sight(view.spot, call, tensor, view.spot.share, False, counts, bias))
            return
        if bias is not None:
            tensor = tensor + bias
        self._take(_sight(view.spot, call, tensor, counts, is_gradient=False))

    def _show_gradient(
        self, view: _View, gradient: torch.Tensor, counts: torch.Tensor | None
    ) -> None:
        if self._handles:  # else this capture was closed meanwhile
            call = view.num_gradients
            view.num_gradients = call + 1
            self._take(_sight(view.spot, call, gradient.detach(), counts, is_gradient=True))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _sight(
    spot: Spot, call: int, tensor: torch.Tensor, counts: torch.Tensor | None, *, is_gradient: bool
) -> Sight:
    share = spot.share
    if spot.place.name == "logits" and tensor.shape[-1] != _num_own_rows(spot.module):
        share = Share.WHOLE  # gathered already
    return Sight(spot, call, in_order(spot.place.name, tensor), share, is_gradient, counts)


def value_of(output: Output) -> torch.Tensor:
    """Return the value of a module's output, including a bias that Megatron-Core adds later."""
    tensor, bias = _value_and_bias(output)
    return tensor if bias is None else tensor + bias


def _value_and_bias(output: Output) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(output, torch.Tensor):
        return output, None
    first, second = output[0], output[1] if len(output) > 1 else None
    assert first is not None
    is_bias = second is not None and second.dim() == 1 and first.dim() > 1
    return first, second if is_bias else None


def _is_loss(output: object) -> bool:
    """Return whether a model's output is losses `(row, token)`, not logits or hidden states."""
    return isinstance(output, torch.Tensor) and output.dim() == 2


def _num_own_rows(module: torch.nn.Module) -> int:
    """Return the number of output features of this rank's part of a column-parallel layer."""
    return int(getattr(module, "output_size_per_partition", 0))


def in_order(place: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a place in the order (token, row, …).

    Losses come as (row, token); routers and experts come flattened, as (token, feature); the
    generating engine's heads come without row, as (token, head, channel).
    """
    if place in ATTENTION_INPUTS:
        return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor
    if place == "loss":
        return tensor.t().unsqueeze(-1)
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor


def probabilities(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    heads: Sequence[int] = (),
    rows: Sequence[int] = (),
    scale: float | None = None,
) -> torch.Tensor:
    """Return the causal attention `(head, query, key)` of one row of a batch, in float32.

    `queries` are `(query, head, channel)`, `keys` are `(key, group, channel)`; the queries stand at
    the last positions of the keys. `heads` and `rows` (positions among the queries) choose some;
    empty means all. Products are multiplied by `scale`, by default one over the root of the number
    of channels.
    """
    num_queries, num_heads, num_channels = queries.shape
    chosen = torch.tensor(list(heads) or range(num_heads), device=queries.device)
    at = torch.tensor(list(rows) or range(num_queries), device=queries.device)
    heads_of_group = num_heads // keys.shape[1]
    queries = queries[at][:, chosen].float()
    keys = keys[:, chosen // heads_of_group].float()
    scores = torch.einsum("qhc,khc->hqk", queries, keys)
    scores = scores * (num_channels**-0.5 if scale is None else scale)
    positions = at + keys.shape[0] - num_queries
    hidden = torch.arange(keys.shape[0], device=keys.device) > positions[:, None]
    weights: torch.Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights


def entropy(weights: torch.Tensor) -> torch.Tensor:
    """Return the entropy over the last axis in nats: 0 for one token, log n for n equal tokens."""
    found: torch.Tensor = torch.special.entr(weights).sum(-1)
    return found


_Pass: TypeAlias = tuple[tuple[Any, ...], Output | None]


@dataclass
class _Noted:
    """One module's spots, and its inputs and outputs since `Notes.take` was last called."""

    spots: list[Spot]
    passed: list[_Pass] = field(default_factory=list)


class Notes:
    """Notes what passes some spots, by at most one hook a module, until `close`."""

    def __init__(self, spots: Sequence[Spot]) -> None:
        by_module: dict[torch.nn.Module, _Noted] = {}
        for spot in spots:
            by_module.setdefault(spot.module, _Noted([])).spots.append(spot)
        self._noted = list(by_module.values())
        self._handles = [_watch(module, noted) for module, noted in by_module.items()]

    def take(self) -> Iterator[tuple[Spot, list[torch.Tensor]]]:
        """Yield each spot with its tensors since the last call, one a pass, as the model had them.

        Concatenate the tensors, then put the result in order (`in_order`).
        """
        for noted in self._noted:
            passed = noted.passed.copy()
            noted.passed.clear()
            for spot in noted.spots:
                yield spot, _tensors(spot, passed)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _watch(module: torch.nn.Module, noted: _Noted) -> RemovableHandle:
    passed = noted.passed

    def note(
        module: torch.nn.Module, inputs: tuple[Any, ...], output: Output | None = None
    ) -> None:
        passed.append((inputs, output))

    if any(spot.place.side is Side.OUT for spot in noted.spots):
        return module.register_forward_hook(note)
    return module.register_forward_pre_hook(note)


def _tensors(spot: Spot, passed: Sequence[_Pass]) -> list[torch.Tensor]:
    if spot.place.side is Side.IN:
        index = spot.place.index
        return [inputs[index] for inputs, _ in passed]
    return [value_of(output) for _, output in passed if output is not None]


@dataclass(frozen=True)
class Strip:
    """One place of one layer: the tensors of all steps that wait to be shown."""

    share: Share
    tensors: list[torch.Tensor]


Strips: TypeAlias = Mapping[str, Mapping[int, Strip]]
"""Strips by place and layer."""


def tables_of(reduction: str, strips: Strips) -> tuple[list[dict[str, object]], dict[str, Array]]:
    """Return a frame's items and arrays: partial numbers `(layer, 1, token, row, number)`.

    All numbers leave the device by one transfer, which waits for the device.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for place, layers in strips.items():
        tensor = next(iter(layers.values())).tensors[0]
        key = (place in ATTENTION_INPUTS, tensor.shape[1:], tensor.dtype)
        alike.setdefault(key, []).append(place)
    made: dict[str, Array] = {}
    tables = [_of_all(reduction, strips, places) for places in alike.values()]
    for places, numbers in zip(alike.values(), _on_host(tables), strict=True):
        first = 0
        for place in places:
            made[place] = numbers[first : first + len(strips[place])]
            first += len(strips[place])
    items = [_item_of(place, reduction, strips[place]) for place in strips]
    return items, {str(number): made[place] for number, place in enumerate(strips)}


def _item_of(place: str, reduction: str, layers: Mapping[int, Strip]) -> dict[str, object]:
    """Return the entry of a frame's header that describes the table of one place."""
    first = next(iter(layers.values()))
    tensor = in_order(place, first.tensors[0])
    return {
        "place": place, "reduction": reduction, "gradient": False, "share": first.share.value,
        "width": width_of(reduction, tensor, per_token=True), "layers": list(layers),
        "microbatches": [0],
    }  # fmt: skip


def _of_all(reduction: str, strips: Strips, places: Sequence[str]) -> torch.Tensor:
    """Return `(place and layer, 1, token, row, number)`: partial numbers of tensors of a shape."""
    layers = [strip for place in places for strip in strips[place].values()]
    together = torch.cat([tensor for strip in layers for tensor in strip.tensors])
    made = reduce(reduction, in_order(places[0], together))
    return made.view(len(layers), 1, -1, *made.shape[1:])


def _on_host(tables: Sequence[torch.Tensor]) -> list[Array]:
    """Return tables as arrays, by one transfer from the device."""
    if not tables:
        return []
    flat = torch.cat([one.view(-1) for one in tables]).cpu().numpy()
    made, first = [], 0
    for one in tables:
        made.append(flat[first : first + one.numel()].reshape(one.shape))
        first += one.numel()
    return made
