"""`domino validate`: each engine's rules, and each failure of the bug diary that a file can carry and no engine reports."""

import json
from pathlib import Path

import published
import pytest
import torch
from conftest import BOS, MASK, make_draft, make_target, make_tokenizer
from published import HEAD, write_folder
from safetensors.torch import load_file, save_file
from transformers import CohereConfig, CohereForCausalLM, Gemma2Config, Gemma2ForCausalLM

from modeling_domino.conversion import convert, validate


SGLANG, DFLASH, DOMINO, OURS = "sglang", "speculators-dflash", "speculators-domino", "domino"
ENGINE = {SGLANG: "sglang", DFLASH: "speculators", DOMINO: "speculators", OURS: "transformers"}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    make_target(seed=6, eos_token_id=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def written(target_folder, tmp_path_factory) -> dict[str, tuple[dict, dict]]:
    """config.json and tensors of one good draft in each layout."""
    root = tmp_path_factory.mktemp("written")
    make_draft(make_target(seed=6, eos_token_id=2)).to(torch.bfloat16).save_pretrained(root / "source")
    files = {}
    for to in ENGINE:
        convert(str(root / "source"), root / to, to=to, target=target_folder)
        tensors = load_file(root / to / "model.safetensors")
        files[to] = (json.loads((root / to / "config.json").read_text()), tensors)
    return files


def violations(written, layout: str, tmp_path: Path, change=None, engine: str = "", target=None) -> list[str]:
    """What is said of a written draft after `change(config, tensors)`."""
    config, tensors = json.loads(json.dumps(written[layout][0])), dict(written[layout][1])
    if change is not None:
        change(config, tensors)
    folder = write_folder(tmp_path / "draft", config, tensors)
    for name in ("configuration_domino.py", "modeling_domino.py") if layout == OURS else ():
        (folder / name).write_text("")
    return [str(violation) for violation in validate(str(folder), engine or ENGINE[layout], target=target)]


@pytest.mark.parametrize("layout", ENGINE)
def test_what_convert_writes_passes(layout, written, target_folder, tmp_path):
    assert violations(written, layout, tmp_path, target=target_folder) == []


def put(**changes):
    return lambda config, tensors: config.update(changes)


def nest(**changes):
    return lambda config, tensors: config["dflash_config"].update(changes)


def lose(*keys: str):
    def change(config, tensors):
        for key in keys:
            place, _, name = key.rpartition(".")
            (config[place] if place else config).pop(name)

    return change


def rename(old: str, new: str):
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def add(name: str, *shape: int, dtype=torch.bfloat16):
    return lambda config, tensors: tensors.update({name: torch.ones(*shape, dtype=dtype)})


def both(*changes):
    return lambda config, tensors: [change(config, tensors) for change in changes]


def no_head(config, tensors):
    for name in HEAD:
        del tensors[name]


def spoil(name: str, value: float):
    return lambda config, tensors: tensors.update({name: torch.full_like(tensors[name], value)})


# Failures that raise no error anywhere: the target's text comes out all the same, only slowly. Named as in the diary.
SILENT = {
    "shifted file decoded as DFlash": (
        SGLANG,
        lose("dflash_config.projector_type"),
        "`projector_type` is missing, but",
    ),
    "shifted backbone without a head": (
        SGLANG,
        both(no_head, lose("dflash_config.projector_type")),
        "labels are shifted",
    ),
    "shift flag not saved": (SGLANG, lose("dflash_config.shift_label"), "`dflash_config.shift_label` is None"),
    "shift flag not saved (ours)": (OURS, lose("shift_label"), "`shift_label` is missing"),
    "shift flag not saved (speculators #773)": (DFLASH, lose("shift_label"), "`shift_label` is None"),
    "shift flag not saved (speculators #664)": (DOMINO, lose("sample_from_anchor"), "`sample_from_anchor` is None"),
    "shift flag as a string": (SGLANG, nest(shift_label="true"), "`dflash_config.shift_label` is 'true'"),
    "shift flag as a number": (SGLANG, nest(shift_label=1), "`dflash_config.shift_label` is 1"),
    "trained shifted, decoded unshifted": (DFLASH, put(shift_label=False), "`shift_label` is false"),
    "two alignments": (DFLASH, put(sample_from_anchor=False), "contradict each other"),
    "fewer proposals than slots": (
        DOMINO,
        lambda c, t: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4),
        "`speculative_tokens` is 4: 5 follow",
    ),
    "head left out on save": (SGLANG, lambda c, t: no_head(c, t), f"`{HEAD[0]}` is missing"),
    "one head tensor left out": (SGLANG, lambda c, t: t.pop(HEAD[1]), f"`{HEAD[1]}` is missing"),
    "head left out on save (speculators)": (
        DOMINO,
        lambda c, t: t.pop("logits_correction." + HEAD[0]),
        f"`logits_correction.{HEAD[0]}` is missing",
    ),
    "head under a prefix that is skipped": (
        SGLANG,
        rename(HEAD[0], "logit_head." + HEAD[0]),
        f"`logit_head.{HEAD[0]}` is unknown: the loader would skip it and decode without the head; rename it to `{HEAD[0]}`",
    ),
    "head under the other speculators prefix": (
        DFLASH,
        rename("domino_head." + HEAD[3], "logits_correction." + HEAD[3]),
        f"rename it to `domino_head.{HEAD[3]}`",
    ),
    "head fields not forwarded": (DFLASH, lose("gru_hidden_dim"), "`gru_hidden_dim` is missing"),
    "P not saved": (DOMINO, lose("pure_draft_prefix_len"), "`pure_draft_prefix_len` is missing"),
    "P out of range": (DOMINO, put(pure_draft_prefix_len=5), "pure_draft_prefix_len"),
    "P other than 1": (SGLANG, nest(pure_draft_prefix_len=2), "`dflash_config.pure_draft_prefix_len` is 2: SGLang"),
    "head never trained": (SGLANG, spoil(HEAD[3], 0.0), "zero everywhere: the head was never trained"),
    "not a number in a norm": (
        SGLANG,
        spoil("norm.weight", float("nan")),
        "`norm.weight` has values that are not finite",
    ),
    "reduced draft vocabulary": (DOMINO, put(draft_vocab_size=12), "`draft_vocab_size` is 12 of 24"),
    "vocabulary map": (DFLASH, add("d2t", 24, dtype=torch.int64), "`d2t` is unknown: it maps a reduced vocabulary"),
    "mask token left to the tokenizer": (
        SGLANG,
        lose("dflash_config.mask_token_id"),
        "`dflash_config.mask_token_id` is missing",
    ),
    "mask token is BOS": (SGLANG, nest(mask_token_id=BOS), "which is also the BOS token"),
    "mask token outside the embeddings": (SGLANG, nest(mask_token_id=24), "outside the 24 embedding rows"),
    "rounded rotary frequencies": (SGLANG, add("rotary_emb.inv_freq", 4), "rounded frequencies lose acceptance"),
    "rope base in the new place only": (
        SGLANG,
        both(lose("rope_theta"), put(rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})),
        "`rope_theta` is missing at the top level",
    ),
    "two rope bases": (SGLANG, put(rope_parameters={"rope_theta": 5e6, "rope_type": "default"}), "disagree"),
    "window ignored": (SGLANG, nest(use_swa=True, swa_window_size=8, causal=False), "the draft has sliding layers"),
    "window seen from one side": (
        SGLANG,
        both(put(layer_types=["sliding_attention"] * 2, sliding_window=8), nest(causal=False)),
        "left to right only",
    ),
    "draft of other sizes": (SGLANG, put(num_key_value_heads=1), "expected [8, 32] by config.json"),
    "another layer count": (SGLANG, put(num_hidden_layers=1, layer_types=["full_attention"]), "`layers.1."),
    "taps off by one": (DOMINO, put(aux_hidden_state_layer_ids=[0, 2]), "where 0 is the embedding output"),
    "taps off by one (public)": (SGLANG, put(aux_hidden_state_layer_ids=[2, 3]), "counts the embedding output as 0"),
    "the last layer tapped": (SGLANG, nest(target_layer_ids=[1, 4]), "the target's last"),
    "nested key hidden by another": (SGLANG, put(emb_dim=4), "`emb_dim` is 4 at the top level and 8 in"),
    "block size in one place only": (
        SGLANG,
        both(lose("block_size"), nest(block_size=5)),
        "`block_size` is missing at the top level",
    ),
    "another block size": (SGLANG, nest(block_size=4), "`block_size` is 5 at the top level but 4"),
    "copies of the target": (SGLANG, add("lm_head.weight", 24, 32), "a copy would go stale"),
    "biases of the GRU": (SGLANG, add("prefix_gru.bias_ih_l0", 48), "one layer and no biases"),
    "a second layer of the GRU": (SGLANG, add("prefix_gru.weight_ih_l1", 48, 16), "one layer and no biases"),
    "a head of another kind": (SGLANG, add("markov_head.weight", 4), "`markov_head.weight` is unknown"),
    "mixed types": (OURS, lambda c, t: t.update({"norm.weight": t["norm.weight"].float()}), "bfloat16 and float32"),
    "type in config.json": (OURS, put(dtype="float32"), "`dtype` is 'float32', but the weights are in bfloat16"),
    "misspelt key": (OURS, put(shift_labels=True), "did you mean `shift_label`"),
}


