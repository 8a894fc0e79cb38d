"""One pipeline stage of a model that generates: built without an optimizer, run step by step.

**Keys and values** of all tokens that rows have seen are kept. Megatron-Core's inference needs all
rows of a batch to be equally long, and keeps keys unrotated, to rotate all of them again for every
token. Here a layer's `core_attention` is replaced: ours rotates the new queries and keys by their
positions, writes them to the cache, and lets each row see only its own places. Everything else of a
layer stays Megatron-Core's, hooks included. In the cache every row has a slot of `max_length`
places in one tensor a layer, of shape (slot, place, group, channel). Memory is taken once and never
grows.

**Light forward passes** (`lighten`) leave out what only training needs. Megatron-Core's forward
passes go through autograd functions, contexts and checks, which for one token of a small model take
longer than the matrix products. Light ones compute the same from the same weights. What a module
needs is looked up once, when its light forward pass is made. Hooks of a module are called as torch
calls them, so they see what they see in training: layers, attention, MLP, linear layers.
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
# From this many tokens of a step on, a product cut in two costs no more than the whole.
_MANY_TOKENS = 512
_Output = tuple[torch.Tensor, torch.Tensor | None]


def lighten(model: torch.nn.Module) -> None:
    """Give each module of a known kind a forward pass that serves generation alone.

    Call it when the model has its modules and their number format; weights may be filled later.
    """
    for module in model.modules():
        light_forward_of = _LIGHT_FORWARDS.get(type(module))
        if light_forward_of is not None:
            module.forward = light_forward_of(module)


def caller(module: torch.nn.Module) -> _Forward:
    """Return a function that calls a module with its forward and forward-pre hooks, as torch does.

    Torch's own call, and that of Megatron-Core's layers around it, checks for much else, which for
    one token takes longer than the hooks.
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


def _block_forward(block: Any) -> _Forward:
    """Return a forward that runs all layers of a stage and, on the last stage, the norm behind."""
    layers = [caller(layer) for layer in block.layers]
    normalize = None if block.final_layernorm is None else caller(block.final_layernorm)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if not block.pre_process:
            hidden_states = block.input_tensor
        for layer in layers:
            hidden_states = layer(hidden_states)[0]
        return hidden_states if normalize is None else normalize(hidden_states)

    return forward


def _layer_forward(layer: Any) -> _Forward:
    """Return a forward that runs attention and MLP, each behind a norm and added to its input."""
    normalize_first, attend = caller(layer.input_layernorm), caller(layer.self_attention)
    normalize_second, transform = caller(layer.pre_mlp_layernorm), caller(layer.mlp)
    select = layer.self_attention.core_attention.select

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, None]:
        output, bias = attend(normalize_first(hidden_states))
        hidden_states = select(hidden_states)
        hidden_states = hidden_states + (output if bias is None else output + bias)
        output, bias = transform(normalize_second(hidden_states))
        return hidden_states + (output if bias is None else output + bias), None

    return forward


def _attention_forward(attention: Any) -> _Forward:
    """Return a forward of queries, keys and values, attention to our cache, and projection."""
    shares_groups = attention.config.num_query_groups < attention.world_size
    heads = attention.get_query_key_value_tensors if shares_groups else _heads_of(attention)
    attend, project = caller(attention.core_attention), caller(attention.linear_proj)

    def forward(hidden_states: torch.Tensor, *_: object, **__: object) -> _Output:
        output: _Output = project(attend(*heads(hidden_states)))
        return output

    return forward


def _heads_of(attention: Any) -> _Forward:
    """Return a function from hidden states to queries, keys and values.

    Queries are `(token, 1, head, channel)`, keys and values `(token, 1, group, channel)`.
    """
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


