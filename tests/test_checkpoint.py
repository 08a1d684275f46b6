"""Checkpoints: the public layout, round trips, refusals that name the tensor, and remote code without the package."""

import copy
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from conftest import make_draft
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import modeling_domino
from modeling_domino import DominoForSpeculativeDraft
from modeling_domino.adaptation import lora_config


NEW = 24
SEED = 15  # a random draft some of whose tokens are accepted
HEAD = ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"]
SHIPPED = {path.name for path in Path(modeling_domino.__file__).parent.glob("*_domino.py")}
NESTED = ["mask_token_id", "target_layer_ids", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "shift_label"]
FLAT = [
    *["block_size", "emb_dim", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"],
    *["num_attention_heads", "num_key_value_heads", "head_dim", "num_target_layers", "max_position_embeddings"],
    *["layer_types", "rms_norm_eps", "initializer_range", "tie_word_embeddings", "attention_bias", "hidden_act"],
]


def write_checkpoint(folder: Path, config: dict, tensors: dict) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def write_public(folder: Path, draft: DominoForSpeculativeDraft, prefix: str = "") -> Path:
    """The folder that the author's code would write; `prefix` before the names of the head tensors."""
    config = draft.config
    public = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "dtype": "float32",
        **{name: getattr(config, name) for name in FLAT},
        "dflash_config": {"projector_type": "domino", **{name: getattr(config, name) for name in NESTED}},
    }
    tensors = {(prefix if name in HEAD else "") + name: tensor for name, tensor in draft.state_dict().items()}
    return write_checkpoint(folder, public, tensors)


def write_changed(folder: Path, draft: DominoForSpeculativeDraft, change) -> Path:
    """Our own layout with the tensors that `change` makes of the draft's."""
    tensors = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    change(tensors)
    return write_checkpoint(folder, draft.config.to_dict(), tensors)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def generate(target, prompt, draft=None):
    """Greedy text, and with a draft its rounds."""
    ids = target.generate(prompt, max_new_tokens=NEW, do_sample=False, assistant_model=draft)[0].tolist()
    return (ids, list(draft.last_generation.accepted_per_round)) if draft is not None else ids


@pytest.mark.parametrize("prefix", ["", "logit_head."])
@pytest.mark.parametrize("shift_label", [True, False])
def test_public_folder_loads_and_is_saved_as_ours(prefix, shift_label, target, prompt, tmp_path):
    original = make_draft(target, seed=SEED, shift_label=shift_label, pure_draft_prefix_len=2)
    draft = DominoForSpeculativeDraft.from_pretrained(write_public(tmp_path / "public", original, prefix))
    assert_same_tensors(draft.state_dict(), original.state_dict())
    assert generate(target, prompt, draft) == generate(target, prompt, original)
    draft.save_pretrained(tmp_path / "ours")
    assert_same_tensors(load_file(tmp_path / "ours" / "model.safetensors"), original.state_dict())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["model_type"] == "domino"
    assert config["auto_map"] == {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoForSpeculativeDraft",
    }
    assert config["architectures"] == ["DominoForSpeculativeDraft"]
    assert "dflash_config" not in config and "rope_theta" not in config
    assert (config["shift_label"], config["pure_draft_prefix_len"]) == (shift_label, 2)


@pytest.mark.parametrize("name", ["draft", "domino-qwen3.5-4b.v1"])
@pytest.mark.parametrize("load", [DominoForSpeculativeDraft.from_pretrained, AutoModel.from_pretrained])
def test_save_load_save_changes_no_byte(load, name, draft, tmp_path):
    draft.save_pretrained(tmp_path / name)
    loaded = load(tmp_path / name)
    assert type(loaded) is DominoForSpeculativeDraft
    assert_same_tensors(loaded.state_dict(), draft.state_dict())
    loaded.save_pretrained(tmp_path / "again")
    first, second = files_of(tmp_path / name), files_of(tmp_path / "again")
    assert set(first) == {"config.json", "model.safetensors"} | SHIPPED
    assert first == second
    package = Path(modeling_domino.__file__).parent
    assert all(first[name] == (package / name).read_bytes() for name in SHIPPED)


def test_decoding_leaves_nothing_of_the_target_in_what_is_saved(target, draft, prompt, tmp_path):
    draft.save_pretrained(tmp_path / "before")
    generate(target, prompt, draft)
    draft.save_pretrained(tmp_path / "after")
    assert files_of(tmp_path / "after") == files_of(tmp_path / "before")


def test_sharded_checkpoint_loads(draft, tmp_path):
    draft.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_tensors(DominoForSpeculativeDraft.from_pretrained(tmp_path).state_dict(), draft.state_dict())


