"""Every way a greedy call can end or be steered gives plain generate()'s text, and the known number of rounds."""

import pytest
import torch
from conftest import MASK, PAD, make_draft, make_rigged, make_target, make_tokenizer
from support import ForceAt, Listener, StopAt
from transformers import GenerationConfig, StoppingCriteria, StopStringCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria


NEW = 14
pytestmark = pytest.mark.usefixtures("path")
ALIGNMENTS = pytest.mark.parametrize("shift_label", [True, False])


@pytest.fixture(scope="module")
def target():
    return make_target("qwen2", seed=9)


@pytest.fixture(scope="module")
def prompt():
    torch.manual_seed(226)
    return torch.randint(3, MASK, (1, 6))


@pytest.fixture(scope="module")
def new(target, prompt):
    """Plain text of 14 tokens, the first 12 of them distinct: two whole blocks."""
    ids = target.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert len(set(ids[:12])) == 12 and MASK not in ids
    return ids


@pytest.fixture(scope="module")
def text(prompt, new):
    return torch.cat([prompt[0], torch.tensor(new)])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def rounds_of(new_tokens: int, gained: int) -> int:
    """Prefill gives one token, then each round gains at most the right ones and the target's own."""
    return -(-(new_tokens - 1) // (gained + 1))


def most(shift_label: bool) -> int:
    return 5 if shift_label else 4


def assisted(target, prompt, draft, **kwargs):
    """Asserts that both ways of the same call agree, that the statistics add up and that no budget is overdrawn.

    Returns:
        The new ids and the statistics.
    """
    call = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    plain = target.generate(prompt, **call)
    output = target.generate(prompt, assistant_model=draft, **call)
    assert output.tolist() == plain.tolist()
    ids, stats = output[0, prompt.shape[1] :].tolist(), draft.last_generation
    assert stats.path == ("assisted" if draft.decoding.path == "assisted" else "loop")
    assert stats.new_tokens == len(ids)
    remaining = (call["max_new_tokens"] or call["max_length"] - prompt.shape[1]) - 1
    for drafted, gained in zip(stats.drafted_per_round, stats.tokens_per_round, strict=True):
        assert drafted <= remaining - 1
        remaining -= gained
    return ids, stats


@pytest.mark.parametrize("offsets", [(3, 4), (9, 5, 7), (0, 13)])
def test_the_first_of_several_eos_tokens_counts(offsets, target, prompt, text, new):
    draft = make_rigged(target, text, 5)
    ids, stats = assisted(target, prompt, draft, eos_token_id=[new[offset] for offset in offsets])
    assert ids == new[: min(offsets) + 1]
    assert stats.rounds == rounds_of(len(ids), 5)


@ALIGNMENTS
@pytest.mark.parametrize("right", [2, 5])
@pytest.mark.parametrize("budget", range(1, NEW + 1))
def test_every_length_limit(shift_label, right, budget, target, prompt, text, new):
    draft = make_rigged(target, text, right, shift_label=shift_label)
    ids, stats = assisted(target, prompt, draft, max_new_tokens=budget)
    assert ids == new[:budget]
    gained = min(right, most(shift_label))
    assert stats.rounds == rounds_of(budget, gained)
    limits = [budget - 1 - (gained + 1) * i for i in range(stats.rounds)]
    assert stats.drafted_per_round == tuple(min(most(shift_label), limit - 1) for limit in limits)


def test_max_length_counts_the_prompt(target, prompt, text, new):
    ids, stats = assisted(target, prompt, make_rigged(target, text, 5), max_new_tokens=None, max_length=6 + 9)
    assert ids == new[:9] and stats.rounds == 2


@pytest.mark.parametrize("offset", [2, 9])
def test_eos_criterion_of_the_caller(offset, target, prompt, text, new):
    draft = make_rigged(target, text, 5)
    ids, _ = assisted(target, prompt, draft, stopping_criteria=[EosTokenCriteria(new[offset])])
    assert ids == new[: offset + 1]


@pytest.mark.parametrize("length", [6 + 3, 6 + 9])
def test_length_criterion_of_the_caller(length, target, prompt, text, new):
    draft = make_rigged(target, text, 5)
    ids, _ = assisted(target, prompt, draft, stopping_criteria=[MaxLengthCriteria(length)])
    assert ids == new[: length - 6]


def test_length_criterion_of_the_caller_beyond_the_length_of_the_call(target, prompt, text):
    """Plain generate() goes on to the caller's length; the counter ends a loop that makes no progress."""
    passes = []

    def count(module, args):
        passes.append(module)
        if len(passes) > 100:
            raise RuntimeError("no progress")

    call = {"max_new_tokens": 9, "do_sample": False, "stopping_criteria": [MaxLengthCriteria(6 + 12)]}
    assert target.generate(prompt, **call).tolist() == [text[: 6 + 12].tolist()]
    hook = target.register_forward_pre_hook(count)
    try:
        output = target.generate(prompt, assistant_model=make_rigged(target, text, 5), **call)
    finally:
        hook.remove()
    assert output.tolist() == [text[: 6 + 12].tolist()]


def test_eos_tokens_as_a_tensor(target, prompt, text, new):
    draft = make_rigged(target, text, 5)
    ids, _ = assisted(target, prompt, draft, eos_token_id=torch.tensor([new[8], new[4]]))
    assert ids == new[:5]


def test_a_criterion_that_only_a_wrong_draft_meets_does_not_stop(target, prompt, text, new, path):
    wrong = (new[3] + 1) % MASK
    assert wrong not in new
    ids, stats = assisted(target, prompt, make_rigged(target, text, 2), stopping_criteria=[StopAt(wrong)])
    assert ids == new and stats.rounds == rounds_of(NEW, 2)
    # In transformers' loop a block has to end with the token that met it; ours asks criteria about verified tokens.
    assert stats.drafted_per_round[:2] == (5 if path == "loop" else 3, 5)


@pytest.mark.parametrize("own, given, argument", [(3, None, None), (3, None, 5), (3, 5, None), (None, 3, 5)])
def test_stop_strings_of_the_target_the_generation_config_and_the_call(own, given, argument, prompt, new, tokenizer):
    """The argument wins over the generation config of the call, and that over the target's own."""
    target = make_target("qwen2", seed=9)
    own, given, argument = (None if at is None else tokenizer.decode([new[at]]) for at in (own, given, argument))
    target.generation_config.stop_strings = own
    call = {"tokenizer": tokenizer}
    if given is not None:
        call["generation_config"] = GenerationConfig(stop_strings=given, pad_token_id=PAD)
    if argument is not None:
        call["stop_strings"] = argument
    plain = target.generate(prompt, max_new_tokens=NEW, **call)
    assert plain.shape[1] < 6 + NEW
    output = target.generate(prompt, max_new_tokens=NEW, assistant_model=make_draft(target), **call)
    assert output.tolist() == plain.tolist()


def test_stop_strings_in_the_generation_config_of_the_call(target, prompt, text, new, tokenizer):
    config = GenerationConfig(stop_strings=[tokenizer.decode(new[8:10]), "zz"], max_new_tokens=NEW, pad_token_id=PAD)
    draft = make_rigged(target, text, 5)
    output = target.generate(prompt, generation_config=config, tokenizer=tokenizer, assistant_model=draft)
    assert output.tolist() == target.generate(prompt, generation_config=config, tokenizer=tokenizer).tolist()
    assert output[0].tolist() == text[: 6 + 10].tolist()
    assert config.stop_strings == [tokenizer.decode(new[8:10]), "zz"]
    assert draft.last_generation.rounds == 2


def steering(new: list[int]) -> dict[str, dict]:
    return {
        "min_new_tokens": {"eos_token_id": new[2], "min_new_tokens": 6},
        "min_new_tokens with a later eos": {"eos_token_id": [new[2], new[8]], "min_new_tokens": 4},
        "repetition_penalty": {"repetition_penalty": 1.8},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
        "suppress_tokens": {"suppress_tokens": [new[3], new[7]]},
        "bad_words_ids": {"bad_words_ids": [[new[4], new[5]]]},
        "forced token in the first block": {"logits_processor": [ForceAt(6 + 3, 11)]},
        "forced token behind the first block": {"logits_processor": [ForceAt(6 + 7, 11)]},
        "forced first token": {"logits_processor": [ForceAt(6, 11)]},
    }


@ALIGNMENTS
@pytest.mark.parametrize("name", steering([0] * NEW))
def test_logits_processors(shift_label, name, target, prompt, new):
    kwargs = steering(new)[name]
    plain = target.generate(prompt, max_new_tokens=NEW, do_sample=False, **kwargs)[0]
    assert plain[6:].tolist() != new
    draft = make_rigged(target, plain, 5, shift_label=shift_label)
    ids, stats = assisted(target, prompt, draft, **kwargs)
    assert stats.rounds == rounds_of(len(ids), most(shift_label))
    assisted(target, prompt, make_draft(target, shift_label=shift_label), **kwargs)


@pytest.mark.parametrize("right", [0, 2, 5])
@pytest.mark.parametrize(
    "stop", [{}, {"eos_token_id": 16}, {"stopping_criteria": [StopAt(10)]}, {"max_new_tokens": 8}]
)
def test_streamers_hear_the_text_of_plain_generate(right, stop, target, prompt, text):
    plain, ours = Listener(), Listener()
    draft = make_rigged(target, text, right)
    call = {"max_new_tokens": NEW, "do_sample": False, **stop}
    expected = target.generate(prompt, streamer=plain, **call)
    target.generate(prompt, streamer=ours, assistant_model=draft, **call)
    assert ours.tokens == plain.tokens == expected[0].tolist()
    assert ours.ends == plain.ends == 1
    assert draft.last_generation.rounds == rounds_of(expected.shape[1] - 6, right)


@ALIGNMENTS
@pytest.mark.parametrize("padding", [1, 3])
@pytest.mark.parametrize("right", [2, 5])
def test_left_padding(shift_label, padding, right, target, prompt, text, new):
    padded = torch.cat([torch.full((1, padding), PAD), prompt], dim=1)
    attention_mask = (torch.arange(padding + 6) >= padding).long()[None]
    draft = make_rigged(target, text, right, shift_label=shift_label)
    ids, stats = assisted(target, padded, draft, attention_mask=attention_mask)
    assert ids == new
    assert stats.rounds == rounds_of(NEW, min(right, most(shift_label)))


def test_a_draft_sees_nothing_of_left_padding(target, prompt, monkeypatch):
    """Its hidden states are those of the unpadded call, within rounding of the target's padded attention."""
    draft, seen = make_draft(target), []
    backbone = draft.backbone
    monkeypatch.setattr(draft, "backbone", lambda *args, **kwargs: seen.append(backbone(*args, **kwargs)) or seen[-1])
    padded = torch.cat([torch.full((1, 3), PAD), prompt], dim=1)
    call = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": draft}
    plain = target.generate(prompt, **call)
    stats, states = draft.last_generation, seen[:]
    seen.clear()
    output = target.generate(padded, attention_mask=(torch.arange(9) >= 3).long()[None], **call)
    assert output[:, 3:].tolist() == plain.tolist()
    assert draft.last_generation == stats
    assert len(seen) == len(states) > 1
    torch.testing.assert_close(seen, states, atol=1e-4, rtol=0)


@ALIGNMENTS
@pytest.mark.parametrize("right", [0, 2, 5])
@pytest.mark.parametrize("eos_offset", [None, 8])
def test_returned_scores_logits_and_hidden_states(shift_label, right, eos_offset, target, prompt, new):
    call = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.2}
    call |= {"eos_token_id": None if eos_offset is None else new[eos_offset]}
    call |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    call |= {"output_hidden_states": True}
    plain = target.generate(prompt, **call)
    steps = plain.sequences.shape[1] - 6
    draft = make_rigged(target, plain.sequences[0], right, shift_label=shift_label)
    output = target.generate(prompt, assistant_model=draft, **call)
    assert output.sequences.tolist() == plain.sequences.tolist()
    assert draft.last_generation.rounds == rounds_of(steps, min(right, most(shift_label)))
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == steps
    # Rows of a block come from a wider matrix product, which rounds differently.
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(output, name), getattr(plain, name), atol=1e-4, rtol=0)
    assert any(not torch.equal(a, b) for a, b in zip(output.scores, output.logits, strict=True))
    torch.testing.assert_close(output.hidden_states, plain.hidden_states, atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", ["argument", "generation_config", "the target's generation_config"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5])
def test_fewer_assistant_tokens_than_trained(how, tokens, prompt, text, new):
    target = make_target("qwen2", seed=9)
    draft = make_rigged(target, text, 5)
    call = {"max_new_tokens": NEW, "do_sample": False}
    if how == "argument":
        call["num_assistant_tokens"] = tokens
    elif how == "generation_config":
        call = {"generation_config": GenerationConfig(num_assistant_tokens=tokens, pad_token_id=PAD, **call)}
    else:
        target.generation_config.num_assistant_tokens = tokens
    output = target.generate(prompt, assistant_model=draft, **call)
    assert output[0].tolist() == text.tolist()
    stats = draft.last_generation
    assert stats.rounds == rounds_of(NEW, tokens)
    assert stats.drafted_per_round[0] == max(stats.drafted_per_round) == tokens


@pytest.mark.parametrize("seed", [1, 2])
def test_a_block_ends_with_a_token_below_the_confidence_threshold(seed, target, prompt):
    draft = make_draft(target, seed=seed)
    _, sure = assisted(target, prompt, draft, assistant_confidence_threshold=1e-6)
    assert max(sure.drafted_per_round) == 5
    _, stats = assisted(target, prompt, draft, assistant_confidence_threshold=1.0)
    assert stats.drafted_per_round[:-1] == (1,) * (stats.rounds - 1) and stats.drafted_per_round[-1] <= 1


def test_a_sure_draft_is_never_below_the_threshold(target, prompt, text):
    _, stats = assisted(target, prompt, make_rigged(target, text, 5), assistant_confidence_threshold=0.9)
    assert stats.rounds == rounds_of(NEW, 5)


@ALIGNMENTS
@pytest.mark.parametrize("right", [0, 2, 5])
def test_static_cache(shift_label, right, target, prompt, text, new):
    draft = make_rigged(target, text, right, shift_label=shift_label)
    ids, stats = assisted(target, prompt, draft, cache_implementation="static")
    assert ids == new
    assert stats.rounds == rounds_of(NEW, min(right, most(shift_label)))


class Reads(StoppingCriteria):
    """Looks at the scores of the last token."""

    def __call__(self, input_ids, scores, **kwargs):
        return scores[-1].argmax(-1) == MASK if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)


