"""The same text as plain generate() for every kind of target, and drafts that are aligned with it."""

import pytest
import torch
from architectures import ARCHITECTURES, make_architecture
from conftest import make_draft, make_rigged, make_target
from transformers import AutoModelForCausalLM


NEW = 24
pytestmark = pytest.mark.usefixtures("path")


def greedy(target, ids, draft=None, **kwargs):
    return target.generate(ids, assistant_model=draft, max_new_tokens=NEW, do_sample=False, **kwargs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_keeps_its_text(name, prompt):
    target = make_architecture(name)
    text = greedy(target, prompt)
    assert greedy(target, prompt, make_draft(target)).tolist() == text.tolist()
    rigged = make_rigged(target, text[0], right=3)
    assert greedy(target, prompt, rigged).tolist() == text.tolist()
    assert rigged.last_generation.rounds == -(-(NEW - 1) // 4)


class Wrapped(torch.nn.Module):
    """A module with no `.weight` of its own, as adapters and quantisers put around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, states):
        return self.inner(states)


def check(target, prompt, **kwargs):
    """A random draft keeps the text, and one that is rigged right for 3 tokens keeps it in the known rounds."""
    text = greedy(target, prompt, **kwargs)
    assert greedy(target, prompt, make_draft(target), **kwargs).tolist() == text.tolist()
    return text


def test_a_head_without_a_weight(prompt):
    target = make_architecture("llama")
    text = greedy(target, prompt)
    target.lm_head = Wrapped(target.lm_head)
    assert check(target, prompt).tolist() == text.tolist()


def test_a_target_with_lora_also_on_its_head(prompt):
    peft = pytest.importorskip("peft")
    target = make_architecture("llama")
    before = greedy(target, prompt)
    adapted = peft.get_peft_model(
        target, peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    )
    text = greedy(adapted, prompt)
    assert text.tolist() != before.tolist()
    assert greedy(adapted, prompt, make_draft(target)).tolist() == text.tolist()


def test_weights_that_stay_in_int8(prompt):
    quanto = pytest.importorskip("optimum.quanto")
    target = make_architecture("llama")
    before = greedy(target, prompt)
    quanto.quantize(target, weights=quanto.qint8)
    quanto.freeze(target)
    assert target.lm_head.weight._data.dtype == torch.int8
    assert check(target, prompt).tolist() != before.tolist()
    assert target.lm_head.weight._data.dtype == torch.int8


def test_a_compiled_target(prompt):
    """Also when it was compiled before the draft put its hooks on it."""
    target = make_target(num_hidden_layers=3)
    text = greedy(target, prompt)
    torch._dynamo.reset()
    target.compile(backend="eager")
    assert greedy(target, prompt).tolist() == text.tolist()
    draft = make_rigged(target, text[0], right=3)
    assert greedy(target, prompt, draft).tolist() == text.tolist()
    assert draft.last_generation.rounds == -(-(NEW - 1) // 4)


def test_a_target_offloaded_to_disk(prompt, tmp_path):
    target = make_architecture("llama")
    text = greedy(target, prompt)
    target.save_pretrained(tmp_path / "target")
    places = {
        "model.embed_tokens": "disk",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.layers.2": "disk",
    }
    places |= {"model.layers.3": "cpu", "model.layers.4": "disk", "model.norm": "cpu", "lm_head": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map={**places, "model.rotary_emb": "cpu"}, offload_folder=tmp_path / "off"
    )
    assert offloaded.lm_head.weight.device.type == "meta"
    assert check(offloaded, prompt).tolist() == text.tolist()


@pytest.mark.parametrize("implementation", ["static", "sliding_window"])
def test_a_static_cache_that_slides_is_refused(implementation, prompt):
    """It overwrites the rows that a rejected token would need back; as long as the window is longer, it works."""
    target = make_architecture("mistral (sliding window)")
    window = target.config.sliding_window
    options = {"cache_implementation": implementation, "do_sample": False}
    short = {**options, "max_new_tokens": window - prompt.shape[1]}
    plain = target.generate(prompt, **short)
    assert target.generate(prompt, assistant_model=make_draft(target), **short).tolist() == plain.tolist()
    with pytest.raises(ValueError, match=f"implementation='{implementation}'.*cannot be cropped.*default cache"):
        target.generate(prompt, assistant_model=make_draft(target), max_new_tokens=NEW, **options)
    assert check(target, prompt).shape[1] > window


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloaded caches need a CUDA device")
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_caches(implementation, prompt):
    target = make_architecture("llama").cuda()
    text = greedy(target, prompt.cuda(), cache_implementation=implementation)
    draft = make_draft(target).cuda()
    assert greedy(target, prompt.cuda(), draft, cache_implementation=implementation).tolist() == text.tolist()


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_mix_of_dtypes(prompt, dtype, draft_dtype):
    target = make_architecture("llama").to(dtype)
    text = greedy(target, prompt)
    draft = make_draft(target).to(draft_dtype)
    output = greedy(target, prompt, draft)
    if dtype == torch.float32:
        assert output.tolist() == text.tolist()
    assert output.shape == text.shape and draft.last_generation.new_tokens == NEW
