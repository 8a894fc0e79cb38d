"""One pipeline stage of a model that generates: built without an optimizer, run step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megascan.errors import ConfigError
from training.arguments import Settings, Sizes
from training.distributed import refusals_as_errors
from training.generation.attention import CachedAttention, KeyValueCache, Rotation, StepState
from training.generation.layout import StepTokens
from training.generation.lightening import lighten
from training.generation.request import Limits
from training.model import build_bare_model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


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