def _mlp_forward(mlp: Any) -> _Forward:
    """Return a forward of two linear layers with the activation, gated or not, between them."""
    widen, narrow = caller(mlp.linear_fc1), caller(mlp.linear_fc2)
    activate, is_gated = mlp.activation_func, mlp.config.gated_linear_unit
    first = mlp.linear_fc1
    before, after = first._forward_pre_hooks, first._forward_hooks

    def widened(hidden_states: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor
        inner, bias = widen(hidden_states)
        return inner if bias is None else inner + bias

    def halves(hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Compute gate and values.

        For many tokens this takes two products: each result is contiguous, so that the activation
        runs at the memory's speed.
        """
        is_hooked = bool(before or after)
        if hidden_states.shape[0] < _MANY_TOKENS or first.bias is not None or is_hooked:
            return widened(hidden_states).chunk(2, dim=-1)
        return [linear(hidden_states, weight) for weight in first.weight.chunk(2)]

    def forward(
        hidden_states: torch.Tensor,
        per_token_scale: torch.Tensor | None = None,
        **_: object,
    ) -> _Output:
        output: _Output
        if per_token_scale is not None:  # this MLP is an expert, whose tokens are weighted
            output = MLP.forward(mlp, hidden_states, per_token_scale)
            return output
        if is_gated:
            gate, values = halves(hidden_states)
            inner = activate(gate).mul_(values)
        else:
            inner = activate(widened(hidden_states))
        output = narrow(inner)
        return output

    return forward


def _column_forward(layer: Any) -> _Forward:
    """Return the forward of a column-parallel layer: each tensor-parallel rank computes a part of
    the output features, which are gathered where the layer or its caller says so.
    """
    own_weight, group, gathers_by_itself = layer.weight, layer.tp_group, layer.gather_output
    bias, bias_for_caller = _biases(layer)

    def forward(
        inputs: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> _Output:
        output = linear(inputs, own_weight if weight is None else weight, bias)
        gathers = gathers_by_itself if runtime_gather_output is None else runtime_gather_output
        if gathers:
            output = _gather(output, group)
        return output, bias_for_caller

    return forward


def _biases(layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the bias that a linear layer adds itself, and the one that it leaves to its caller."""
    return (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)


def _gather(output: torch.Tensor, group: Any) -> torch.Tensor:
    """Join the features of all ranks of a group along the last dimension."""
    if group.size() == 1:
        return output
    parts = [torch.empty_like(output) for _ in range(group.size())]
    dist.all_gather(parts, output.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _row_forward(layer: Any) -> _Forward:
    """Return the forward of a row-parallel layer: each tensor-parallel rank has a part of the input
    features, and the products are summed over the ranks.
    """
    weight, group = layer.weight, layer.tp_group
    sums = group.size() > 1 and not layer.explicit_expert_comm
    bias, bias_for_caller = _biases(layer)

    def forward(inputs: torch.Tensor) -> _Output:
        output = linear(inputs, weight)
        if sums:
            dist.all_reduce(output, group=group)
        return output if bias is None else output + bias, bias_for_caller

    return forward


def _rms_norm_forward(norm: Any) -> _Forward:
    """Return a forward that divides features by the root of their mean square and multiplies by the
    weight.

    Only for float32 on the CPU, where torch takes twice as many operations. Elsewhere the norm's
    own forward is returned: GPUs do all in one kernel, and in 16 bits the mean is too inexact.
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


_LIGHT_FORWARDS: dict[type, Callable[[Any], _Forward]] = {
    ColumnParallelLinear: _column_forward,
    RowParallelLinear: _row_forward,
    TransformerBlock: _block_forward,
    TransformerLayer: _layer_forward,
    SelfAttention: _attention_forward,
    MLP: _mlp_forward,
    torch.nn.RMSNorm: _rms_norm_forward,
}
"""By kind of module, what makes a light forward pass for one module."""


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
        """Views of the memory in `_layers` as `(place, group, channel)`."""

    def add_layer(self, layer_number: int) -> None:
        """Take the memory of a layer.

        The memory is set to 0: a place that was never written is hidden by a weight of 0, and 0
        times an arbitrary old value may be NaN.
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
        # One view instead of three: for one token of one row, views are a good part of the time.
        _, max_length, groups, channels = self._shape
        size = (slots.stop - slots.start, groups, length, channels)
        strides = (max_length * groups * channels, channels, groups * channels, 1)
        start = slots.start * strides[0]
        return keys.as_strided(size, strides, start), values.as_strided(size, strides, start)

    def write(
        self, layer_number: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write new keys and values `(token, group, channel)` at `places` `(token,)`.

        Places are counted over all slots: slot * `max_length` + position.
        """
        kept_keys, kept_values = self._places[layer_number]
        kept_keys.index_copy_(0, places, keys)
        kept_values.index_copy_(0, places, values)

    def move(self, *, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of slot `source` to slot `target`."""
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
        # The table holds the minus sign of the first half.
        sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
        self._table = torch.stack((cosines, sines)).to(dtype)

    def at(self, positions: torch.Tensor) -> Turns:
        """Return cosines and sines, each `(token, 1, channel)`, of positions `(token,)`."""
        cosines, sines = self._table[:, positions, None]
        return cosines, sines


def rotate(states: torch.Tensor, turns: Turns) -> torch.Tensor:
    """Turn the first channels of `states` `(token, head, channel)`.

    Of n turned channels, i and i + n / 2 are a pair.
    """
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
    """What the attention modules of one rank share: the cache, and the step under way."""

    def __init__(self) -> None:
        self.cache: KeyValueCache
        self.layout: StepTokens
        self.turns: Turns | None = None
        """Cosines and sines for this step's tokens; None without rotary embedding."""
        self.wanted: torch.Tensor | None = None
        """Indices of the tokens that are needed behind the last layer's attention; None: all."""


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    visible: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """Return the context `(row, head, token, channel)` of queries of the same shape.

    Keys and values are `(row, group, place, channel)`. `visible` says which places are seen; where
    it is None, `is_causal` says whether tokens see only earlier places.
    """
    shares_keys = queries.shape[1] != keys.shape[1]
    if queries.shape[2] == 1 and shares_keys:
        # Treat the heads of a group as tokens, so that no key is read twice.
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
    """Passes on a step's queries, keys and values as attention uses them: normalized and rotated.

    This is a module so that hooks see the three tensors, `(token, head, channel)`, and may change
    them before keys and values go into the cache.
    """

    def forward(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs unchanged."""
        return queries, keys, values


class CachedAttention(torch.nn.Module):
    """The attention of one layer to the cache; takes the place of the layer's `core_attention`."""

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
        """Return the part of `states` `(token, …)` that is needed behind this layer's attention."""
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
        """Attend with the tokens of prompt pieces; return `(token, head, channel)`."""
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
        """Make a stage; the cache gets `num_extra_slots` slots behind those of the batch's rows."""
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
        """Return the number format of weights and states."""
        dtype: torch.dtype = self.model.config.params_dtype
        return dtype

    @property
    def is_watched(self) -> bool:
        """Return whether any module has hooks other than ours, which look at it or change it."""
        return sum(map(len, self._hooks)) != self._num_own_hooks

    def _build(self, settings: Settings, sizes: Sizes, vocab_size: int) -> GPTModel:
        """Return Megatron-Core's model with our attention in its layers."""
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
        except RuntimeError as error:  # torch has no other error for too little memory
            raise ConfigError(
                f"there is no memory for the keys and values of {num_slots} rows of "
                f"{limits.max_length} tokens ({str(error).splitlines()[0][:120]}); lower "
                "--inference-max-requests or --inference-max-seq-length"
            ) from error
        self._state.cache = cache
        return cache

    def _take_rotation(self, max_length: int) -> Rotation:
        """Return the model's rotation, and switch it off in the model itself."""
        frequencies = self.model.rotary_pos_emb.inv_freq.to(self.device)
        factor = self.model.rotary_pos_emb.seq_len_interpolation_factor
        if factor is not None:
            frequencies = frequencies / factor
        self.model.position_embedding_type = "none"
        return Rotation(frequencies, max_length, self.model.config.params_dtype)

    def _select(
        self, layer: torch.nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass only the tokens whose logits are needed to the output layer."""
        del layer
        if self._wanted is None or self._state.wanted is not None:  # all, or selected before
            return inputs, options
        return (inputs[0].index_select(0, self._wanted), *inputs[1:]), options

    @torch.inference_mode()
    def run(self, layout: StepTokens, wanted: torch.Tensor | None) -> torch.Tensor | None:
        """Compute a step; return the logits `(wanted, vocabulary)` on the last stage, else None.

        `wanted` are indices of tokens in the stream; None: all tokens.
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
        """Return logits `(state, vocabulary)` of hidden states `(state, 1, feature)`.

        The states are treated as the output of the last layer. Call this on the last stage only.
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
        """Return whether the last layer or the final norm has hooks, which must see all tokens."""
        return any(one._forward_hooks or one._forward_pre_hooks for one in self._end)
