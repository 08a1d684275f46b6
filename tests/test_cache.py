"""Buffers of keys and values: rows at their own columns, growth in chunks, what is taken from a cache and given back."""

import gc

import pytest
import torch
from conftest import MASK, make_rigged, make_target
from transformers import DynamicCache, LlamaConfig, MistralConfig, StaticCache

from modeling_domino.cache_domino import CHUNK, RowsCache, can_adopt


HEADS, SIZE = 2, 3
FULL = LlamaConfig(num_hidden_layers=2)
SLIDING = MistralConfig(num_hidden_layers=2, sliding_window=8)


def states(rows: int, columns: torch.Tensor) -> torch.Tensor:
    """Keys that say whose they are: 1000 · row + column."""
    return (1000 * torch.arange(rows)[:, None] + columns).float()[:, None, :, None].expand(-1, HEADS, -1, SIZE)


def filled(cache, length: int, rows: int = 2):
    for layer in range(2):
        cache.update(states(rows, torch.arange(length)), states(rows, torch.arange(length)), layer)
    return cache


def write(cache: RowsCache, starts: list[int], n: int) -> torch.Tensor:
    """Writes n columns of each row from its own start on; returns the keys that the first layer hands out."""
    columns = torch.tensor(starts)[:, None] + torch.arange(n)
    cache.write_at(columns, min(starts), max(starts) + n, min(starts))
    for layer in range(2):
        keys, _ = cache.update(states(len(starts), columns), states(len(starts), columns), layer)
    return keys


@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
def test_rows_write_at_their_own_columns_and_overwrite_what_was_rejected(config):
    cache = RowsCache.adopt(filled(DynamicCache(config=config), 20))
    starts, window = [20, 20], 8 if config is SLIDING else None
    for gained in [(1, 5), (2, 1), (5, 1), (1, 1)] * 60:
        keys = write(cache, starts, 5)
        starts = [start + new for start, new in zip(starts, gained, strict=True)]
        layer = cache.layers[0]
        for row, end in enumerate(starts):
            first = 0 if window is None else max(0, end - window + 1)
            assert layer.first <= first
            own = keys[row, 0, first - layer.first : end - layer.first, 0]
            assert own.tolist() == [1000 * row + column for column in range(first, end)]
    assert layer.capacity % CHUNK == 0
    most = max(starts) + 5 if window is None else max(starts) - min(starts) + 5 + window
    assert layer.capacity <= most + 2 * CHUNK


def test_buffers_grow_by_whole_chunks_and_stay_in_between():
    cache = RowsCache.adopt(filled(DynamicCache(config=FULL), 100))
    seen = []
    for start in range(100, 1000):
        write(cache, [start, start], 5)
        seen.append((cache.layers[0].keys.data_ptr(), cache.layers[0].capacity))
    assert len(set(seen)) == 1 + (1000 + 5) // CHUNK
    assert {capacity % CHUNK for _, capacity in seen} == {0}


@pytest.mark.parametrize("length", [5, 8, 20])
@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
def test_a_cache_comes_back_as_if_it_had_seen_the_text_itself(config, length):
    given = filled(DynamicCache(config=config), length)
    assert can_adopt(given)
    cache = RowsCache.adopt(given)
    for start in range(length, length + 12, 3):
        write(cache, [start, start], 5)  # two of five are rejected
    cache.give_back(given, length + 12)
    reference = filled(DynamicCache(config=config), length + 12)
    assert given.get_seq_length() == length + 12
    for layer, other in zip(given.layers, reference.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert given.get_mask_sizes(1, 0) == reference.get_mask_sizes(1, 0)
    one = states(2, torch.tensor([length + 12]))
    assert torch.equal(given.update(one, one, 0)[0], reference.update(one, one, 0)[0])


def test_a_static_cache_is_filled_in_place():
    given = filled(StaticCache(FULL, max_cache_len=40), 10)
    keys = given.layers[0].keys
    cache = RowsCache.adopt(given)
    write(cache, [10, 10], 5)
    cache.give_back(given, 13)
    assert given.layers[0].keys is keys and int(given.get_seq_length()) == 13
    assert keys[1, 0, :13, 0].tolist() == [1000 + column for column in range(13)]


def test_aligned_rows_move_to_the_column_of_the_longest():
    cache = RowsCache.adopt(filled(DynamicCache(config=FULL), 10))
    cache.write_at(None, 10, 14, 10)
    new = states(2, torch.arange(10, 14))
    keys, _ = cache.update(new, new, 0)
    cache.update(new, new, 1)
    assert keys.shape[2] == 14 and cache.get_mask_sizes(4, 0) == (14, 0)
    cache.move(torch.tensor([0, 2]))  # the second row kept two of four
    keys = cache.layers[1].keys[:, 0, :14, 0]
    assert keys[0].tolist() == [*range(14)] and keys[1, 2:].tolist() == [1000 + column for column in range(12)]
    cache.move(torch.tensor([0, -2]))
    assert cache.layers[1].keys[1, 0, :12, 0].tolist() == [1000 + column for column in range(12)]


def test_selected_rows_keep_their_columns():
    cache = RowsCache.adopt(filled(DynamicCache(config=FULL), 10, rows=4))
    cache.select(torch.tensor([3, 1]))
    assert cache.batch_size == 2 and cache.layers[0].keys[:, 0, 9, 0].tolist() == [3009, 1009]


def run_long(tokens: int, path: str) -> list[tuple[int, int, int]]:
    """At passes of the target: columns so far, tensors alive, and their bytes."""
    target = make_target(num_hidden_layers=3, max_position_embeddings=8192)
    torch.manual_seed(7)
    prompt = torch.randint(3, MASK, (1, 6))
    text = target.generate(prompt, max_new_tokens=60, do_sample=False)[0]
    cycle = text[-30:].repeat(tokens // 30 + 2)  # often right, if the text repeats itself
    draft = make_rigged(target, torch.cat([text[:-30], cycle]), right=4, num_hidden_layers=1)
    draft.decoding.path = path
    seen = []

    def look(module, args, kwargs):
        look.passes += 1
        if look.passes % max(tokens // 60, 1) == 0:
            alive = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
            storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in alive}
            seen.append((int(kwargs["position_ids"][0, 0]), len(alive), sum(storages.values())))

    look.passes = 0
    hook = target.model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        output = target.generate(prompt, assistant_model=draft, max_new_tokens=tokens, do_sample=False)
    finally:
        hook.remove()
    assert output.shape[1] == 6 + tokens and len(seen) > 5
    return seen


def check_long(tokens: int) -> None:
    """Keys and values of 3 + 1 layers grow by whole chunks; nothing else grows."""
    seen = run_long(tokens, "loop")
    a_column = (3 + 1) * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    _, tensors, size = seen[1]
    start = seen[1][0]
    for column, now, bytes_now in seen[2:]:
        assert now <= tensors + 5
        chunks = (column + 12) // CHUNK - start // CHUNK + 1
        assert bytes_now <= size + chunks * CHUNK * a_column + 4096


def test_a_long_call_grows_by_its_context_alone():
    check_long(500)


@pytest.mark.slow
def test_a_very_long_call_grows_by_its_context_alone():
    check_long(4096)