def test_checkpoint_without_a_head_gets_a_neutral_one_and_a_warning(draft, tmp_path, caplog):
    folder = write_changed(tmp_path / "backbone", draft, lambda tensors: [tensors.pop(name) for name in HEAD])
    loaded = DominoForSpeculativeDraft.from_pretrained(folder)
    [warning] = [r.getMessage() for r in caplog.records if r.name == "modeling_domino.modeling_domino"]
    assert f"{folder} holds no correction head" in warning
    assert not loaded.head_enabled
    tensors = loaded.state_dict()
    assert_same_tensors(
        {name: tensor for name, tensor in tensors.items() if name not in HEAD},
        {name: tensor for name, tensor in draft.state_dict().items() if name not in HEAD},
    )
    assert all(tensors[name].isfinite().all() and tensors[name].abs().max() > 0 for name in HEAD[:3])
    assert tensors["embed_proj.2.weight"].abs().max() == 0  # final logits equal base logits


def test_a_head_beside_a_plain_dflash_configuration_is_refused(target, tmp_path):
    """Such a file would decode unshifted, at about one token a round."""
    draft = make_draft(target, shift_label=False)
    folder = write_public(tmp_path / "public", draft)
    config = json.loads((folder / "config.json").read_text())
    del config["dflash_config"]["projector_type"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds the tensors of a Domino head, but its config.json describes a DFlash"):
        DominoForSpeculativeDraft.from_pretrained(folder)


CHANGES = {
    **{f"missing {name}": (lambda tensors, name=name: tensors.pop(name)) for name in HEAD},
    "missing fc.weight": lambda tensors: tensors.pop("fc.weight"),
    "missing layers.1.mlp.up_proj.weight": lambda tensors: tensors.pop("layers.1.mlp.up_proj.weight"),
    "unknown lm_head.weight": lambda tensors: tensors.update({"lm_head.weight": torch.ones(24, 32)}),
    "unknown layers.2.input_layernorm.weight": lambda tensors: tensors.update(
        {"layers.2.input_layernorm.weight": torch.ones(32)}
    ),
    "wrong-shape embed_proj.2.weight": lambda tensors: tensors.update({"embed_proj.2.weight": torch.ones(25, 8)}),
    "wrong-shape layers.0.self_attn.k_proj.weight": lambda tensors: tensors.update(
        {"layers.0.self_attn.k_proj.weight": torch.ones(32, 32)}
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_wrong_tensors_are_refused_by_name(case, draft, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = write_changed(tmp_path / "wrong", draft, CHANGES[case])
    with pytest.raises((ValueError, RuntimeError)) as error:
        DominoForSpeculativeDraft.from_pretrained(folder)
    kind, name = case.split()
    if kind == "wrong-shape":
        assert name in str(error.value) + caplog.text  # transformers names it in its load report
    else:
        assert f"{kind} tensors ['{name}']" in str(error.value)


@pytest.mark.parametrize(
    "clone",
    [lambda draft: pickle.loads(pickle.dumps(draft)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_a_cloned_draft_decodes(clone, target, prompt):
    draft = make_draft(target, seed=SEED)
    expected = generate(target, prompt, draft)
    assert expected[0] == generate(target, prompt) and sum(expected[1]) > 0
    cloned = clone(draft)
    assert cloned.last_generation == draft.last_generation
    cloned.last_generation = None
    assert generate(target, prompt, cloned) == expected


# Hides what a user who only installed transformers does not have, however it is installed here.
PREAMBLE = """
import json, pickle, sys

HIDDEN = {"modeling_domino", "triton", "peft", "datasets", "accelerate"}

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import torch
from transformers import AutoModel, AutoModelForCausalLM

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained("target")
prompt = torch.tensor([json.loads(open("prompt.json").read())])

def run(draft):
    draft.decoding.adaptive_length = False
    ids = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=draft)[0].tolist()
    return [ids, list(draft.last_generation.accepted_per_round)]

def load(name):
    draft = AutoModel.from_pretrained(name, trust_remote_code=True)
    assert type(draft).__module__.startswith("transformers_modules."), type(draft)
    assert not hasattr(draft, "generate")
    return draft

def tell(**results):
    assert not HIDDEN & set(sys.modules)
    print("RESULT", json.dumps(results))
"""


@pytest.fixture
def remote(target, prompt, tmp_path):
    """Runs a script in a process without our package and with fresh caches, beside a saved target and draft.

    Gives the folder, the run function, and what the draft decodes to here.
    """
    draft = make_draft(target, seed=SEED)
    folder = tmp_path / "elsewhere"
    target.save_pretrained(folder / "target")
    draft.save_pretrained(folder / "domino-tiny.v1")
    (folder / "prompt.json").write_text(json.dumps(prompt[0].tolist()))

    def run(script: str) -> dict:
        (folder / "script.py").write_text(PREAMBLE + script)
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        fresh = {"HF_HOME": str(folder / "hf"), "HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_OFFLINE": "1"}
        process = subprocess.run(
            [sys.executable, "-I", "script.py"],
            cwd=folder,
            env={**keep, **fresh},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        return json.loads(process.stdout.rsplit("RESULT", 1)[1])

    return folder, run, list(generate(target, prompt, draft))


def test_local_folder_decodes_by_its_own_code_alone(remote):
    folder, run, (text, accepted) = remote
    result = run("""
draft = load("domino-tiny.v1")
try:
    refusal = type(AutoModel.from_pretrained("domino-tiny.v1")).__name__
except Exception as error:
    refusal = f"refused: {error}"
plain = target.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()
decoded = run(draft)
cloned = run(pickle.loads(pickle.dumps(draft)))
draft.save_pretrained("again")
import os
os.chdir("again")
dot = run(load("."))
tell(plain=plain, decoded=decoded, cloned=cloned, dot=dot, refusal=refusal)
""")
    assert result["plain"] == text
    assert result["decoded"] == result["cloned"] == result["dot"] == [text, accepted]
    assert result["refusal"].startswith("refused:") and "trust_remote_code=True" in result["refusal"]
    assert files_of(folder / "again") == files_of(folder / "domino-tiny.v1")


def test_hub_repository_decodes_offline_from_a_fresh_cache(remote):
    folder, run, (text, accepted) = remote
    entry, revision = folder / "hf" / "hub" / "models--org--domino-tiny.v1", "0123456789abcdef" * 2 + "01234567"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text(revision)
    shutil.move(folder / "domino-tiny.v1", entry / "snapshots" / revision)
    result = run("""
draft = load("org/domino-tiny.v1")
draft.save_pretrained("again")
tell(decoded=run(draft), module=type(draft).__module__)
""")
    assert result["decoded"] == [text, accepted]
    assert revision in result["module"]
    assert files_of(folder / "again").keys() == files_of(entry / "snapshots" / revision).keys()


def test_an_adapter_on_a_repositorys_draft(remote, target, prompt):
    """Beside torch and transformers only peft (and accelerate, which it wants) is installed."""
    folder, run, (text, accepted) = remote
    draft = make_draft(target, seed=SEED)
    adapter = peft.get_peft_model(draft, lora_config(r=4, init_lora_weights=False))
    adapter.save_pretrained(folder / "adapter")
    expected = list(generate(target, prompt, adapter))
    result = run("""
HIDDEN -= {"peft", "accelerate"}
import peft
draft = load("domino-tiny.v1")
adapted = peft.PeftModel.from_pretrained(draft, "adapter")
decoded, gru = run(adapted), float(adapted.head_weights().gru_hidden.sum())
with adapted.disable_adapter():
    without, own = run(adapted), float(adapted.head_weights().gru_hidden.sum())
tell(decoded=decoded, without=without, gru=[gru, own], merged=run(adapted.merge_and_unload()))
""")
    assert result["decoded"] == result["merged"] == expected and result["without"] == [text, accepted]
    with adapter.disable_adapter():
        own = float(adapter.head_weights().gru_hidden.sum())
    assert result["gru"] == pytest.approx([float(adapter.head_weights().gru_hidden.sum()), own], rel=1e-5)
    assert abs(result["gru"][0] - own) > 0.1


def test_two_revisions_in_one_process_decode_each_with_its_own_code(remote):
    folder, run, (text, accepted) = remote
    shutil.copytree(folder / "domino-tiny.v1", folder / "one-token")
    with open(folder / "one-token" / "correction_domino.py", "a") as file:
        file.write("""

_whole_block = draft_block


def draft_block(head, hidden_states, base_logits, *args, **kwargs):
    return _whole_block(head, hidden_states[:, :1], base_logits[:, :1], *args, **kwargs)
""")
    result = run("""
whole, one = load("domino-tiny.v1"), load("one-token")
tell(calls=[[*run(draft), max(draft.last_generation.drafted_per_round)] for draft in (whole, one, whole)])
""")
    assert [ids for ids, _, _ in result["calls"]] == [text] * 3
    assert [most for _, _, most in result["calls"]] == [5, 1, 5]
    assert result["calls"][0] == result["calls"][2] == [text, accepted, 5]
