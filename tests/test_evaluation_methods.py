"""Every way of decoding that an evaluation compares: same text, rounds counted, nothing that slows the baseline."""

from functools import partial

import pytest
import torch
from conftest import MASK, make_draft, make_rigged, make_target, make_tokenizer
from test_data import chat_tokenizer
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from modeling_domino.data import chat_ids
from modeling_domino.evaluation_methods import (
    NativeDFlash,
    compiled_options,
    decode_alternately,
    decode_conversation,
    refuse_hooks,
    time_limit,
    twin,
)
from modeling_domino.measures import Decoded
from modeling_domino.packed_linear import pack_linears


GREEDY = {"max_new_tokens": 12, "do_sample": False}
CONVERSATION = {"id": "c", "messages": [{"role": "user", "content": "hello"}]}


def test_ways_take_turns_in_going_first():
    order = []

    def way(name: str, conversation: dict) -> Decoded:
        order.append(name)
        return Decoded("x", [[0]], 1.0)

    conversations = [{"id": str(i), "messages": []} for i in range(4)]
    results = decode_alternately(conversations, {name: partial(way, name) for name in "abc"})
    assert "".join(order) == "abcbcacababc"
    assert [len(results[name]) for name in "abc"] == [4, 4, 4]


def test_a_conversation_is_decoded_turn_by_turn(target, draft):
    tokenizer = chat_tokenizer()
    turns = [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]
    plain = decode_conversation(target, tokenizer, {"id": "c", "messages": turns}, **GREEDY)
    text = tokenizer.decode(plain.token_ids[0], skip_special_tokens=True)
    between = [turns[0], {"role": "assistant", "content": text}, turns[1]]
    ids = torch.tensor([chat_ids(tokenizer, between)])
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[0, ids.shape[1] :]
    assert plain.token_ids[1] == expected.tolist()
    assert plain.new_tokens == 24 and plain.rounds == 0 and plain.draft_seconds is None

    answered = {"id": "c", "messages": [turns[0], {"role": "assistant", "content": "zz"}, turns[1]]}
    drafted = decode_conversation(target, tokenizer, answered, draft, **GREEDY)
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.gained) == 24 - 2 and drafted.rounds > 0  # the prompt's pass gives one token of each turn
    assert len(drafted.drafted) == len(drafted.accepted) == drafted.rounds
    assert 0 < drafted.draft_seconds + drafted.verify_seconds < drafted.seconds


def test_the_head_is_off_for_one_call_only(target):
    tokenizer = make_tokenizer()
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
    rigged = make_rigged(target, text, right=5)  # a neutral head over a backbone that is always right
    torch.nn.init.normal_(rigged.embed_proj[2].weight, std=30.0)  # and now one that spoils it
    on = decode_conversation(target, tokenizer, CONVERSATION, rigged, **GREEDY)
    off = decode_conversation(target, tokenizer, CONVERSATION, rigged, head=False, **GREEDY)
    assert on.token_ids == off.token_ids and rigged.head_enabled
    assert off.rounds < on.rounds


def test_sampling_is_repeated_by_its_seed(target, draft):
    def sample(seed: int) -> list[list[int]]:
        options = {"max_new_tokens": 12, "do_sample": True, "seed": seed}
        return decode_conversation(target, make_tokenizer(), CONVERSATION, draft, **options).token_ids

    assert sample(3) == sample(3)
    assert len({str(sample(seed)) for seed in range(5)}) > 1


def test_rounds_of_prompt_lookup_are_passes_after_the_prompts(target):
    """The text repeats itself in places, so what follows can be looked up."""
    tokenizer = make_tokenizer()
    looping = make_target(seed=1)
    plain = decode_conversation(looping, tokenizer, CONVERSATION, max_new_tokens=60, do_sample=False)
    found = decode_conversation(
        looping, tokenizer, CONVERSATION, prompt_lookup_num_tokens=4, max_new_tokens=60, do_sample=False
    )
    assert found.token_ids == plain.token_ids
    assert sum(found.gained) == 59 > found.rounds and found.drafted == []


