"""One pipeline stage of a model that generates: built without an optimizer, run step by step.

**Keys and values** of all tokens that rows have seen are kept. Megatron-Core's inference needs all
rows of a batch to be equally long, keeps keys unrotated and rotates all of them again for every
token. Here a layer's `core_attention` is ours: it rotates the new queries and keys by their own
positions, writes the cache, and lets each row see its own places. Everything else of a layer stays
Megatron-Core's, hooks included. In the cache every row has a slot of `max_length` places in one
tensor a layer, of shape (slot, place, group, channel). Memory is taken once and never grows.

**Light forward passes** (`lighten`) leave out what only training needs. Megatron-Core's own go
through autograd functions, contexts and checks, which for one token of a small model take longer
than the products. These compute the same from the same weights. What a module needs is looked up
once, when its light forward pass is made; a module that has hooks is called as torch calls it, so
hooks see what they see in training: layers, attention, MLP, linear layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn.functional import linear, scaled_dot_product_attention

from megascan.errors import ConfigError
from training.arguments import Settings, Sizes
from training.distributed import refusals_as_errors
from training.generation.request import Limits
from training.generation.scheduler import Decoding, Piece, StepTokens
from training.model import build_bare_model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

_Forward = Callable[..., Any]
# Of a step, from which on a product cut in two costs no more than the whole.
_MANY_TOKENS = 512
_Output = tuple[torch.Tensor, torch.Tensor | None]


def lighten(model: torch.nn.Module) -> None:
    """Give each module of a known kind (`_MAKERS`) a forward pass that serves generation alone.

    Call it when the model has its modules and their number format; weights may be filled later.
    """
    for module in model.modules():
        make = _MAKERS.get(type(module))
        if make is not None:
            module.forward = make(module)


def caller(module: torch.nn.Module) -> _Forward:
    """Call a module with those hooks that change or show values, as torch calls them.

    Torch's own way, and that of Megatron-Core's layers around it, looks for much else: for one
    token it takes longer than the hooks.
    """
    before, after = module._forward_pre_hooks, module._forward_hooks
    is_special = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs

    def call(*inputs: object) -> Any:
        if not (before or after):
            return module.forward(*inputs)
        if any(is_special):
            return module(*inputs)
        for enter in before.values():
            changed = enter(module, inputs)
            if changed is not None:
                inputs = changed if isinstance(changed, tuple) else (changed,)
        output = module.forward(*inputs)
        for leave in after.values():
            changed = leave(module, inputs, output)
            output = output if changed is None else changed
        return output

    return call


def _block(block: Any) -> _Forward:
    """Run all layers of a stage and, on the last one, the norm behind them."""
    layers = [caller(layer) for layer in block.layers]
    normalize = None if block.final_layernorm is None else caller(block.final_layernorm)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if not block.pre_process:
            hidden_states = block.input_tensor
        for layer in layers:
            hidden_states = layer(hidden_states)[0]
        return hidden_states if normalize is None else normalize(hidden_states)

    return forward


def _layer(layer: Any) -> _Forward:
    """Run attention and MLP, each behind its norm and added to what came in."""
    normalize_first, normalize_second = map(
        caller, (layer.input_layernorm, layer.pre_mlp_layernorm)
    )
    attend, transform = caller(layer.self_attention), caller(layer.mlp)
    select = layer.self_attention.core_attention.select

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        output, bias = attend(normalize_first(hidden_states))
        hidden_states = select(hidden_states)
        hidden_states = hidden_states + (output if bias is None else output + bias)
        output, bias = transform(normalize_second(hidden_states))
        return hidden_states + (output if bias is None else output + bias), None

    return forward


def _attention(attention: Any) -> _Forward:
    """Compute queries, keys and values, the attention to our cache, and the projection."""
    shares_groups = attention.config.num_query_groups < attention.world_size
    heads = attention.get_query_key_value_tensors if shares_groups else _heads(attention)
    attend, project = caller(attention.core_attention), caller(attention.linear_proj)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> _Output:
        output: _Output = project(attend(*heads(hidden_states)))
        return output

    return forward


def _heads(attention: Any) -> _Forward:
    """Return queries `(token, 1, head, channel)`, keys and values `(token, 1, group, channel)`."""
    mix = caller(attention.linear_qkv)
    groups = attention.num_query_groups_per_partition
    channels = attention.hidden_size_per_attention_head
    norms = attention.q_layernorm, attention.k_layernorm
    of_queries, of_keys = (None if norm is None else caller(norm) for norm in norms)

    def heads(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mixed = mix(hidden_states)[0]
        mixed = mixed.view(*mixed.shape[:2], groups, -1, channels)
        query = mixed[:, :, :, :-2].flatten(2, 3)
        key, value = mixed[:, :, :, -2], mixed[:, :, :, -1]
        return (
            query if of_queries is None else of_queries(query),
            key if of_keys is None else of_keys(key),
            value,
        )

    return heads


def _mlp(mlp: Any) -> _Forward:
    """Run the two linear layers with the activation, gated or not, between them."""
    widen, narrow = caller(mlp.linear_fc1), caller(mlp.linear_fc2)
    activate, is_gated = mlp.activation_func, mlp.config.gated_linear_unit
    first = mlp.linear_fc1
    hooks = first._forward_pre_hooks, first._forward_hooks

    def widened(hidden_states: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor
        inner, bias = widen(hidden_states)
        return inner if bias is None else inner + bias

    def halves(hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Compute gate and values; of many tokens in two products, which leave each in one piece,
        so that the activation runs at the memory's speed.
        """
        if hidden_states.shape[0] < _MANY_TOKENS or first.bias is not None or any(hooks):
            return widened(hidden_states).chunk(2, dim=-1)
        return [linear(hidden_states, weight) for weight in first.weight.chunk(2)]

    def forward(
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **_: object,
    ) -> _Output:
        output: _Output
        if per_token_scale is not None:  # an expert, whose tokens are weighted
            output = MLP.forward(mlp, hidden_states, per_token_scale)
            return output
        gate, up = halves(hidden_states) if is_gated else (widened(hidden_states), None)
        inner = activate(gate)
        output = narrow(inner if up is None else inner.mul_(up))
        return output

    return forward


