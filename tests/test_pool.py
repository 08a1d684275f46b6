"""A candidate pool corrects the most likely tokens alone: the target's text and law stay, the law of drafts is the pool's."""

import pytest
import torch
from conftest import MASK, make_draft, make_target
from test_sampling import SMALL_DRAFT, assert_law, warpers

from modeling_domino.correction_domino import OUTSIDE, correct_pool, draft_block


NEW = 24


def block(draft, target, pool: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [3, 5] and final logits [3, 5, V] of random hidden states."""
    torch.manual_seed(seed)
    hidden_states, logits = torch.randn(3, 5, target.config.hidden_size), []
    base_logits = torch.randn(3, 5, target.config.vocab_size)

    def choose(i, scores):
        logits.append(scores)
        return scores.argmax(-1), False

    drafted = draft_block(
        draft.head_weights(),
        hidden_states,
        base_logits,
        torch.randint(3, MASK, (3,)),
        prefix_len=1,
        embed=target.get_input_embeddings(),
        choose=choose,
        candidate_pool=pool,
    )
    return drafted, torch.stack(logits, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_all_tokens_changes_nothing_and_a_small_one_leaves_the_rest_out(seed, target, draft):
    whole, logits = block(draft, target, 0, seed)
    for size in (target.config.vocab_size, 10_000):
        drafted, same = block(draft, target, size, seed)
        assert drafted.tolist() == whole.tolist()
        torch.testing.assert_close(same, logits, atol=1e-5, rtol=0)  # other shapes of the same products
    drafted, few = block(draft, target, 4, seed)
    inside = few > OUTSIDE
    assert (inside.sum(-1)[:, 1:] == 4).all() and inside[:, 0].all()  # predictions before P are left as they are
    first = slice(1, 2)  # up to here both have drafted the same tokens
    torch.testing.assert_close(few[:, first][inside[:, first]], logits[:, first][inside[:, first]], atol=1e-5, rtol=0)
    assert (few.softmax(-1)[~inside] == 0).all()


def test_the_pools_tokens_are_those_of_the_largest_base_logits():
    base = torch.tensor([[1.0, 5.0, 3.0, 4.0]])
    w2, rank = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[10.0]])
    assert correct_pool(base, rank, w2, torch.tensor([[1, 3]])).tolist() == [[OUTSIDE, 25.0, OUTSIDE, 44.0]]


@pytest.mark.parametrize("pool", [1, 4])
@pytest.mark.parametrize(
    "options", [{}, {"prefix_allowed_tokens_fn": lambda b, ids: [3, 4, 5]}, {"suppress_tokens": [9]}]
)
def test_texts_are_the_targets(path, pool, options, target, draft, prompt):
    text = target.generate(prompt, max_new_tokens=NEW, do_sample=False, **options)
    draft.decoding.candidate_pool = pool
    output = target.generate(prompt, assistant_model=draft, max_new_tokens=NEW, do_sample=False, **options)
    assert output.tolist() == text.tolist() and draft.last_generation.path == path
    sampled = target.generate(prompt, assistant_model=draft, max_new_tokens=NEW, do_sample=True, **options)
    allowed = (
        {3, 4, 5}
        if "prefix_allowed_tokens_fn" in options
        else set(range(24)) - set(options.get("suppress_tokens", []))
    )
    assert set(sampled[0, 6:].tolist()) <= allowed


def test_sampling_has_the_law_of_the_target():
    calls = 1_000
    target = make_target(vocab_size=12, num_hidden_layers=2, initializer_range=0.15)
    draft = make_draft(target, **SMALL_DRAFT, pure_draft_prefix_len=0)
    draft.decoding.candidate_pool = 3
    prompt = torch.tensor([[3, 7, 10, 5]])
    torch.manual_seed(0)
    call = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 4, "assistant_model": draft}
    texts = torch.cat([target.generate(prompt.repeat(50, 1), **call)[:, 4:] for _ in range(calls // 50)])
    assert 0.05 < draft.last_generation.accepted / draft.last_generation.drafted < 0.95
    assert_law(texts, target, prompt, warpers(1.3, None, None))


@pytest.mark.parametrize("pool", [-1, 2.5, None])
def test_sizes_that_are_none(pool, target, draft, prompt):
    draft.decoding.candidate_pool = pool
    with pytest.raises(ValueError, match="`draft.decoding.candidate_pool` is .*expected a number of tokens, or 0"):
        target.generate(prompt, assistant_model=draft, max_new_tokens=4)
