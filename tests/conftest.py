"""Tiny random targets and drafts; a draft that is rigged to be right for a known number of tokens."""

import os
import socket


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: tests reach no hub

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from modeling_domino import DominoConfig, DominoForSpeculativeDraft
from modeling_domino.speculation_domino import DecodingOptions


# Tiny models gain nothing from a second thread and lose much to one that waits.
torch.set_num_threads(1)

MASK, BOS, EOS, PAD = 23, 1, 2, 0
# Fewer tokens than hidden units, so that a hidden state exists for any wanted logits.
SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "initializer_range": 0.3,  # far from uniform, so that greedy texts do not loop at once
}
TARGETS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --slow"))


def make_target(kind: str = "llama", seed: int = 0, **overrides):
    """A random target of the given architecture, in float32."""
    config_class, model_class = TARGETS[kind]
    torch.manual_seed(seed)
    sizes = {**SIZES, **({"head_dim": 8} if kind == "qwen3" else {}), **overrides}
    return model_class(config_class(**sizes)).eval()


def make_config(target, **overrides) -> DominoConfig:
    small = {"mask_token_id": MASK, "num_hidden_layers": 2, "block_size": 5, "gru_hidden_dim": 16, "emb_dim": 8}
    return DominoConfig.from_target(target.config, **{**small, **overrides})


def make_draft(target, seed: int = 1, **overrides) -> DominoForSpeculativeDraft:
    """A random draft whose head is not neutral: corrections move its choices."""
    config = make_config(target, **overrides)
    torch.manual_seed(seed)
    draft = DominoForSpeculativeDraft(config).eval()
    torch.nn.init.normal_(draft.embed_proj[2].weight)
    return draft


class RiggedDraft(DominoForSpeculativeDraft):
    """Proposes the tokens of a known text, right for the first `right` predictions of a block and wrong after them.

    Only the backbone is rigged: taps, caches, lm_head, correction loop (with a neutral head) and verification are
    those of any draft.
    """

    def rig(self, target, text: torch.Tensor, right: int) -> "RiggedDraft":
        self.text, self.right = text, right
        self.inverse_head = torch.linalg.pinv(target.lm_head.weight.detach())
        return self

    def backbone(self, noise_embeds, context_hidden_states, position_ids, **kwargs):
        super().backbone(noise_embeds, context_hidden_states, position_ids, **kwargs)
        slots = self.config.block_size
        blocks = [self.wanted_logits(int(anchor)) for anchor in position_ids[:, -slots]]
        return (torch.stack(blocks) @ self.inverse_head.T)[:, None]

    def wanted_logits(self, anchor: int) -> torch.Tensor:
        """Of the slots of a block whose anchor stands at that position."""
        slots, first = self.config.block_size, 0 if self.config.shift_label else 1
        wanted = torch.zeros(slots, self.config.vocab_size)
        for slot in range(first, slots):
            prediction = slot - first
            position = anchor + 1 + prediction
            token = int(self.text[position]) if position < len(self.text) else MASK
            if prediction >= self.right:
                token = (token + 1) % MASK
            wanted[slot, token] = 30.0
        return wanted


def make_rigged(target, text: torch.Tensor, right: int, **overrides) -> RiggedDraft:
    """A draft that knows the target's continuation `text` (prompt included, [T])."""
    torch.manual_seed(1)
    return RiggedDraft(make_config(target, **overrides)).eval().rig(target, text, right)


def make_tokenizer(**special) -> PreTrainedTokenizerFast:
    """One letter per id, so that a stop string of two letters spans two tokens."""
    vocabulary = Tokenizer(models.WordLevel({chr(ord("a") + i): i for i in range(24)}, unk_token="a"))
    vocabulary.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    vocabulary.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, **special)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(autouse=True)
def blocks_are_whole(monkeypatch):
    """Lengths that depend on the clock have tests of their own (test_length.py); all others know how many rounds come."""
    defaults = DecodingOptions.__init__.__defaults__
    monkeypatch.setattr(DecodingOptions.__init__, "__defaults__", (*defaults[:-1], False))


@pytest.fixture(params=["loop", "assisted"])
def path(request, monkeypatch):
    """The loop that decodes where a test does not choose: files of tests that both must pass ask for it."""
    asked = "auto" if request.param == "loop" else "assisted"
    monkeypatch.setattr(DecodingOptions.__init__, "__defaults__", (asked, *DecodingOptions.__init__.__defaults__[1:]))
    return request.param


@pytest.fixture
def target():
    return make_target(seed=6)  # whose greedy texts do not repeat themselves


@pytest.fixture
def draft(target):
    return make_draft(target)


@pytest.fixture
def prompt():
    torch.manual_seed(7)
    return torch.randint(3, MASK, (1, 6))
