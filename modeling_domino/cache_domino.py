"""Keys and values of several rows in buffers that stay where they are: rejected columns are overwritten.

Column `c` of a row belongs to token `c` of its text, left padding included, as in transformers' own caches; but each row
may be at another column. A pass writes its tokens at columns of its own in each row, and a mask says which columns a token
may see, so nothing is ever cropped, moved or concatenated. Where a target cannot take such a mask, rows are aligned: they
end at one common column, and are moved to the right as far as they are shorter than the longest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)


CHUNK = 128  # columns that a buffer grows by
ADOPTABLE = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer, DummyLayer)


@dataclass
class Place:
    """
    Where the next pass writes, shared by the layers of a cache.

    Args:
        columns: Of each row's tokens, [b, n]; None where rows are aligned.
        start: The first of the common columns of aligned rows.
        end: Behind the last column of any row.
    """

    columns: Tensor | None = None
    start: int = 0
    end: int = 0


class RowsLayer(CacheLayerMixin):
    """
    Buffers of one layer, [b, heads, capacity, head_dim].

    Args:
        place: Of the cache.
        sliding_window: Columns that a token sees, itself included; None: all before it. A sliding layer keeps as many.
    """

    def __init__(self, place: Place, sliding_window: int | None = None):
        super().__init__()
        self.place, self.sliding_window = place, sliding_window
        self.is_sliding = sliding_window is not None
        self.first = 0  # column that the buffers begin with

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers for states of the given form."""
        self.keys, self.values = (
            states.new_zeros(*states.shape[:2], whole_chunks(self.place.end), states.shape[-1])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def reserve(self, end: int, keep_from: int) -> None:
        """Makes room for the columns before `end`; of those that no token from `keep_from` on sees, some may go."""
        if end <= self.first + self.capacity:
            return
        first = max(self.first, keep_from - self.sliding_window + 1) if self.is_sliding else 0
        gone, capacity = first - self.first, self.capacity
        if capacity - (end - first) < (CHUNK // 2 if self.is_sliding else 0):  # else moving frees enough for a while
            capacity = whole_chunks(end - first) + (CHUNK if self.is_sliding else 0)
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            kept = old[:, :, gone:]
            new[:, :, : kept.shape[2]] = kept
            setattr(self, name, new)
        self.first = first

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes the states of a pass at its place; returns the whole buffers, or of aligned rows what they may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns, start = self.place.columns, self.place.start
        if columns is None:
            end = start + key_states.shape[2]
            into = slice(start - self.first, end - self.first)
            self.keys[:, :, into], self.values[:, :, into] = key_states, value_states
            seen = slice(self._first_seen(start) - self.first, end - self.first)
            return self.keys[:, :, seen], self.values[:, :, seen]
        columns = (columns - self.first).to(key_states.device)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        self.keys[rows, :, columns] = key_states.transpose(1, 2)
        self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys, self.values

    def _first_seen(self, start: int) -> int:
        return max(0, start - self.sliding_window + 1) if self.is_sliding else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a pass gets, and the first of them."""
        if self.place.columns is not None:
            return self.capacity, self.first
        first = self._first_seen(self.place.start)
        return self.place.start + query_length - first, first

    def get_seq_length(self) -> int:
        """Columns before those that the next pass of aligned rows writes."""
        return self.place.start

    def get_max_length(self) -> int:
        return -1

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        self.keys, self.values = (states[rows.to(states.device)] for states in (self.keys, self.values))

    def move(self, by: Tensor) -> None:
        """Moves each row to the right by as many columns, [b]; what comes in from outside means nothing."""
        places = torch.arange(self.capacity, device=self.keys.device)
        source = (places - by.to(places.device)[:, None]).clamp(0, self.capacity - 1)[:, None, :, None]
        self.keys = self.keys.gather(2, source.expand_as(self.keys))
        self.values = self.values.gather(2, source.expand_as(self.values))


class RowsCache(Cache):
    """
    Args:
        sliding_windows: Of each layer that keeps keys and values; None for full attention.
    """

    def __init__(self, sliding_windows: list[int | None]):
        self.place = Place()
        super().__init__(layers=[RowsLayer(self.place, window) for window in sliding_windows])

    @classmethod
    def adopt(cls, cache: Cache) -> "RowsCache":
        """
        Takes over what a cache holds; `give_back` fills it again.

        Args:
            cache: One that `can_adopt`, of which every layer that keeps anything has seen a pass.
        """
        length = int(cache.get_seq_length())
        rows = cls([])
        for layer in cache.layers:
            if isinstance(layer, DummyLayer) or not layer.is_initialized:
                rows.layers.append(layer)
                continue
            # A static layer is croppable only as long as its window holds all.
            own = RowsLayer(rows.place, layer.sliding_window if layer.is_sliding and _is_dynamic(layer) else None)
            kept = min(length, own.sliding_window - 1) if own.is_sliding else length
            last = layer.keys.shape[2] if _is_dynamic(layer) else length
            states = (layer.keys[:, :, last - kept : last], layer.values[:, :, last - kept : last])
            own.first = length - kept
            own.keys, own.values = (
                old.new_zeros(*old.shape[:2], whole_chunks(kept + 1), old.shape[-1]) for old in states
            )
            own.keys[:, :, :kept], own.values[:, :, :kept] = states
            own.is_initialized = True
            if _is_dynamic(layer):
                layer.keys = layer.values = None  # or the prompt would be held twice
            rows.layers.append(own)
        rows.place.start = length
        return rows

    def give_back(self, cache: Cache, length: int) -> None:
        """Leaves the first `length` columns of all rows on the cache that was adopted."""
        for layer, own in zip(cache.layers, self.layers, strict=True):
            if not isinstance(own, RowsLayer):
                continue
            first = max(length - own.sliding_window + 1, 0) if own.is_sliding else 0
            kept = slice(first - own.first, length - own.first)
            if _is_dynamic(layer):
                layer.keys, layer.values = own.keys[:, :, kept], own.values[:, :, kept]
                if layer.is_sliding:
                    layer.cumulative_length = length
            else:
                layer.keys[:, :, :length], layer.values[:, :, :length] = own.keys[:, :, kept], own.values[:, :, kept]
                layer.cumulative_length.fill_(length)
                if layer.is_sliding:
                    layer.cumulative_length_int = length

    def write_at(self, columns: Tensor | None, start: int, end: int, keep_from: int) -> None:
        """
        Args:
            columns: Where the next pass writes, [b, n], or None where rows are aligned.
            start: The first column that it writes.
            end: Behind the last one.
            keep_from: The first column of a token that will still look back.
        """
        self.place.columns, self.place.start, self.place.end = columns, start, end
        for layer in self._own():
            if layer.is_initialized:
                layer.reserve(end, keep_from)

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        for layer in self._own():
            layer.select(rows)

    def move(self, by: Tensor) -> None:
        """Moves each row to the right by as many columns, [b]."""
        for layer in self._own():
            layer.move(by)

    @property
    def capacity(self) -> int:
        """Columns that the buffers of the first layer have; 0 before the first pass."""
        return next((layer.capacity for layer in self._own() if layer.is_initialized), 0)

    @property
    def batch_size(self) -> int:
        return next((layer.keys.shape[0] for layer in self._own() if layer.is_initialized), -1)

    @property
    def bytes(self) -> int:
        """Of all buffers."""
        held = [layer for layer in self._own() if layer.is_initialized]
        return sum(states.numel() * states.element_size() for layer in held for states in (layer.keys, layer.values))

    def _own(self) -> list[RowsLayer]:
        return [layer for layer in self.layers if isinstance(layer, RowsLayer)]


def can_adopt(cache: Cache) -> bool:
    """Whether every layer is of a kind that these buffers can stand for."""
    return (
        type(cache) in (DynamicCache, StaticCache)
        and not cache.offloading
        and all(type(layer) in ADOPTABLE for layer in cache.layers)
    )


def whole_chunks(columns: int) -> int:
    """The least multiple of `CHUNK` that is not smaller."""
    return -(-columns // CHUNK) * CHUNK


def _is_dynamic(layer: CacheLayerMixin) -> bool:
    return isinstance(layer, DynamicLayer)


__all__ = ["RowsCache", "RowsLayer", "can_adopt", "whole_chunks"]
