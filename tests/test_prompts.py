"""Prompts that are more than ids: embeddings, and conversations whose start is already in the target's cache."""

import copy

import pytest
import torch
from architectures import make_architecture
from conftest import PAD, make_draft, make_rigged
from transformers import DynamicCache, StaticCache


NEW = 14
pytestmark = pytest.mark.usefixtures("path")


def greedy(target, ids, draft=None, **kwargs):
    return target.generate(ids, assistant_model=draft, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def rounds_of(new_tokens: int, gained: int) -> int:
    return -(-(new_tokens - 1) // (gained + 1))


KINDS = ["llama", "mistral (sliding window)", "gemma3", "gpt2", "bloom"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_ids", [True, False])
def test_embedded_prompts(kind, with_ids, prompt):
    target = make_architecture(kind)
    embeds = target.get_input_embeddings()(prompt).detach()
    ids = prompt if with_ids else None
    plain = greedy(target, ids, inputs_embeds=embeds)
    text = plain[0] if with_ids else torch.cat([prompt[0], plain[0]])
    for draft in (make_rigged(target, text, right=3), make_draft(target)):
        assert greedy(target, ids, draft, inputs_embeds=embeds).tolist() == plain.tolist()
        assert draft.last_generation.new_tokens == NEW


def test_processors_and_criteria_see_the_new_ids_of_an_embedded_prompt(target, prompt):
    embeds = target.get_input_embeddings()(prompt).detach()
    plain = greedy(target, None, inputs_embeds=embeds, repetition_penalty=1.5)
    draft = make_rigged(target, torch.cat([prompt[0], plain[0]]), right=4)
    options = {"repetition_penalty": 1.5, "return_dict_in_generate": True}
    output = greedy(target, None, draft, inputs_embeds=embeds, **options)
    assert output.sequences.tolist() == plain.tolist()
    assert draft.last_generation.rounds == rounds_of(NEW, 4)
    stopped = greedy(target, None, inputs_embeds=embeds, eos_token_id=int(plain[0, 5]))
    assert (
        greedy(target, None, draft, inputs_embeds=embeds, eos_token_id=int(plain[0, 5])).tolist() == stopped.tolist()
    )


@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize(
    "kind, static",
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in ("llama", "gpt2", "bloom"))],  # no window
)
def test_a_second_turn_goes_on_from_the_cache_of_the_first(kind, only_new, static, prompt):
    target = make_architecture(kind)
    question = torch.tensor([[5, 9, 4]])

    def two_turns(draft):
        cache = StaticCache(target.config, max_cache_len=64) if static else DynamicCache(config=target.config)
        first = greedy(target, prompt, draft, cache=cache)
        both = torch.cat([first, question], dim=1)
        ids = both[:, cache.get_seq_length() :] if only_new else both
        return both, greedy(target, ids, draft, cache=cache, attention_mask=torch.ones_like(both))

    both, second = two_turns(None)
    whole = greedy(target, both)
    assert second[0, -NEW:].tolist() == whole[0, -NEW:].tolist()
    for draft in (make_rigged(target, whole[0], right=3), make_draft(target)):
        ours = two_turns(draft)
        assert [ids.tolist() for ids in ours] == [both.tolist(), second.tolist()]
        assert draft.last_generation.new_tokens == NEW


def test_the_draft_knows_what_it_saw_in_earlier_turns(target, prompt, monkeypatch):
    """Its blocks are those of one call on the whole conversation, and of a copied cache too."""
    draft, seen = make_draft(target), []
    backbone = draft.backbone
    monkeypatch.setattr(draft, "backbone", lambda *args, **kwargs: seen.append(backbone(*args, **kwargs)) or seen[-1])
    padded = torch.cat([torch.full((1, 2), PAD), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 2).long()[None]
    first = greedy(target, padded, draft, attention_mask=mask, return_dict_in_generate=True)
    both = torch.cat([first.sequences, torch.tensor([[5, 9, 4]])], dim=1)
    mask = (torch.arange(both.shape[1]) >= 2).long()[None]
    states = {}
    caches = {"none": None, "copied": copy.deepcopy(first.cache), "own": first.cache}
    for name, cache in caches.items():
        seen.clear()
        greedy(target, both, draft, attention_mask=mask, cache=cache)
        states[name] = [state.clone() for state in seen]
    for name in ("copied", "own"):
        torch.testing.assert_close(states[name], states["none"], atol=1e-4, rtol=0)


def test_a_cache_that_the_draft_has_not_seen_costs_acceptance_and_no_text(target, prompt, draft):
    text = greedy(target, prompt)
    cache = DynamicCache(config=target.config)
    target(prompt[:, :4], cache=cache)
    assert greedy(target, prompt, draft, cache=cache).tolist() == text.tolist()
    assert cache.get_seq_length() == text.shape[1] - 1


def test_a_cache_that_holds_the_whole_prompt_is_refused(target, prompt, draft):
    cache = DynamicCache(config=target.config)
    target(prompt, cache=cache)
    with pytest.raises(ValueError, match="already holds 6 tokens and the prompt has 6"):
        greedy(target, prompt, draft, cache=cache)
