"""From conversations to token ids: every kind of prompt file, masks on what the assistant wrote."""

import json

import datasets
import pytest
from conftest import make_tokenizer

from modeling_domino.data import assistant_mask, chat_ids, read_conversations, unusable


# u, v, s open turns, w ends them. The second one drops the thoughts of all but the last turn, as Qwen3's does.
PLAIN = (
    "{% for m in messages %}{{ {'user': 'u', 'assistant': 'v', 'system': 's'}[m.role] + m.content.strip() + 'w' }}"
    "{% endfor %}{% if add_generation_prompt %}v{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}v{% generation %}{{ m.content + 'w' }}{% endgeneration %}"
    "{% else %}{{ 'u' + m.content + 'w' }}{% endif %}{% endfor %}{% if add_generation_prompt %}v{% endif %}"
)
THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'v' + m.content.split('</think>')[-1].strip() + 'w' }}"
    "{% else %}{{ 'u' + m.content + 'w' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}v{% if enable_thinking is defined and not enable_thinking %}x{% endif %}{% endif %}"
)
TALK = [
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "de"},
    {"role": "user", "content": "de"},
    {"role": "assistant", "content": "fgh"},
]


def chat_tokenizer(template=PLAIN):
    tokenizer = make_tokenizer(pad_token="a", eos_token="w")
    tokenizer.chat_template = template
    return tokenizer


def spelled(tokenizer, ids, mask):
    return "".join(tokenizer.convert_ids_to_tokens(ids)), "".join("01"[bit] for bit in mask)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_mask_covers_answers_and_the_tokens_that_end_them(template):
    tokenizer = chat_tokenizer(template)
    text, mask = spelled(tokenizer, *assistant_mask(tokenizer, TALK))
    assert text == "uabcwvdewudewvfghw"
    assert mask == "000000111000001111"  # "de" of the user is not taken for the assistant's


def test_thoughts_that_a_template_drops_are_not_expected():
    tokenizer = chat_tokenizer(THINKING)
    talk = [TALK[0], {"role": "assistant", "content": "<think>ghi</think>de"}, *TALK[2:]]
    text, mask = spelled(tokenizer, *assistant_mask(tokenizer, talk))
    assert (text, mask) == ("uabcwvdewudewvfghw", "000000111000001111")


def test_template_variables_reach_the_template():
    tokenizer = chat_tokenizer(THINKING)
    on, off = (
        tokenizer.convert_ids_to_tokens(chat_ids(tokenizer, "abc", **template))
        for template in ({}, {"enable_thinking": False})
    )
    assert ("".join(on), "".join(off)) == ("uabcwv", "uabcwvx")


def test_an_answer_that_the_template_changes_is_named():
    tokenizer = chat_tokenizer("{% for m in messages %}{{ m.content | replace('f', 'g') }}{% endfor %}")
    with pytest.raises(ValueError, match=r"Message 3 \('fgh'\.\.\.\) is not in what the chat template"):
        assistant_mask(tokenizer, TALK)


def test_without_a_chat_template_single_turns_are_plain_text_and_more_are_refused():
    tokenizer = make_tokenizer()
    assert chat_ids(tokenizer, [TALK[0]]) == chat_ids(tokenizer, "abc") == tokenizer("abc")["input_ids"]
    with pytest.raises(ValueError, match="no chat template, and the conversation has 4 messages"):
        chat_ids(tokenizer, TALK)
    with pytest.raises(ValueError, match="no chat template"):
        assistant_mask(tokenizer, TALK)


ROWS = [
    {"id": "one", "messages": TALK[:1]},
    {"conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "de"}]},
    {"turns": ["abc", "de"]},
    {"prompt": "abc"},
    {"text": "abc"},
]


def test_every_kind_of_row_is_read_and_bad_lines_are_reported_with_their_numbers(tmp_path):
    path = tmp_path / "prompts.jsonl"
    bad = ["{not json", json.dumps({"answer": 1}), json.dumps({"turns": [""]}), json.dumps([1])]
    lines = [json.dumps(ROWS[0]), bad[0], *map(json.dumps, ROWS[1:]), "", *bad[1:]]
    path.write_text("\n".join(lines))
    conversations, problems = read_conversations(str(path))
    assert [c["messages"][0] for c in conversations] == [TALK[0]] * 5
    assert conversations[1]["messages"][1] == TALK[1]
    assert [m["role"] for m in conversations[2]["messages"]] == ["user", "user"]
    assert conversations[0]["id"] == "one" and len({c["id"] for c in conversations}) == 5
    assert [problem.split(":")[0] for problem in problems] == [f"prompts.jsonl, line {n}" for n in (2, 8, 9, 10)]
    assert "no prompt among the fields ['answer']" in problems[1]
    assert len(read_conversations(str(path), limit=2)[0]) == 2


def test_parquet_and_repeated_ids(tmp_path):
    path = tmp_path / "prompts.parquet"
    datasets.Dataset.from_list([{"id": "same", "prompt": "abc"}, {"id": "same", "prompt": "de"}]).to_parquet(path)
    conversations, problems = read_conversations(str(path))
    assert [c["id"] for c in conversations] == ["same", "same-line2"] and not problems


def test_a_file_without_prompts_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text('{"answer": 1}\n')
    with pytest.raises(ValueError, match=r"no usable prompt \(1 rows; first problem: empty.jsonl, line 1"):
        read_conversations(str(path))


def test_why_a_row_is_left_out():
    good = {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 1, 1]}
    options = {"mask_token_id": 9, "max_length": 4}
    assert unusable(good, **options) is None
    assert unusable({**good, "input_ids": [3, 9, 5, 6]}, **options) == "contains the mask token 9"
    assert unusable({**good, "input_ids": [3] * 5}, **options) == "longer than 4 tokens"
    assert unusable({**good, "loss_mask": [0, 1, 0, 1]}, **options) == "without two consecutive supervised tokens"