def _column(layer: Any) -> _Forward:
    """Return features cut over the tensor-parallel ranks, or gathered when the caller wants them
    all.
    """
    own, group, gathers = layer.weight, layer.tp_group, layer.gather_output
    added, given = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)

    def forward(
        inputs: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> _Output:
        output = linear(inputs, own if weight is None else weight, added)
        if gathers if runtime_gather_output is None else runtime_gather_output:
            output = _gather(output, group)
        return output, given

    return forward


def _gather(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Join the features of all ranks along the last dimension."""
    if group.size() == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(group.size())]
    dist.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _row(layer: Any) -> _Forward:
    """Return a sum over the tensor-parallel ranks, each of which has a part of the features."""
    weight, bias, group = layer.weight, layer.bias, layer.tp_group
    sums = group.size() > 1 and not layer.explicit_expert_comm
    added, given = (None, bias) if layer.skip_bias_add else (bias, None)

    def forward(inputs: torch.Tensor) -> _Output:
        output = linear(inputs, weight)
        if sums:
            dist.all_reduce(output, group=group)
        return output if added is None else output + added, given

    return forward


def _rms_norm(norm: Any) -> _Forward:
    """Divide features by the root of their mean square, and multiply by the weight.

    On the CPU torch computes it in twice as many operations; GPUs have one for all, and in two
    bytes the mean is not exact enough.
    """
    weight = norm.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or norm.eps is None:
        original: _Forward = norm.forward
        return original
    (size,) = norm.normalized_shape
    root_eps = torch.tensor(norm.eps**0.5)

    def forward(states: torch.Tensor) -> torch.Tensor:
        length = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scaled: torch.Tensor = states / length.mul_(size**-0.5).hypot_(root_eps)
        return scaled.mul_(weight)

    return forward


_MAKERS: dict[type, Callable[[Any], _Forward]] = {
    ColumnParallelLinear: _column,
    RowParallelLinear: _row,
    TransformerBlock: _block,
    TransformerLayer: _layer,
    SelfAttention: _attention,
    MLP: _mlp,
    torch.nn.RMSNorm: _rms_norm,
}


class KeyValueCache:
    """Keys and values of one rank's layers, for `num_slots` rows of up to `max_length` tokens."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_length: int,
        num_groups: int,
        num_channels: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self._shape = (num_slots, max_length, num_groups, num_channels)
        self._dtype, self._device = dtype, device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """The same memory as `(place, group, channel)`."""

    def add_layer(self, layer_number: int) -> None:
        """Take the memory of a layer.

        It begins as zeros: a place that was never written is hidden by a weight of 0, and 0 times
        whatever lay there before may be NaN.
        """
        keys = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        values = torch.zeros_like(keys)
        self._layers[layer_number] = (keys, values)
        self._places[layer_number] = (keys.flatten(0, 1), values.flatten(0, 1))

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all layers that were added."""
        return sum(2 * keys.nbytes for keys, _ in self._layers.values())

    def read(
        self, layer_number: int, slots: slice | torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of some slots `(row, group, place, channel)` up to a length."""
        keys, values = self._layers[layer_number]
        if isinstance(slots, torch.Tensor):
            return keys[slots, :length].transpose(1, 2), values[slots, :length].transpose(1, 2)
        # One view instead of three: for one token of one row these are a good part of the time.
        _, max_length, groups, channels = self._shape
        size = (slots.stop - slots.start, groups, length, channels)
        strides = (max_length * groups * channels, channels, groups * channels, 1)
        start = slots.start * strides[0]
        return keys.as_strided(size, strides, start), values.as_strided(size, strides, start)

    def write(
        self, layer_number: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Put new keys and values `(token, group, channel)` where `places` say.

        A place counts over all slots: slot * `max_length` + position.
        """
        kept_keys, kept_values = self._places[layer_number]
        kept_keys.index_copy_(0, places, keys)
        kept_values.index_copy_(0, places, values)

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of a slot over those of another."""
        for pair in self._layers.values():
            for kept in pair:
                kept[target, :length] = kept[source, :length]


Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines."""


class Rotation:
    """Cosines and sines of a rotary embedding for all positions, from its frequencies."""

    def __init__(self, frequencies: torch.Tensor, max_length: int, dtype: torch.dtype) -> None:
        positions = torch.arange(max_length, dtype=torch.float32, device=frequencies.device)
        angles = torch.outer(positions, frequencies.float())
        cosines = torch.cat((angles.cos(), angles.cos()), dim=-1)
        # The sign that the first of a pair has is put into the table.
        sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
        self._table = torch.stack((cosines, sines)).to(dtype)

    def at(self, positions: torch.Tensor) -> Turns:
        """Return cosines and sines, `(token, 1, channel)` each, of the positions `(token,)`."""
        cosines, sines = self._table[:, positions, None]
        return cosines, sines


def rotate(states: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn the first channels of `states` `(token, head, channel)`, each pair half a head apart."""
    cosines, sines = turns
    num_turned = cosines.shape[-1]
    if num_turned < states.shape[-1]:
        turned = rotate(states[..., :num_turned], turns)
        return torch.cat((turned, states[..., num_turned:]), dim=-1)
    half = num_turned // 2
    turned = states * cosines
    # Half by half: a copy with the halves swapped takes a GPU longer than the products.
    turned[..., :half].addcmul_(states[..., half:], sines[..., :half])
    turned[..., half:].addcmul_(states[..., :half], sines[..., half:])
    return turned


class StepState:
    """What the attention modules of one rank share: the cache, and the step that is under way."""

    def __init__(self) -> None:
        self.cache: KeyValueCache
        self.layout: StepTokens
        self.turns: Turns | None = None
        """Of this step's tokens; None without rotary embedding."""
        self.wanted: torch.Tensor | None = None
        """The only tokens that are needed behind the last layer's attention; None: all."""


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the context `(row, head, token, channel)` of queries of that shape.

    Keys and values are `(row, group, place, channel)`. `visible` says which places are seen (None:
    all, or causally when the row begins here).
    """
    shares_keys = queries.shape[1] != keys.shape[1]
    if queries.shape[2] == 1 and shares_keys:
        # The heads of a group as if they were tokens: no key is read twice.
        rows, heads, _, channels = queries.shape
        grouped = queries.view(rows, keys.shape[1], -1, channels)
        context = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=visible, scale=scale
        )
        return context.reshape(rows, heads, 1, channels)
    return scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=is_causal, scale=scale,
        enable_gqa=shares_keys,
    )  # fmt: skip


class Heads(torch.nn.Module):
    """Queries, keys and values of a step's tokens as they are used: normalized and rotated.

    A module of its own so that hooks see them, `(token, head, channel)`, and may change them before
    they go into the cache.
    """

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Give back what is given."""
        return queries, keys, values


class CachedAttention(torch.nn.Module):
    """The attention of one layer to the cache, in the place of its `core_attention`."""

    def __init__(
        self, state: StepState, *, layer_number: int, num_channels: int, is_last: bool
    ) -> None:
        super().__init__()
        self._is_last = is_last
        self.heads = Heads()
        self._pass = caller(self.heads)
        self._scale = num_channels**-0.5
        self._layer_number = layer_number
        self._state = state

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object = None,
        **options: object,
    ) -> torch.Tensor:
        """Return context `(token, 1, heads * channels)` of queries `(token, 1, head, channel)`."""
        del attention_mask, options
        state = self._state
        layout = state.layout
        queries, keys, values = query[:, 0], key[:, 0], value[:, 0]
        if state.turns is not None:
            num_heads = queries.shape[1]
            turned = rotate(torch.cat((queries, keys), dim=1), state.turns)
            queries, keys = turned[:, :num_heads], turned[:, num_heads:]
        queries, keys, values = self._pass(queries, keys, values)
        state.cache.write(self._layer_number, layout.places, keys, values)
        parts = []
        if layout.decoding is not None:
            parts.append(self._decode(queries, layout.decoding))
        parts += [self._read(queries, piece) for piece in layout.pieces]
        context = self.select(parts[0] if len(parts) == 1 else torch.cat(parts))
        return context.reshape(context.shape[0], 1, -1)

    def select(self, states: torch.Tensor) -> torch.Tensor:
        """Keep of `states` `(token, …)` what is needed behind this layer's attention."""
        wanted = self._state.wanted if self._is_last else None
        return states if wanted is None else states.index_select(0, wanted)

    def _decode(self, queries: torch.Tensor, decoding: Decoding) -> torch.Tensor:
        """Attend with one token of each row; return `(row, head, channel)`."""
        cache = self._state.cache
        keys, values = cache.read(self._layer_number, decoding.slots, decoding.length)
        context = attend(
            queries[: decoding.num_rows, :, None],
            keys,
            values,
            visible=decoding.visible,
            is_causal=False,
            scale=self._scale,
        )
        return context[:, :, 0]

    def _read(self, queries: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Attend with pieces of prompts; return `(token, head, channel)`."""
        slots = slice(piece.first_slot, piece.first_slot + piece.num_rows)
        length = piece.start + piece.num_tokens
        keys, values = self._state.cache.read(self._layer_number, slots, length)
        num_tokens = piece.num_rows * piece.num_tokens
        own = queries[piece.first_token : piece.first_token + num_tokens]
        own = own.view(piece.num_rows, piece.num_tokens, *own.shape[1:])
        context = attend(
            own.transpose(1, 2),
            keys,
            values,
            visible=piece.visible,
            is_causal=piece.visible is None,
            scale=self._scale,
        )
        return context.transpose(1, 2).flatten(0, 1)


class Stage:
    """The layers of this rank, their cache, and the way to the neighbouring stages."""

    def __init__(
        self,
        settings: Settings,
        sizes: Sizes,
        vocab_size: int,
        device: str,
        limits: Limits,
        *,
        num_extra_slots: int = 0,
    ) -> None:
        """Make a stage; `num_extra_slots` of the cache lie behind those of the limits' rows, for
        others' use.
        """
        self.device = device
        self.vocab_size = vocab_size
        self._state = StepState()
        self.is_first: bool = parallel_state.is_pipeline_first_stage()
        self.is_last: bool = parallel_state.is_pipeline_last_stage()
        with refusals_as_errors():
            self.model = self._build(settings, sizes, vocab_size)
        self._wanted: torch.Tensor | None
        self.cache = self._take_cache(sizes, limits, limits.num_rows + num_extra_slots)
        if settings.model.position_embedding_type == "rope":
            self._rotation: Rotation | None = self._take_rotation(limits.max_length)
        else:
            self._rotation = None
        decoder = self.model.decoder
        self._end = (*decoder.layers[-1].modules(), decoder.final_layernorm) if self.is_last else ()
        if self.is_last:
            self.model.output_layer.register_forward_pre_hook(self._select, with_kwargs=True)
        self._hooks = [
            hooks
            for module in self.model.modules()
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._num_own_hooks = sum(map(len, self._hooks))

    @property
    def dtype(self) -> torch.dtype:
        """Number format of weights and states."""
        dtype: torch.dtype = self.model.config.params_dtype
        return dtype

    @property
    def is_watched(self) -> bool:
        """Tell whether hooks of others look at any module, or change what it computes."""
        return sum(map(len, self._hooks)) != self._num_own_hooks

    def _build(self, settings: Settings, sizes: Sizes, vocab_size: int) -> GPTModel:
        """Return Megatron-Core's model, with attention of ours in its layers."""
        (model,) = build_bare_model(settings, sizes, vocab_size, self.device)
        for layer in model.decoder.layers:
            layer.self_attention.core_attention = CachedAttention(
                self._state,
                layer_number=layer.layer_number,
                num_channels=sizes.kv_channels,
                is_last=self.is_last and layer is model.decoder.layers[-1],
            )
        lighten(model)
        return model

    def _take_cache(self, sizes: Sizes, limits: Limits, num_slots: int) -> KeyValueCache:
        layers = self.model.decoder.layers
        cache = KeyValueCache(
            num_slots=num_slots,
            max_length=limits.max_length,
            num_groups=layers[0].self_attention.num_query_groups_per_partition,
            num_channels=sizes.kv_channels,
            dtype=self.model.config.params_dtype,
            device=self.device,
        )
        try:
            for layer in layers:
                cache.add_layer(layer.layer_number)
        except RuntimeError as error:  # torch's only word for memory that is not there
            raise ConfigError(
                f"there is no memory for the keys and values of {num_slots} rows of "
                f"{limits.max_length} tokens ({str(error).splitlines()[0][:120]}); lower "
                "--inference-max-requests or --inference-max-seq-length"
            ) from error
        self._state.cache = cache
        return cache

    def _take_rotation(self, max_length: int) -> Rotation:
        """Take the rotation over from the model, whose attention gets its tokens unrotated."""
        frequencies = self.model.rotary_pos_emb.inv_freq.to(self.device)
        factor = self.model.rotary_pos_emb.seq_len_interpolation_factor
        if factor is not None:
            frequencies = frequencies / factor
        self.model.position_embedding_type = "none"
        return Rotation(frequencies, max_length, self.model.config.params_dtype)

    def _select(
        self, layer: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Let only those tokens reach the output layer whose logits are needed."""
        del layer
        if self._wanted is None or self._state.wanted is not None:  # all, or left out before
            return inputs, options
        return (inputs[0].index_select(0, self._wanted), *inputs[1:]), options

    @torch.inference_mode()
    def run(self, layout: StepTokens, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """Compute a step; gives the logits `(wanted, vocabulary)` on the last stage, else None.

        `wanted` are places in the stream; None: all of it.
        """
        self._state.layout = layout
        positions = layout.positions
        if self._rotation is not None:
            self._state.turns = self._rotation.at(positions[0])
        self._wanted = wanted
        self._state.wanted = None if self._is_observed() else wanted
        if not self.is_first:
            self.model.set_input_tensor(self._receive(layout.places.shape[0]))
        output = self.model(layout.tokens, positions, None, runtime_gather_output=True)
        if self.is_last:
            logits: torch.Tensor = output[0, :, : self.vocab_size]
            return logits
        group = parallel_state.get_pipeline_model_parallel_group()
        after = parallel_state.get_pipeline_model_parallel_next_rank()
        dist.send(output.contiguous(), after, group=group)
        return None

    @torch.inference_mode()
    def unembed(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits `(state, vocabulary)` of hidden states `(state, 1, feature)`, as if they
        were the last layer's; on the last stage.
        """
        model = self.model
        states = states.to(device=self.device, dtype=model.config.params_dtype)
        self._wanted = None
        tied = model.share_embeddings_and_output_weights
        logits, _ = model.output_layer(
            model.decoder.final_layernorm(states),
            weight=model.shared_embedding_or_output_weight() if tied else None,
            runtime_gather_output=True,
        )
        own: torch.Tensor = logits[:, 0, : self.vocab_size]
        return own

    def _receive(self, num_tokens: int) -> torch.Tensor:
        config = self.model.config
        states = torch.empty(
            num_tokens, 1, config.hidden_size, dtype=config.params_dtype, device=self.device
        )
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.recv(states, parallel_state.get_pipeline_model_parallel_prev_rank(), group=group)
        return states

    def _is_observed(self) -> bool:
        """Return whether hooks look at the last layer, and are to see all tokens of a step
        there.
        """
        return any(one._forward_hooks or one._forward_pre_hooks for one in self._end)
