"""A KV cache of fixed slots: rows come and go without the others being moved or copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [slots, heads, capacity, head size]; which part a forward sees is set by SlotCache."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        super().__init__()
        self._num_slots = num_slots
        self._capacity = capacity
        self.first = self.last = 0  # slots of this forward
        self.start = self.end = 0  # first written and last visible position
        self.positions: tuple[Tensor, Tensor] | None = None  # where each row writes its one token, or None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        def room(states: Tensor) -> Tensor:
            return states.new_zeros(self._num_slots, states.shape[1], self._capacity, states.shape[3])

        self.keys, self.values, self.is_initialized = room(key_states), room(value_states), True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = []
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            assert room is not None
            if self.positions is not None:
                rows, positions = self.positions
                room[rows, :, positions] = states[:, :, 0]
            else:
                room[self.first : self.last, :, self.start : self.end] = states
            seen.append(room[self.first : self.last, :, : self.end])
        return seen[0], seen[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.end, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return self._capacity


class SlotCache(Cache):
    """`num_slots` rows of up to `capacity` tokens each; the first ones are in use. Memory is taken at the first forward."""

    def __init__(self, num_layers: int, num_slots: int, capacity: int) -> None:
        self._layers = [_SlotLayer(num_slots, capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._layers))

    def prefill(self, first: int, last: int, start: int, end: int) -> None:
        """The next forward writes positions start … end-1 of slots first … last-1."""
        for layer in self._layers:
            layer.first, layer.last, layer.start, layer.end, layer.positions = first, last, start, end, None

    def decode(self, positions: Tensor, end: int) -> None:
        """The next forward writes one token per row: row i at positions[i] (int64 [n]). `end`: 1 + the largest of them."""
        rows = torch.arange(len(positions), device=positions.device)
        for layer in self._layers:
            layer.first, layer.last, layer.start, layer.end = 0, len(positions), 0, end
            layer.positions = rows, positions

    def copy(self, source: int, first: int, last: int, length: int) -> None:
        """Gives slots first … last-1 the first `length` tokens of slot `source`."""
        for layer in self._layers:
            for room in (layer.keys, layer.values):
                assert room is not None
                room[first:last, :, :length] = room[source, :, :length]
