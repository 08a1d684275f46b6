"""`domino prepare` and `domino train` as a user runs them, and the recipes that come with the examples."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import make_architecture
from conftest import MASK, free_port, make_target
from test_data import chat_tokenizer
from test_preparation import speaker
from transformers.trainer_utils import SchedulerType
from typer.testing import CliRunner

from modeling_domino import DominoConfig, DominoForSpeculativeDraft
from modeling_domino.cli import app
from modeling_domino.eagle import EagleForSpeculativeDraft
from modeling_domino.recipes import ARCHITECTURES, build_trainer, read_recipe


RECIPES = Path(__file__).parents[1] / "examples" / "recipes"


@pytest.fixture(autouse=True)
def environment():
    """TrainingArguments with FSDP leave their mark in the environment, for accelerate to find."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_recipes_of_the_paper_are_the_papers(size):
    """arXiv 2605.29707, section 5.1: AdamW 6e-4, no weight decay, clip 1, cosine, 3 epochs of batch 16, bf16, FSDP."""
    recipe, arguments = read_recipe(RECIPES / f"qwen3-{size}.yaml", ["--use_cpu", "true"])
    assert recipe.target == f"Qwen/Qwen3-{size.upper()}" and recipe.dtype == "bfloat16"
    assert (arguments.optim.value, arguments.learning_rate, arguments.weight_decay) == ("adamw_torch_fused", 6e-4, 0.0)
    assert (arguments.adam_beta1, arguments.adam_beta2) == (0.9, 0.999)
    assert (arguments.max_grad_norm, arguments.warmup_steps) == (1.0, 0.04)
    assert arguments.lr_scheduler_type == SchedulerType.COSINE and arguments.num_train_epochs == 3
    assert arguments.per_device_train_batch_size * 8 * arguments.gradient_accumulation_steps == 16
    assert arguments.bf16 and arguments.fsdp and arguments.fsdp_config["version"] == 2
    assert (arguments.num_anchors, arguments.loss_decay_gamma) == (256, 7.0)
    assert (arguments.lambda_base_start, arguments.lambda_base_decay_ratio) == (1.0, 1.0)
    paper = DominoConfig()
    assert all(getattr(paper, name) == value for name, value in recipe.draft.items())


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read_whole(path):
    recipe, arguments = read_recipe(path, ["--use_cpu", "true"])
    assert recipe.target and recipe.draft["block_size"] >= 8
    assert arguments.output_dir.startswith("outputs/") and arguments.seed == 42
    assert set(recipe.draft) <= set(DominoConfig.__dataclass_fields__)


def test_the_readmes_rows_of_the_ablation_are_trainings():
    """Each differs from the paper's recipe in what it is about, and can be built."""
    readme = (RECIPES.parents[1] / "README.md").read_text()
    table = readme.partition("| options of `domino train examples/recipes/qwen3-8b.yaml` |")[2].partition("\n\n")[0]
    rows = {}
    for row in table.strip().splitlines()[1:]:
        name, options = (cell.strip().strip("`") for cell in row.strip("|").split("|"))
        recipe, arguments = read_recipe(RECIPES / "qwen3-8b.yaml", [*shlex.split(options), "--use_cpu", "true"])
        make_config, make_model, _ = ARCHITECTURES[recipe.architecture]
        with torch.device("meta"):
            draft = make_model(make_config(**recipe.draft, num_target_layers=36))
        wrapped = arguments.fsdp_config["transformer_layer_cls_to_wrap"]
        assert set(wrapped) <= {type(module).__name__ for module in draft.modules()}, name
        assert (arguments.num_anchors, arguments.learning_rate) == (256, 6e-4)
        rows[name] = (
            recipe.architecture,
            arguments.train_head,
            arguments.training_time_test,
            arguments.lambda_base_start,
        )
    assert rows == {
        "EAGLE-3-style": ("eagle", True, False, 1.0),
        "DFlash-style": ("domino", False, False, 1.0),
        "teacher forcing": ("domino", True, False, 0.0),
        "teacher forcing and curriculum": ("domino", True, False, 1.0),
        "training-time test": ("domino", True, True, 0.0),
    }


