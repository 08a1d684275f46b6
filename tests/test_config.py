"""DominoConfig: the paper's defaults, derivation from any target, and files that must say how they are aligned."""

import json

import pytest
import torch
from conftest import BOS, EOS, MASK, PAD, SIZES, make_config, make_target
from huggingface_hub.errors import StrictDataclassError
from published import public_shapes
from tokenizers import Tokenizer, models
from transformers import (
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    LlavaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
)

from modeling_domino import DominoConfig, DominoForSpeculativeDraft


LOGGER = "modeling_domino.configuration_domino"

# What the author's files say, at the sizes of a toy; facts: the head's keys are nested, `emb_dim` is in both places.
PUBLIC = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "block_size": 5,
    "emb_dim": 8,
    "dflash_config": {
        "mask_token_id": MASK,
        "target_layer_ids": [1, 2],
        "projector_type": "domino",
        "pure_draft_prefix_len": 2,
        "emb_dim": 8,
        "gru_hidden_dim": 16,
        "shift_label": False,
    },
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_target_layers": 5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 256,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write(folder, config: dict):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nested(**changes) -> dict:
    """PUBLIC with other `dflash_config` entries; None removes one."""
    dflash = {**PUBLIC["dflash_config"], **changes}
    return {**PUBLIC, "dflash_config": {key: value for key, value in dflash.items() if value is not None}}


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def tokenizer(words: int = 6, template: str | None = None, extra=()) -> PreTrainedTokenizerFast:
    """`words` ordinary tokens, then bos, eos, unk, pad and the extra special tokens, one row each."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")),
        chat_template=template,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        additional_special_tokens=list(extra),
    )


def test_defaults_are_the_papers():
    config = DominoConfig()
    assert (config.block_size, config.num_hidden_layers, config.gru_hidden_dim, config.emb_dim) == (16, 5, 1024, 256)
    assert (config.pure_draft_prefix_len, config.shift_label, config.max_draft_tokens) == (1, True, 16)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.mask_token_id == 151669
    assert DominoConfig(shift_label=False).max_draft_tokens == 15


@pytest.mark.parametrize(
    ("target_layers", "draft_layers", "expected"),
    [(36, 5, [1, 9, 17, 25, 33]), (64, 5, [1, 16, 31, 46, 61]), (36, 1, [18]), (6, 5, [1, 2, 3]), (2, 5, [0])],
)
def test_taps_follow_the_public_formula_and_never_reach_the_last_layer(target_layers, draft_layers, expected):
    config = DominoConfig(num_target_layers=target_layers, num_hidden_layers=draft_layers)
    assert config.target_layer_ids == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block_size": 0}, "`block_size` is 0, expected at least 1"),
        ({"block_size": 1, "shift_label": False, "pure_draft_prefix_len": 0}, "expected at least 2"),
        ({"pure_draft_prefix_len": 16}, r"`pure_draft_prefix_len` is 16, expected a value in \[0, 15\]"),
        ({"pure_draft_prefix_len": -1}, "`pure_draft_prefix_len` is -1"),
        ({"target_layer_ids": []}, "`target_layer_ids` is empty"),
        ({"target_layer_ids": [1, 36]}, "taps layer 36, but the target has layers 0 to 35"),
        ({"target_layer_ids": [1, 35]}, "taps layer 35, the target's last"),
        ({"mask_token_id": 151936}, "`mask_token_id` is 151936, outside"),
        ({"mask_token_id": 7, "eos_token_id": [5, 7]}, "`mask_token_id` is 7, which is also the EOS token"),
        ({"attention_bias": True}, "`attention_bias=True`"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings=True`"),
        ({"layer_types": ["sliding_attention"] * 5, "sliding_window": 15}, "`sliding_window` is 15"),
        ({"block_sise": 8}, "no field `block_sise`: did you mean `block_size`"),
        ({"prefix_gru_hidden_dim": 8, "gru_hiden_dim": 8}, "no field `gru_hiden_dim`: did you mean `gru_hidden_dim`"),
    ],
)
def test_impossible_values_are_refused_in_words(fields, words):
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        DominoConfig(**fields)


@pytest.mark.parametrize(
    ("target_config", "expected"),
    [
        (
            LlamaConfig(**SIZES, rope_theta=7e5),
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_target_layers": 5, "theta": 7e5},
        ),
        (
            Qwen3Config(**SIZES, head_dim=16, rope_theta=1e6),
            {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_target_layers": 5, "theta": 1e6},
        ),
        (
            Gemma3TextConfig(**SIZES, head_dim=8, rope_theta=3e6),  # each layer type has its own rope base
            {"num_key_value_heads": 2, "head_dim": 8, "num_target_layers": 5, "theta": 3e6},
        ),
        (
            Gemma3Config(text_config={**SIZES, "head_dim": 8, "rope_theta": 3e6}),
            {"num_key_value_heads": 2, "head_dim": 8, "num_target_layers": 5, "theta": 3e6, "vocab_size": 24},
        ),
        (
            LlavaConfig(text_config=LlamaConfig(**SIZES, rope_theta=7e5)),
            {"num_key_value_heads": 2, "head_dim": 8, "num_target_layers": 5, "theta": 7e5, "vocab_size": 24},
        ),
    ],
    ids=["llama", "qwen3", "gemma3_text", "gemma3", "llava"],
)
def test_sizes_and_rope_base_come_from_the_targets_text_part(target_config, expected, caplog):
    config = DominoConfig.from_target(target_config, mask_token_id=MASK, num_hidden_layers=2)
    theta = config.rope_parameters["rope_theta"]
    found = {name: theta if name == "theta" else getattr(config, name) for name in expected}
    assert found == expected
    assert config.rope_parameters["rope_type"] == "default"
    assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (32, 48, 256)
    assert (config.bos_token_id, config.pad_token_id, config.num_hidden_layers) == (BOS, PAD, 2)
    assert said(caplog) == []


def test_overrides_win_over_what_is_derived():
    derived = {"hidden_size": 64, "intermediate_size": 96, "num_target_layers": 9, "target_layer_ids": [0, 3]}
    rope = {"rope_type": "default", "rope_theta": 123.0}
    config = make_config(make_target(), **derived, rope_parameters=rope, pure_draft_prefix_len=0)
    assert {name: getattr(config, name) for name in derived} == derived
    assert config.rope_parameters == rope
    assert config.pure_draft_prefix_len == 0


def test_what_gpt2_cannot_tell_is_invented_and_named(caplog):
    target_config = GPT2Config(n_layer=6, n_embd=32, n_head=4, n_positions=64, vocab_size=24, bos_token_id=BOS)
    config = DominoConfig.from_target(target_config, mask_token_id=MASK)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (128, 4, 8)
    assert config.max_position_embeddings == 64
    [warning] = said(caplog)
    assert "intermediate_size=128, rms_norm_eps=1e-06, rope_theta=10000." in warning
    assert "max_position_embeddings" not in warning


def test_encoder_decoder_target_is_refused():
    with pytest.raises(ValueError, match="`t5` encoder-decoder"):
        DominoConfig.from_target(T5Config(), mask_token_id=MASK)


def test_mask_token_is_an_unused_row_where_there_is_one(caplog):
    words = tokenizer(extra=["<|spare|>"])
    target_config = LlamaConfig(**{**SIZES, "vocab_size": len(words) + 3})
    assert DominoConfig.from_target(target_config, tokenizer=words).mask_token_id == len(words)
    assert f"mask_token_id={len(words)} (a row that no token uses)" in said(caplog)[0]


def test_mask_token_is_else_a_special_token_that_no_chat_contains(caplog):
    words = tokenizer(template="{{ '<|im|>' }}<|last|>", extra=["<|im|>", "<|spare|>", "<|last|>"])
    spare = words.convert_tokens_to_ids("<|spare|>")
    target_config = LlamaConfig(**{**SIZES, "vocab_size": len(words)})
    assert DominoConfig.from_target(target_config, tokenizer=words).mask_token_id == spare
    assert f"mask_token_id={spare} (the special token '<|spare|>'" in said(caplog)[0]


@pytest.mark.parametrize("extra", [(), ("<|im|>",)], ids=["only_reserved", "only_in_template"])
def test_no_spare_token_is_an_error_that_asks_for_one(extra):
    words = tokenizer(template="<|im|>", extra=extra)
    with pytest.raises(ValueError, match=f"All {len(words)} embedding rows are in use.*pass `mask_token_id=`"):
        DominoConfig.from_target(LlamaConfig(**{**SIZES, "vocab_size": len(words)}), tokenizer=words)


def test_mask_token_cannot_be_left_to_chance():
    with pytest.raises(ValueError, match="pass `mask_token_id=`.*or `tokenizer=`"):
        DominoConfig.from_target(LlamaConfig(**SIZES))


@pytest.mark.parametrize("key", ["shift_label", "pure_draft_prefix_len", "block_size", "mask_token_id", "rope_theta"])
@pytest.mark.parametrize("layout", ["ours", "public"])
def test_file_that_leaves_out_what_no_tensor_tells_is_refused(key, layout, tmp_path):
    if layout == "ours":
        fields = DominoConfig().to_dict()
        (fields["rope_parameters"] if key == "rope_theta" else fields).pop(key)
    else:
        fields = nested(**{key: None})
        fields.pop(key, None)
    words = f"lacks `{key}`, which cannot be guessed"
    with pytest.raises(ValueError, match=words):
        DominoConfig.from_dict(fields)
    with pytest.raises(ValueError, match=words):
        DominoConfig.from_pretrained(write(tmp_path, fields))
    with pytest.raises(ValueError, match=words):
        DominoForSpeculativeDraft.from_pretrained(write(tmp_path, fields))


@pytest.mark.parametrize("key", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"])
def test_taps_that_count_the_embedding_are_refused(key):
    with pytest.raises(ValueError, match=rf"`{key}: \[2, 3\]` counts the embedding output as 0.*subtract one"):
        DominoConfig.from_dict({**PUBLIC, key: [2, 3]})


@pytest.mark.parametrize(
    "overrides", [{}, {"shift_label": False, "pure_draft_prefix_len": 0}], ids=["default", "other"]
)
def test_saved_file_says_its_alignment_and_survives_a_second_save(overrides, tmp_path):
    config = make_config(make_target(), **overrides)
    config.save_pretrained(tmp_path / "first")
    again = DominoConfig.from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    first, second = ((tmp_path / name / "config.json").read_bytes() for name in ("first", "second"))
    assert first == second
    saved = json.loads(first)
    assert saved["model_type"] == "domino"
    assert (
        saved["shift_label"] is config.shift_label and saved["pure_draft_prefix_len"] == config.pure_draft_prefix_len
    )
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize("projector", ["domino", "causal_v5"])
def test_public_layout_is_read(projector, tmp_path):
    fields = nested(projector_type=projector)
    config = DominoConfig.from_pretrained(write(tmp_path, fields))
    for key, value in {**fields["dflash_config"], "block_size": 5}.items():
        if key != "projector_type":
            assert getattr(config, key) == value, key
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5_000_000}
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (32, 8, 5)
    assert config.dtype == torch.bfloat16
    assert config.model_type == "domino"
    assert not {"dflash_config", "projector_type"} & set(config.to_dict())
    assert DominoConfig.from_dict(fields).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "ours")
    assert DominoConfig.from_pretrained(tmp_path / "ours").to_dict() == config.to_dict()
    assert fields == nested(projector_type=projector)  # reading changes no argument


@pytest.mark.parametrize("projector", ["dflash", None])
def test_a_plain_dflash_file_is_unshifted_and_marked(projector):
    head = {"shift_label": None, "pure_draft_prefix_len": None, "emb_dim": None, "gru_hidden_dim": None}
    fields = nested(projector_type=projector, **head)
    del fields["emb_dim"]
    config = DominoConfig.from_dict(fields)
    assert config.shift_label is False and config.projector_type == "dflash"
    assert (config.pure_draft_prefix_len, config.emb_dim, config.gru_hidden_dim) == (1, 256, 1024)


def test_modelopts_window_slides_in_every_layer_and_legacy_switches_vanish():
    fields = nested(use_swa=True, swa_window_size=8, causal=False, use_bias_norm=False, bias_gate_init=-2.0)
    config = DominoConfig.from_dict({**fields, "sliding_window": 8})
    assert (config.sliding_window, config.layer_types) == (8, ["sliding_attention"] * 2)
    assert not {"use_swa", "swa_window_size", "causal", "use_bias_norm", "bias_gate_init"} & set(config.to_dict())
    assert DominoConfig.from_dict(nested(use_swa=False)).layer_types == ["full_attention"] * 2


def test_block_size_may_be_nested_only():
    fields = nested(block_size=3)
    del fields["block_size"]
    assert DominoConfig.from_dict(fields).block_size == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({**nested(emb_dim=128), "emb_dim": 256}, "`emb_dim` is 256 at the top level but 128 in `dflash_config`"),
        (nested(block_size=8), "`block_size` is 5 at the top level but 8 in `dflash_config`"),
        (nested(projector_type="dspark"), "`dflash_config.projector_type` is 'dspark'.*not a Domino draft"),
        (nested(projector_type="dflash", shift_label=True), "`shift_label` is true in a file without a Domino head"),
        (nested(projector_type=None, shift_label=True), "`shift_label` is true in a file without a Domino head"),
        (nested(use_bias_gate=True), "`use_bias_gate` is true, which this implementation has not"),
        (nested(causal=True), "`causal` is true: the sliding layers of this draft see a block from left to right"),
        (nested(use_swa=True), "`use_swa` is true, but `swa_window_size` is None"),
        ({**nested(use_swa=True, swa_window_size=8), "sliding_window": 9}, "`swa_window_size` is 8 and.* 9"),
        (nested(shift_labels=True), "no field `shift_labels`: did you mean `shift_label`"),
        (nested(shift_label="true"), "shift_label"),
    ],
    ids=[
        *["conflict", "block_conflict", "dspark", "shifted_dflash", "no_projector", "gate", "causal", "no_window"],
        *["two_windows", "misspelt", "no_boolean"],
    ],
)
def test_public_file_that_contradicts_itself_is_refused(fields, words):
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        DominoConfig.from_dict(fields)


QWEN3_4B = Qwen3Config(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_key_value_heads=8)


@pytest.mark.parametrize(
    ("config", "sizes", "parameters", "head_parameters"),
    [
        (DominoConfig(), (4096, 12288), 1_104_561_408, 55_934_976),
        (DominoConfig.from_target(QWEN3_4B, mask_token_id=151669), (2560, 9728), 588_250_368, 50_823_168),
    ],
    ids=["8b", "4b"],
)
def test_draft_has_exactly_the_public_tensors(config, sizes, parameters, head_parameters):
    with torch.device("meta"):
        draft = DominoForSpeculativeDraft(config)
    assert {name: list(tensor.shape) for name, tensor in draft.state_dict().items()} == public_shapes(*sizes)
    assert len(draft.state_dict()) == 62
    assert sum(p.numel() for p in draft.parameters()) == parameters
    head = [p for name, p in draft.named_parameters() if name.startswith(("prefix_gru", "embed_proj"))]
    assert sum(p.numel() for p in head) == head_parameters