def test_rounds_of_a_small_assistant(target):
    same = make_target(seed=6)
    plain = decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY)
    same.generation_config.assistant_confidence_threshold = 0.0  # transformers reads both from the assistant
    same.generation_config.num_assistant_tokens = 3
    assisted = decode_conversation(target, make_tokenizer(), CONVERSATION, same, **GREEDY)
    assert assisted.token_ids == plain.token_ids
    assert assisted.gained == [4, 4]  # a copy of the target is always right; the prompt's pass verified a draft too


def test_transformers_own_dflash(target):
    torch.manual_seed(0)
    config = MuseGlimmerAssistantConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"],
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=[1, 3],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    native = MuseGlimmerAssistantModel(config).eval()
    plain = decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY)
    drafted = decode_conversation(target, make_tokenizer(), CONVERSATION, native, speculation_type="dflash", **GREEDY)
    assert drafted.token_ids == plain.token_ids and drafted.rounds > 0


@pytest.mark.parametrize("right", [0, 2, 4])
def test_a_backbone_of_ours_decodes_through_transformers_dflash(target, right):
    """Same rounds as in our own loop with the head off."""
    tokenizer = make_tokenizer()
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
    rigged = make_rigged(target, text, right=right, shift_label=False)
    ours = decode_conversation(target, tokenizer, CONVERSATION, rigged, head=False, **GREEDY)
    native = NativeDFlash(rigged)
    theirs = decode_conversation(target, tokenizer, CONVERSATION, native, speculation_type="dflash", **GREEDY)
    assert theirs.token_ids == ours.token_ids
    assert theirs.gained == ours.gained


def test_an_unrigged_backbone_sees_the_same_context_there(target):
    tokenizer, draft = make_tokenizer(), make_draft(target, shift_label=False)
    options = {"max_new_tokens": 40, "do_sample": False}
    ours = decode_conversation(target, tokenizer, CONVERSATION, draft, head=False, **options)
    native = NativeDFlash(draft)
    for _ in range(2):  # a second call starts with an empty cache
        theirs = decode_conversation(target, tokenizer, CONVERSATION, native, speculation_type="dflash", **options)
        assert theirs.gained == ours.gained


def test_a_backbone_with_shifted_labels_is_no_dflash_draft(draft):
    with pytest.raises(ValueError, match="`shift_label=True`, where slot i predicts position i \\+ 1"):
        NativeDFlash(draft)


def test_the_baseline_refuses_hooks(target):
    refuse_hooks(target)
    handle = target.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"`model\.layers\.1` has a forward hook"):
        decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY)
    handle.remove()
    decode_conversation(target, make_tokenizer(), CONVERSATION, make_draft(target), **GREEDY)
    refuse_hooks(target)  # the draft's own taps are gone


@pytest.mark.parametrize("packed", [False, True])
def test_a_twin_shares_weights_and_nothing_else(target, packed):
    if packed:
        if not torch.backends.mkldnn.is_available():
            pytest.skip("needs oneDNN")
        pack_linears(target)
    other = twin(target)
    for one, two in zip(target.parameters(), other.parameters(), strict=True):
        assert one is two
    plain = decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY)
    other.model.layers[0].register_forward_hook(lambda *_: None)
    assert decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY).token_ids == plain.token_ids
    draft = make_draft(target)
    assert decode_conversation(other, make_tokenizer(), CONVERSATION, draft, **GREEDY).token_ids == plain.token_ids


def test_compiled_decoding_compiles_once_for_all_lengths(target):
    plain = decode_conversation(target, make_tokenizer(), CONVERSATION, **GREEDY)
    options = compiled_options(target, cache_rows=40)
    options["compile_config"].backend = "eager"
    compiled = []
    options["compile_config"].options = None
    get_compiled_call = target.get_compiled_call

    def count(config):
        compiled.append(config)
        return get_compiled_call(config)

    target.get_compiled_call = count
    for text in ("hello", "a longer one"):
        conversation = {"id": text, "messages": [{"role": "user", "content": text}]}
        again = decode_conversation(target, make_tokenizer(), conversation, **GREEDY, **options)
        assert text != "hello" or again.token_ids == plain.token_ids
    assert len(compiled) == 2
    torch.compiler.reset()


def test_a_time_limit_ends_what_takes_too_long():
    with pytest.raises(TimeoutError, match="not done after 0 seconds"), time_limit(0.05):
        while True:
            pass
    with time_limit(5):
        pass