class ScoresSay(StoppingCriteria):
    """Ends the text with the token that the last scores like best, if it is that one."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        assert len(scores) == input_ids.shape[1] - 6
        return scores[-1].argmax(-1) == self.token


class StopAfter(StoppingCriteria):
    """Counts calls."""

    def __init__(self, tokens: int):
        self.tokens, self.seen = tokens, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.shape[1])
        return torch.tensor([len(self.seen) % self.tokens == 0])


def test_a_criterion_reads_scores_in_our_loop_and_is_refused_in_words_in_the_other(target, prompt, text, new, path):
    """Where scores are kept; transformers' loop asks about tokens that have none yet."""
    draft = make_rigged(target, text, 5)
    assert assisted(target, prompt, draft, stopping_criteria=[Reads()])[0] == new
    call = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": NEW, "do_sample": False}
    call["stopping_criteria"] = [ScoresSay(new[8])]
    if path == "assisted":
        with pytest.raises(ValueError, match="reads `scores`.*drop `assistant_model`"):
            target.generate(prompt, assistant_model=draft, **call)
    else:
        assert target.generate(prompt, assistant_model=draft, **call).sequences[0].tolist() == text[: 6 + 9].tolist()


@pytest.mark.parametrize("path", ["loop"], indirect=True)  # the other one asks about drafted tokens too
def test_a_criterion_is_asked_once_about_every_token(target, prompt, text, path):
    """So that one that counts, or looks at the clock, ends the text where it ends plain generation's."""
    for right in (0, 2, 5):
        counting = StopAfter(9)
        ids, _ = assisted(target, prompt, make_rigged(target, text, right), stopping_criteria=[counting])
        assert len(ids) == 9 and counting.seen == [*range(7, 16)] * 2  # by plain generation, and by ours


def test_a_stop_string_criterion_of_the_caller_replaces_the_option(target, prompt, text, new, tokenizer):
    letters = [tokenizer.decode([token]) for token in new]
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=[letters[9]])
    options = {"stopping_criteria": [criterion], "stop_strings": [letters[4]], "tokenizer": tokenizer}
    assert assisted(target, prompt, make_rigged(target, text, 5), **options)[0] == new[:10]