@pytest.mark.parametrize("bug", SILENT)
def test_a_failure_that_nothing_would_report_is_caught(bug, written, tmp_path):
    layout, change, words = SILENT[bug]
    found = violations(written, layout, tmp_path, change)
    assert [violation for violation in found if words in violation], found


# Rules that the engine itself enforces, sooner or later.
ENFORCED = {
    "architecture": (
        SGLANG,
        put(architectures=["DominoDraftModel"]),
        "SGLang knows the draft as ['DFlashDraftModel']",
    ),
    "model type": (SGLANG, put(model_type="domino_draft"), "write 'qwen3'"),
    "remote code": (SGLANG, put(auto_map={"AutoModel": "dflash.DFlashDraftModel"}), "`auto_map` is there"),
    "projector": (SGLANG, nest(projector_type="domnio"), "`dflash_config.projector_type` is 'domnio'"),
    "G": (SGLANG, lose("dflash_config.gru_hidden_dim"), "`dflash_config.gru_hidden_dim` is missing"),
    "R": (SGLANG, lose("emb_dim"), "`emb_dim` is None at the top level"),
    "block of one": (SGLANG, put(block_size=1), "`block_size` is 1: SGLang drafts block_size - 1"),
    "bfloat16": (
        SGLANG,
        lambda c, t: t.update({k: v.half() for k, v in t.items()}),
        "weights are in float16: the engine takes bfloat16",
    ),
    "layer count": (SGLANG, lose("num_target_layers"), "`num_target_layers` is missing"),
    "tied": (SGLANG, put(tie_word_embeddings=True), "`tie_word_embeddings` is not false"),
    "activation": (SGLANG, put(hidden_act="gelu"), "`hidden_act` is 'gelu'"),
    "shape": (SGLANG, add("fc.weight", 32, 32), "`fc.weight` is [32, 32], expected [32, 64]"),
    "missing": (SGLANG, lambda c, t: t.pop("norm.weight"), "`norm.weight` is missing"),
    "verifier": (
        DOMINO,
        lambda c, t: c["speculators_config"].update(verifier={}),
        "verifier.name_or_path` is missing",
    ),
    "embeddings": (DFLASH, lambda c, t: t.pop("embed_tokens.weight"), "`embed_tokens.weight` is missing"),
    "lm_head": (DFLASH, add("lm_head.weight", 24, 16), "`lm_head.weight` is [24, 16]"),
    "layers": (DFLASH, lose("transformer_layer_config"), "`transformer_layer_config` is missing"),
    "auto_map": (OURS, lose("auto_map"), "`auto_map` does not name modeling_domino.DominoForSpeculativeDraft"),
}


