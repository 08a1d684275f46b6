"""Measuring a draft: averages, intervals, turns, and the example that prints them."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_rigged, make_target, make_tokenizer
from test_data import chat_tokenizer
from transformers.utils import logging

from modeling_domino.data import chat_ids
from modeling_domino.evaluation import (
    Decoded,
    acceptance_gain,
    acceptance_length,
    decode_alternately,
    decode_conversation,
    estimate,
    mean_acceptance_length,
    speedup,
)


GREEDY = {"max_new_tokens": 12, "do_sample": False}


def decoded(gained: int, rounds: int, tokens: int = 10, seconds: float = 1.0) -> Decoded:
    return Decoded("x", [[0] * tokens], seconds, rounds, gained)


def test_both_averages_of_the_acceptance_length():
    results = [decoded(30, 10), decoded(4, 4), decoded(0, 0)]  # the last one ended with its prompt's pass
    assert acceptance_length(results).value == pytest.approx(34 / 14)
    assert mean_acceptance_length(results) == pytest.approx((3 + 1) / 2)


def test_speed_is_pooled_over_tokens_and_seconds():
    fast = [decoded(1, 1, tokens=10, seconds=1.0), decoded(1, 1, tokens=30, seconds=2.0)]
    slow = [decoded(1, 1, tokens=10, seconds=4.0), decoded(1, 1, tokens=30, seconds=4.0)]
    assert speedup(fast, slow).value == pytest.approx((40 / 3) / (40 / 8))


def test_intervals_cover_the_truth_as_often_as_they_say():
    generator = torch.Generator().manual_seed(3)
    inside = 0
    for _ in range(200):
        rounds = torch.randint(20, 60, (40,), generator=generator).double()
        gained = rounds * (2.5 + torch.randn(40, generator=generator, dtype=torch.float64))
        _, low, high = estimate(gained.tolist(), rounds.tolist(), resamples=400)
        inside += low < 2.5 < high
    assert 0.88 <= inside / 200 <= 0.99  # 95 % asked for; a bootstrap of 40 is a little narrow


def test_comparisons_are_paired():
    torch.manual_seed(0)
    rounds = torch.randint(10, 90, (30,)).tolist()
    one = [decoded(3 * n, 2 * n) for n in rounds]  # τ 1.5 whatever the conversation
    other = [decoded(3 * n, 2 * n) for n in rounds[::-1]]
    gain = acceptance_gain(one, other)
    assert gain.low == pytest.approx(1.0) and gain.high == pytest.approx(1.0)
    hard_and_easy = [decoded(n * (1 + n % 5), n) for n in rounds]
    better = [decoded(round(1.1 * d.gained * 100), d.rounds * 100) for d in hard_and_easy]
    gain = acceptance_gain(better, hard_and_easy)
    assert gain.low == pytest.approx(1.1, abs=1e-3) and gain.high == pytest.approx(1.1, abs=1e-3)
    assert acceptance_length(hard_and_easy).high - acceptance_length(hard_and_easy).low > 0.5


def test_nothing_to_divide_by_is_an_error():
    with pytest.raises(ValueError, match="Nothing to divide by"):
        acceptance_length([decoded(0, 0)])


def test_an_estimate_reads_as_people_write_it():
    assert str(estimate([4, 4], [2, 2])) == "2.00 [2.00, 2.00]"


def test_ways_take_turns_in_going_first():
    order = []

    def way(name: str, conversation: dict) -> Decoded:
        order.append(name)
        return decoded(1, 1)

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
    assert plain.new_tokens == 24 and plain.rounds == plain.gained == 0

    answered = {"id": "c", "messages": [turns[0], {"role": "assistant", "content": "zz"}, turns[1]]}
    drafted = decode_conversation(target, tokenizer, answered, draft, **GREEDY)
    assert drafted.token_ids == plain.token_ids
    assert drafted.gained == 24 - 2 and drafted.rounds > 0  # the prompt's pass gives one token of each turn


def test_the_head_is_off_for_one_call_only(target):
    tokenizer, conversation = make_tokenizer(), {"id": "c", "messages": [{"role": "user", "content": "hello"}]}
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0]
    rigged = make_rigged(target, text, right=5)  # a neutral head over a backbone that is always right
    torch.nn.init.normal_(rigged.embed_proj[2].weight, std=30.0)  # and now one that spoils it
    on = decode_conversation(target, tokenizer, conversation, rigged, **GREEDY)
    off = decode_conversation(target, tokenizer, conversation, rigged, head=False, **GREEDY)
    assert on.token_ids == off.token_ids and rigged.head_enabled
    assert off.rounds < on.rounds


@pytest.fixture
def verbosity():
    """The example silences transformers; tests after it read its warnings."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


def test_the_example_measures_all_three_ways(tmp_path, monkeypatch, capsys, verbosity):
    target = make_target(seed=6)
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    make_draft(target).save_pretrained(tmp_path / "draft")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("hello", "pqr", "xyz")))
    path = Path(__file__).parents[1] / "examples" / "measure_draft.py"
    spec = importlib.util.spec_from_file_location("measure_draft", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    command = f"measure {tmp_path}/target --draft {tmp_path}/draft --prompts {prompts} --limit 2 --dtype float32"
    command += " --pack" if torch.backends.mkldnn.is_available() else ""
    monkeypatch.setattr("sys.argv", [*command.split(), "--max-new-tokens", "12", "--output", f"{tmp_path}/out.json"])
    example.main()
    printed = capsys.readouterr().out
    for line in ("prompts.jsonl: 2 conversations", "τ head on: ", "τ head on / head off: ", "plain: "):
        assert line in printed
    assert "head on against plain: 2 of 2 conversations equal" in printed
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["k"] == 5 and [len(d) for d in saved["results"].values()] == [2, 2, 2]
