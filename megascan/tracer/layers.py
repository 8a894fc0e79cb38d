"""Take turns: which layers' modules are recorded in the iteration that is traced.

Which layers a rank has is learned in the first iteration that it traces, in which all of them are
recorded; `TraceConfig.sampled_layers` chooses from then on, alike on all ranks of a stage.
"""

from __future__ import annotations

from collections import defaultdict

from megascan.config import LEAST_LAYERS, TraceConfig


class LayerTurns:
    """The layers of one rank; asked at every module. `least` of a chunk are always recorded."""

    def __init__(self) -> None:
        self.least = LEAST_LAYERS
        self._layers_of_chunk: defaultdict[int, set[int]] = defaultdict(set)
        self._chosen: frozenset[int] | None = None

    def begin_iteration(self, config: TraceConfig, iteration: int) -> None:
        """Choose for the iteration that begins; until layers are known, all of them."""
        known = config.layer_stride > 1 and self._layers_of_chunk
        self._chosen = None
        if known:
            self._chosen = config.sampled_layers(iteration, self._layers_of_chunk, self.least)

    def takes(self, layer: int | None, chunk: int = 0) -> bool:
        """Return whether the modules of a layer are recorded; what is in no layer always is."""
        if self._chosen is not None:
            return layer is None or layer in self._chosen
        if layer is not None:
            self._layers_of_chunk[chunk].add(layer)
        return True

    def largest_stride(self) -> int:
        """Return from which stride on no fewer layers are recorded; 1 without any layers."""
        sizes = [len(layers) // self.least for layers in self._layers_of_chunk.values()]
        return max(sizes, default=1)

    @property
    def chosen(self) -> tuple[int, ...] | None:
        """The layers of this iteration, None for all."""
        return None if self._chosen is None else tuple(sorted(self._chosen))