@pytest.mark.parametrize("rule", ENFORCED)
def test_a_rule_of_the_engine_is_kept(rule, written, target_folder, tmp_path):
    layout, change, words = ENFORCED[rule]
    found = violations(written, layout, tmp_path, change, target=target_folder)
    assert [violation for violation in found if words in violation], found


def test_every_violation_is_listed_at_once_with_its_remedy(written, tmp_path):
    change = both(
        put(architectures=["DominoDraftModel"], auto_map={}),
        nest(pure_draft_prefix_len=2, shift_label="true"),
        lambda c, t: t.pop("fc.weight"),
        lambda c, t: t.update({k: v.float() for k, v in t.items()}),
    )
    found = violations(written, SGLANG, tmp_path, change)
    words = [
        "`architectures`",
        "`auto_map`",
        "shift_label",
        "pure_draft_prefix_len",
        "config.json cannot be read",
        "float32",
    ]
    for word in words:
        assert any(word in violation for violation in found), word
    assert all(": " in violation for violation in found)


def other_target(folder: Path, **overrides) -> str:
    make_target(seed=6, **{"eos_token_id": 2, **overrides}).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"vocab_size": 25}, "the draft's vocabulary is 24, the target's 25"),
        ({"hidden_size": 64}, "the draft's hidden size is 32, the target's 64"),
        ({"num_hidden_layers": 6}, "the draft's number of target layers is 5, the target's 6"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
            "the draft's rope base is 10000, the target's 5e+06",
        ),
        ({"eos_token_id": [2, MASK]}, f"`mask_token_id` {MASK} is the target's EOS token"),
    ],
    ids=["vocabulary", "hidden", "layers", "rope", "mask"],
)
def test_a_draft_for_another_target_is_caught(overrides, words, written, tmp_path):
    target = other_target(tmp_path / "target", **overrides)
    assert any(words in violation for violation in violations(written, SGLANG, tmp_path, target=target))


