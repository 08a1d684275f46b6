"""Packed weights give the products, the texts and the files of the plain ones, and refuse what they cannot do."""

import copy

import pytest
import torch
from conftest import make_draft, make_target
from torch import nn
from transformers import AutoModelForCausalLM

from modeling_domino.packed_linear import PackedLinear, pack_linears


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (9, 24), (2, 5, 24), (300, 24)])
def test_the_product_is_that_of_the_linear_layer(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias)
    inputs = torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear, 9)(inputs), linear(inputs))


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_target_decodes_its_text_with_and_without_a_draft(prompt, tied):
    target = make_target(seed=3, tie_word_embeddings=tied)
    draft = make_draft(target)
    text = target.generate(prompt, max_new_tokens=30, do_sample=False)
    assert pack_linears(target) == 5 * 7 + 1
    pack_linears(draft.layers)
    assert not any(isinstance(module, nn.Linear) for module in target.modules())
    torch.testing.assert_close(target.generate(prompt, max_new_tokens=30, do_sample=False), text)
    drafted = target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=draft)
    torch.testing.assert_close(drafted, text)
    assert draft.last_generation.rounds > 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_target_is_saved_as_it_was(tmp_path, tied):
    target = make_target(tie_word_embeddings=tied)
    before = copy.deepcopy(target.state_dict())
    pack_linears(target)
    target.save_pretrained(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name


def test_other_types_are_refused_before_anything_is_changed():
    target = make_target().bfloat16()
    with pytest.raises(ValueError, match="Packing is for float32 on the CPU, but `lm_head` is torch.bfloat16 on cpu"):
        pack_linears(target)
    assert not any(isinstance(module, PackedLinear) for module in target.modules())


@pytest.mark.parametrize(
    ("there", "words"), [(torch.bfloat16, "torch.bfloat16 on cpu"), ("meta", "torch.float32 on meta")]
)
def test_a_packed_target_stays_what_and_where_it_is(there, words):
    target = make_target()
    pack_linears(target)
    target.to("cpu").float()
    with pytest.raises(ValueError, match=f"cannot become {words}"):
        target.to(there)


def test_a_packed_target_gives_no_gradients(prompt):
    target = make_target()
    pack_linears(target)
    target(prompt)  # with gradients enabled, as in a user's shell
    embeds = target.get_input_embeddings()(prompt).requires_grad_()
    with pytest.raises(ValueError, match="gives no gradients"):
        target(inputs_embeds=embeds)


def test_a_torch_without_onednn_is_named(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="has no oneDNN.*decode without packing"):
        pack_linears(make_target())
