"""The ways into generate() that users of transformers take."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_rigged, make_target
from test_data import chat_tokenizer
from transformers import AutoModel, AutoModelForCausalLM, pipeline

from modeling_domino import compat_domino


CUSTOM_GENERATE = Path(__file__).parents[1] / "hub_upload" / "custom_generate"
NEW = 12
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def test_text_generation_pipeline(target):
    tokenizer = chat_tokenizer()
    chat = [{"role": "user", "content": "abc"}]
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    ids = torch.tensor([tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    draft = make_rigged(target, text[0], right=5)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    assert assisted(chat, **GREEDY) == plain(chat, **GREEDY)
    assert draft.last_generation.rounds == 2
    assert assisted("hello", **GREEDY) == plain("hello", **GREEDY)


def test_a_target_that_device_map_placed(target, prompt, tmp_path):
    text = target.generate(prompt, **GREEDY)
    target.save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    draft = make_rigged(target, text[0], right=5)
    assert placed.generate(prompt.to(placed.device), assistant_model=draft, **GREEDY).tolist() == text.tolist()
    assert draft.last_generation.rounds == 2


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_templates_with_and_without_thinking(thinking):
    tokenizer = chat_tokenizer(
        "{{ messages[0]['content'] }}{% if enable_thinking %}d{% else %}def{% endif %}"  # an empty thought is a prompt
    )
    target = make_target(seed=6)
    chat = [{"role": "user", "content": "abc"}]
    inputs = tokenizer.apply_chat_template(chat, enable_thinking=thinking, return_dict=True, return_tensors="pt")
    text = target.generate(**inputs, **GREEDY)
    draft = make_rigged(target, text[0], right=5)
    assert target.generate(**inputs, assistant_model=draft, **GREEDY).tolist() == text.tolist()
    assert draft.last_generation.rounds == 2


@pytest.fixture
def repository(target, tmp_path):
    make_draft(target).save_pretrained(tmp_path / "domino-tiny")
    shutil.copytree(CUSTOM_GENERATE, tmp_path / "domino-tiny" / "custom_generate")
    return str(tmp_path / "domino-tiny")


@pytest.mark.parametrize("patched", [True, False])
def test_custom_generate_of_a_repository(patched, repository, target, prompt):
    draft = AutoModel.from_pretrained(repository, trust_remote_code=True)
    text = target.generate(prompt, **GREEDY)
    if not patched:
        compat_domino.uninstall()
    try:
        call = {"custom_generate": repository, "trust_remote_code": True, **GREEDY}
        assert target.generate(prompt, assistant_model=draft, **call).tolist() == text.tolist()
        assert draft.last_generation.new_tokens == NEW
        with pytest.raises(ValueError, match="expected the Domino draft of this repository"):
            target.generate(prompt, **call)
    finally:
        compat_domino.install()