def test_our_own_decoding_takes_padding_and_other_rope_bases(written, tmp_path):
    """What `check_fit` lets pass, the rules for transformers let pass."""
    rope = {"rope_type": "default", "rope_theta": 5e6}
    target = other_target(tmp_path / "target", vocab_size=64, rope_parameters=rope)
    assert violations(written, OURS, tmp_path, target=target) == []


@pytest.mark.parametrize(
    ("config_class", "model_class", "words"),
    [
        (Gemma2Config, Gemma2ForCausalLM, ["embeddings are a", "scales or caps its logits"]),
        (CohereConfig, CohereForCausalLM, ["scales or caps its logits"]),
    ],
    ids=["gemma2", "cohere"],
)
def test_a_target_that_is_more_than_its_matrices(config_class, model_class, words, written, tmp_path):
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "eos_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "pad_token_id": 0}
    model_class(config_class(**sizes, **heads)).save_pretrained(tmp_path / "target")
    found = violations(written, SGLANG, tmp_path, target=str(tmp_path / "target"))
    for word in words:
        assert any(word in violation for violation in found), found


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm"])
@pytest.mark.parametrize("layout", [SGLANG, DFLASH, DOMINO, OURS])
def test_engines_without_domino_take_no_domino_draft(engine, layout, written, tmp_path):
    [violation] = violations(written, layout, tmp_path, engine=engine)
    assert "this is a Domino draft: no release of" in violation


@pytest.mark.parametrize("engine", ["vllm", "tensorrt-llm", "sglang"])
def test_engines_take_a_plain_dflash_draft(engine, tmp_path):
    draft = make_draft(make_target(seed=6), shift_label=False).to(torch.bfloat16)
    folder = write_folder(tmp_path / "z-lab", *published.z_lab(draft))
    convert(str(folder), tmp_path / "written", to="sglang")
    assert validate(str(tmp_path / "written"), engine) == []


def test_a_shifted_backbone_alone_is_written_for_no_engine(tmp_path):
    """`train_head: false` with shifted labels: engines would read it as DFlash."""
    draft = make_draft(make_target(seed=6)).to(torch.bfloat16)
    config = draft.config.to_dict()
    write_folder(tmp_path / "backbone", config, published.backbone(draft))
    with pytest.raises(ValueError, match="no correction head and shifted labels"):
        convert(str(tmp_path / "backbone"), tmp_path / "written", to="sglang")


@pytest.mark.parametrize("layout", ENGINE)
def test_files_of_another_layout_are_sent_to_convert(layout, written, tmp_path):
    engine = "transformers" if layout != OURS else "sglang"
    [violation] = violations(written, layout, tmp_path, engine=engine)
    assert violation.startswith(f"the file is in the layout {layout}: `domino convert SRC DST --to ")


def test_missing_code_is_noticed(written, tmp_path):
    folder = write_folder(tmp_path / "draft", *written[OURS])
    found = [str(violation) for violation in validate(str(folder), "transformers")]
    assert [violation.partition(":")[0] for violation in found] == [
        "configuration_domino.py is missing",
        "modeling_domino.py is missing",
    ]


def test_a_speculators_file_is_checked_against_the_target_that_it_names(written, tmp_path):
    def change(config, tensors):
        config["speculators_config"]["verifier"]["name_or_path"] = other_target(tmp_path / "target", vocab_size=25)

    assert any("the draft's vocabulary is 24" in v for v in violations(written, DOMINO, tmp_path, change))


def test_a_truncated_file_is_no_violation_but_an_error(written, tmp_path):
    folder = write_folder(tmp_path / "draft", *written[SGLANG])
    save_file(dict(list(written[SGLANG][1].items())[:3]), folder / "model.safetensors")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-8])
    with pytest.raises(ValueError, match="is truncated or damaged"):
        validate(str(folder), "sglang")