def write(folder, **values) -> str:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"target": "t", "dataset": "d", "output_dir": str(folder / "out"), **values}))
    return str(path)


def test_flags_override_lines_and_reach_into_the_draft(tmp_path):
    path = write(tmp_path, draft={"block_size": 8}, learning_rate="6e-4", use_cpu=True)
    recipe, arguments = read_recipe(
        path, ["--draft.num-hidden-layers", "3", "--max_steps=7", "--sampled_softmax", "9"]
    )
    assert recipe.draft == {"block_size": 8, "num_hidden_layers": 3}
    assert (arguments.learning_rate, arguments.max_steps, arguments.sampled_softmax) == (6e-4, 7, 9)


def test_a_bare_no_means_no(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("target: t\ndataset: d\noutput_dir: o\nuse_cpu: true\neval_strategy: no\n")
    _, arguments = read_recipe(path, ["--save_strategy", "no"])
    assert arguments.eval_strategy.value == "no" and arguments.save_strategy.value == "no"


@pytest.mark.parametrize(
    ("values", "overrides", "words"),
    [
        ({"lambda_decay": 1}, [], "lambda_decay"),
        ({}, ["--learning_rat", "1"], "learning_rat"),
        ({}, ["--max_steps"], "`--max_steps` has no value"),
        ({}, ["max_steps", "3"], "`max_steps` stands alone"),
        ({"features": "maybe"}, [], "`features` is 'maybe'"),
        ({"init_from": "x", "draft": {"block_size": 8, "emb_dim": 4}}, [], "leave out `emb_dim` "),
        ({"init_from": "x", "layers_from": [1]}, [], "`init_from` brings.*leave out `layers_from`"),
        ({"eval_share": 1.0}, [], "`eval_share` is 1.0"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path, values, overrides, words):
    with pytest.raises(ValueError, match=words):
        read_recipe(write(tmp_path, use_cpu=True, **values), overrides)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A saved target, and data that `domino prepare` wrote with it, features included."""
    root = tmp_path_factory.mktemp("prepared")
    speaker().save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    texts = ["bcd", "de", "fghi", "bd", "cfh", "bcb", "gh", "dd", "efg", "hgfe"]
    (root / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in texts) + "\n{bad\n")
    command = [
        "prepare",
        str(root / "target"),
        "--prompts",
        str(root / "prompts.jsonl"),
        "--output",
        str(root / "data"),
    ]
    options = [
        "--max-new-tokens",
        "10",
        "--mask-token-id",
        str(MASK),
        "--features",
        "--layers",
        "1,3",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, [*command, *options], input="y\n")
    assert result.exit_code == 0, result.output
    assert "take 0.00 GB" in result.output and "domino train" in result.output
    return root


def recipe_for(prepared, folder, **values) -> str:
    small = {"block_size": 4, "num_hidden_layers": 1, "target_layer_ids": [1, 3], "mask_token_id": MASK}
    return write(
        folder,
        **{
            "target": str(prepared / "target"),
            "dataset": str(prepared / "data"),
            "draft": {**small, "gru_hidden_dim": 8, "emb_dim": 4},
            "use_cpu": True,
            "max_steps": 6,
            "save_steps": 3,
            "logging_steps": 1,
            "num_anchors": 4,
            "per_device_train_batch_size": 2,
            "report_to": [],
            **values,
        },
    )


def losses(folder) -> list[float]:
    state = json.loads((folder / "out" / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def test_prepare_train_resume_generate(prepared, tmp_path):
    """A run cut off after its checkpoint at step 3 and resumed gives the draft of a run that was left alone."""
    run = CliRunner().invoke
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = run(app, ["train", recipe_for(prepared, tmp_path / "whole")])
    assert whole.exit_code == 0, whole.output
    cut = recipe_for(prepared, tmp_path / "cut")
    assert "has no checkpoint" in run(app, ["train", cut, "--resume"]).output
    original, calls = DominoForSpeculativeDraft.backbone, []

    def dies(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    DominoForSpeculativeDraft.backbone = dies
    try:
        run(app, ["train", cut])
    finally:
        DominoForSpeculativeDraft.backbone = original
    assert not (tmp_path / "cut" / "out" / "config.json").exists()
    resumed = run(app, ["train", cut, "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole") and len(losses(tmp_path / "cut")) == 6
    drafts = [(tmp_path / name / "out" / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert drafts[0] == drafts[1]
    target, draft = str(prepared / "target"), str(tmp_path / "cut" / "out")
    text = run(app, ["generate", target, "--draft", draft, "--prompt", "bcd", "--device", "cpu"])
    assert text.exit_code == 0 and "τ = " in text.output, text.output


def test_accelerate_launches_two_processes_that_train_as_one(prepared, tmp_path):
    paths = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        options = {"optim": "sgd", "learning_rate": 0.01, "max_steps": 3}
        paths.append(recipe_for(prepared, folder, **options, per_device_train_batch_size=2 // processes))
    alone = CliRunner().invoke(app, ["train", paths[0]])
    assert alone.exit_code == 0, alone.output
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    result = subprocess.run(
        [*launcher, "--main_process_port", str(free_port()), "-m", "modeling_domino.cli", "train", paths[1]],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(one) == 3 and two == pytest.approx(one, rel=1e-4)


def test_cached_features_train_as_the_target_itself_does(prepared, tmp_path):
    seen = []
    for features in ("always", "never"):
        (tmp_path / features).mkdir()
        path = recipe_for(prepared, tmp_path / features, features=features)
        result = CliRunner().invoke(app, ["train", path])
        assert result.exit_code == 0, result.output
        seen.append(losses(tmp_path / features))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)


def test_a_share_held_out_is_not_trained_on(prepared, tmp_path):
    recipe, arguments = read_recipe(recipe_for(prepared, tmp_path, eval_share=0.2))
    trainer = build_trainer(recipe, arguments, speaker(), chat_tokenizer())
    training, held_out = ({row["id"] for row in rows} for rows in (trainer.train_dataset, trainer.eval_dataset))
    assert len(held_out) == 2 and not training & held_out


def test_training_goes_on_from_another_draft(prepared, tmp_path):
    recipe, arguments = read_recipe(recipe_for(prepared, tmp_path))
    first = build_trainer(recipe, arguments, speaker(), chat_tokenizer()).model
    first.save_pretrained(tmp_path / "first")
    path = recipe_for(prepared, tmp_path, draft={}, init_from=str(tmp_path / "first"))
    second = build_trainer(*read_recipe(path), speaker(), chat_tokenizer()).model
    assert (first.fc.weight == second.fc.weight).all() and second.dtype == first.dtype
    assert second.config.block_size == first.config.block_size == 4
    longer = build_trainer(*read_recipe(path, ["--draft.block_size", "7"]), speaker(), chat_tokenizer())
    assert (first.fc.weight == longer.model.fc.weight).all() and longer.model.config.block_size == 7
    longer.save_model(str(tmp_path / "longer"))
    assert DominoForSpeculativeDraft.from_pretrained(tmp_path / "longer").config.block_size == 7


def test_an_autoregressive_baseline_is_trained_from_the_same_data(prepared, tmp_path):
    """And goes on from its checkpoint as if it had not been stopped; its layer may start as the target's."""
    shape = {"block_size": 4, "target_layer_ids": [1, 3], "mask_token_id": MASK}
    taught = {"architecture": "eagle", "draft": shape, "layers_from": [4]}
    path = recipe_for(prepared, tmp_path, output_dir=str(tmp_path / "out"), **taught)
    done = CliRunner().invoke(app, ["train", path])
    assert done.exit_code == 0, done.output
    assert f"--methods eagle --eagle {tmp_path / 'out'}" in done.output
    whole = EagleForSpeculativeDraft.from_pretrained(tmp_path / "out").state_dict()
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "out" / "checkpoint-6")
    assert CliRunner().invoke(app, ["train", path, "--resume"]).exit_code == 0
    again = EagleForSpeculativeDraft.from_pretrained(tmp_path / "out").state_dict()
    assert losses(tmp_path) == expected
    assert all((whole[name] == again[name]).all() for name in whole)

    target = make_target("qwen3", num_hidden_layers=5)
    path = recipe_for(prepared, tmp_path, features="never", **taught)
    layer = build_trainer(*read_recipe(path), target, chat_tokenizer()).model.layers[0]
    theirs = target.model.layers[4].state_dict()
    for name, weight in layer.state_dict().items():
        if weight.ndim == 2 and weight.shape[1] == 64:  # reads [embedding ; hidden state]
            assert (weight[:, :32] == 0).all() and (weight[:, 32:] == theirs[name]).all(), name
        elif not name.startswith("embed_layernorm"):
            assert (weight == theirs[name]).all(), name
    with pytest.raises(ValueError, match="`architecture` is 'medusa', expected one of domino, eagle"):
        read_recipe(path, ["--architecture", "medusa"])


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_layers_start_from_the_targets(kind, prepared, tmp_path):
    """What a layer computes is then the target layer's, but for the norms of queries and keys that only Qwen3 has."""
    target = make_target(kind, num_hidden_layers=5)
    shape = {"block_size": 4, "num_hidden_layers": 2, "target_layer_ids": [1, 3], "mask_token_id": MASK}
    path = recipe_for(prepared, tmp_path, draft=shape, layers_from=[0, 4], features="never")
    draft = build_trainer(*read_recipe(path), target, chat_tokenizer()).model
    for layer, layer_id in zip(draft.layers, (0, 4), strict=True):
        theirs = target.model.layers[layer_id]
        for name, weight in theirs.state_dict().items():
            assert (layer.state_dict()[name] == weight).all(), name
        if kind == "llama":
            states = theirs.input_layernorm(torch.randn(500, target.config.hidden_size))
            for part in ("q", "k"):
                size = getattr(theirs.self_attn, f"{part}_proj")(states).square().mean().sqrt().item()
                norm = getattr(layer.self_attn, f"{part}_norm").weight
                assert norm.tolist() == pytest.approx([size] * len(norm), rel=0.1)
    assert (draft.norm.weight == target.model.norm.weight).all()
    assert len(draft.layers) == 2


@pytest.mark.parametrize(
    ("kind", "layers_from", "draft", "words"),
    [
        ("llama", [1], {}, r"`layers_from` is \[1\], expected 2 ids .* from 0 to 4"),
        ("llama", [1, 5], {}, r"`layers_from` is \[1, 5\], expected 2 ids .* from 0 to 4"),
        (
            "llama",
            [1, 2],
            {"intermediate_size": 40},
            "layer 1 of LlamaForCausalLM, weight `mlp.gate_proj.weight` is of",
        ),
        ("gpt2", [1, 2], {}, "layer 1 of GPT2LMHeadModel, weight `self_attn.q_proj.weight` is missing"),
    ],
)
def test_layers_that_cannot_be_copied_are_named(kind, layers_from, draft, words, prepared, tmp_path):
    target = make_architecture("gpt2") if kind == "gpt2" else make_target(kind, num_hidden_layers=5)
    shape = {"block_size": 4, "num_hidden_layers": 2, "target_layer_ids": [1, 3], "mask_token_id": MASK, **draft}
    path = recipe_for(prepared, tmp_path, draft=shape, layers_from=layers_from, features="never")
    with pytest.raises(ValueError, match=words):
        build_trainer(*read_recipe(path), target, chat_tokenizer())


def test_missing_data_and_missing_features_say_what_to_run(prepared, tmp_path):
    path = recipe_for(prepared, tmp_path)
    nothing = CliRunner().invoke(app, ["train", path, "--dataset", str(tmp_path)])
    assert nothing.exit_code == 2 and "holds no prepared data" in nothing.output
    other = CliRunner().invoke(app, ["train", path, "--draft.target_layer_ids", "[1, 2]"])
    assert other.exit_code == 2 and "the draft taps [1, 2]" in other.output
