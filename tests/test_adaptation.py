"""LoRA on a draft: what peft offers works in training and decoding alike, and an adapter is what its file says."""

import copy
import json

import peft
import pytest
import torch
from conftest import MASK, make_draft, make_target
from safetensors.torch import load_file, save_file
from test_data import chat_tokenizer
from test_training import arguments, rows
from typer.testing import CliRunner

from modeling_domino import DominoForSpeculativeDraft, DominoTrainer
from modeling_domino.adaptation import HEAD, PRESETS, load_adapter, lora_config
from modeling_domino.cli import app


def randomised(model, seed: int = 9, std: float = 0.3):
    """An adapter that changes something: peft starts B at zero."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return model.eval()


def adapted(draft, preset: str = "head", **options):
    return randomised(peft.get_peft_model(copy.deepcopy(draft), lora_config(preset, r=4, **options)))


def rounds(target, prompt, draft) -> list[tuple]:
    """What a draft proposes, round by round, for an unchanged text."""
    seen = []
    base = draft.get_base_model() if isinstance(draft, peft.PeftModel) else draft
    generator = base.candidate_generator

    class Recording(generator):
        def _candidates(self, *args):
            ids, law = super()._candidates(*args)
            seen.append(tuple(self.drafted))
            return ids, law

    base.candidate_generator = Recording
    options = {"max_new_tokens": 20, "do_sample": False}
    text = target.generate(prompt, assistant_model=draft, **options)
    del base.candidate_generator
    assert text.tolist() == target.generate(prompt, **options).tolist()
    return seen


def test_a_fresh_adapter_changes_nothing(target, draft, prompt):
    for preset in PRESETS:
        model = peft.get_peft_model(copy.deepcopy(draft), lora_config(preset))
        assert rounds(target, prompt, model) == rounds(target, prompt, draft), preset


def test_the_grus_adapter_alone_changes_drafts(target, draft, prompt):
    model = adapted(draft)
    with_gru = rounds(target, prompt, model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and "prefix_gru" in name:
            torch.nn.init.zeros_(parameter)
    assert rounds(target, prompt, model) != with_gru


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_equals_unmerged_and_has_the_original_names(target, draft, prompt, tmp_path, preset, dtype):
    model = adapted(draft.to(dtype), preset)
    unmerged = model.get_base_model().head_weights()
    proposed = rounds(target, prompt, model)
    merged = model.merge_and_unload()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, two in zip(unmerged, merged.head_weights(), strict=True):
        torch.testing.assert_close(one, two, atol=tolerance, rtol=tolerance)
    if dtype == torch.float32:
        assert rounds(target, prompt, merged) == proposed
    merged.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == set(draft.state_dict())
    assert not list(tmp_path.glob("adapter*"))
    assert DominoForSpeculativeDraft.from_pretrained(tmp_path).dtype == dtype


def test_two_adapters_switch_per_call(target, draft, prompt):
    model = adapted(draft)
    model.add_adapter("other", lora_config(r=4))
    first = rounds(target, prompt, model)
    model.set_adapter("other")
    randomised(model, seed=3)
    other = rounds(target, prompt, model)
    assert other != rounds(target, prompt, draft)
    model.set_adapter("default")
    assert rounds(target, prompt, model) != other
    with model.disable_adapter():
        assert rounds(target, prompt, model) == rounds(target, prompt, draft)
    assert len(first) > 0


def test_an_adapter_goes_through_a_folder(target, draft, prompt, tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        randomised(adapted(draft), seed=seed).save_pretrained(tmp_path / name)
    expected = {name: rounds(target, prompt, load_adapter(copy.deepcopy(draft), tmp_path / name)) for name in "ab"}
    assert expected["a"] != expected["b"]
    both = load_adapter(copy.deepcopy(draft), tmp_path / "a", name="a")
    assert load_adapter(both, tmp_path / "b", name="b") is both
    assert rounds(target, prompt, both) == expected["b"]
    both.set_adapter("a")
    assert rounds(target, prompt, both) == expected["a"]
    plain = peft.PeftModel.from_pretrained(copy.deepcopy(draft), str(tmp_path / "a"))
    assert rounds(target, prompt, plain) == expected["a"]


def test_no_tensor_of_an_adapter_is_dropped(draft, tmp_path):
    adapted(draft).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if "prefix_gru" in n)
    renamed = {("x." + n if n == name else n): tensor for n, tensor in tensors.items()}
    for wrong in (
        renamed,
        {**tensors, "x.lora_A.weight": tensors[name].clone()},
        {n: t for n, t in tensors.items() if n != name},
    ):
        save_file(wrong, file)
        with pytest.raises(ValueError, match="is not an adapter of this draft: missing tensors"):
            load_adapter(copy.deepcopy(draft), tmp_path)


def test_an_adapter_of_another_draft_is_refused_by_shape(target, draft, tmp_path):
    adapted(draft).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"adapter of another draft: size mismatch for .*embed_proj\.0.*\[8, 4\].*\[6, 4\]"
    ):
        load_adapter(make_draft(target, emb_dim=6), tmp_path)


def test_injected_adapters_decode_too(target, draft, prompt):
    injected = copy.deepcopy(draft)
    peft.inject_adapter_in_model(lora_config(r=4), injected)
    assert rounds(target, prompt, injected) == rounds(target, prompt, draft)
    assert rounds(target, prompt, randomised(injected)) != rounds(target, prompt, draft)


def test_transformers_own_adapter_mixin_where_it_accepts_this_peft(target, draft, prompt):
    try:
        draft.add_adapter(lora_config(r=4))
    except ValueError as error:
        assert "not compatible" in str(error)
        pytest.skip(f"transformers refuses the installed peft: {error}")
    assert len(rounds(target, prompt, draft)) > 0


@pytest.mark.parametrize("option", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_what_peft_cannot_do_to_the_gru_is_said(draft, option):
    for preset in ("head", "head+backbone"):
        with pytest.raises(ValueError, match=r'modules_to_save=\["prefix_gru"\]'):
            lora_config(preset, **option)
    lora_config("all-linear", **option)
    config = lora_config("head", modules_to_save=["prefix_gru"], **option)
    model = peft.get_peft_model(draft, config)
    with torch.no_grad():
        model.prefix_gru.modules_to_save.default.weight_hh_l0.add_(1.0)
    folded = model.eval().get_base_model().head_weights()
    assert (folded.gru_hidden == model.prefix_gru.modules_to_save.default.weight_hh_l0).all()


def test_presets_are_what_they_say(draft):
    taught = {}
    for preset in PRESETS:
        model = peft.get_peft_model(copy.deepcopy(draft), lora_config(preset))
        taught[preset] = {n.split(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert len(taught["head"]) == 4 and all("embed_proj" in n or "prefix_gru" in n for n in taught["head"])
    layers = len(draft.layers)
    assert len(taught["head+backbone"]) == 4 + 1 + 7 * layers
    assert len(taught["all-linear"]) == len(HEAD) + 1 + 7 * layers
    with pytest.raises(ValueError, match="`everything` is no preset, expected one of head, head"):
        lora_config("everything")
    with pytest.raises(ValueError, match="not found in the base model"):
        peft.get_peft_model(copy.deepcopy(draft), lora_config(target_modules=["q_projection"], target_parameters=None))


def test_the_trainer_teaches_and_saves_the_adapter_alone_and_goes_on_with_it(target, draft, tmp_path):
    """Resumed from its checkpoint, a training gives the adapter of one that was left alone."""
    frozen = {name: tensor.clone() for name, tensor in draft.state_dict().items()}

    def train(steps: int, resume=None):
        torch.manual_seed(0)  # of the adapter's A
        model = peft.get_peft_model(copy.deepcopy(draft), lora_config(r=4))
        options = {"lambda_base_start": 0.0, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3}
        args = arguments(tmp_path / "out", max_steps=6, **options)
        trainer = DominoTrainer(model, target, args, train_dataset=rows())
        if steps == 6 or resume:
            trainer.train(resume_from_checkpoint=resume)
        return trainer, model

    trainer, model = train(6)
    trainer.save_model(str(tmp_path / "adapter"))
    whole = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = [name for name, tensor in whole.items() if "lora_B" in name and tensor.abs().sum() > 0]
    assert len(moved) == 4  # both of the GRU too
    assert not (tmp_path / "out" / "checkpoint-3" / "model.safetensors").exists()
    size = sum(path.stat().st_size for path in (tmp_path / "adapter").glob("*.safetensors"))
    assert size < 60_000
    for name, tensor in model.get_base_model().state_dict().items():
        plain = name.replace(".base_layer", "")
        if plain in frozen:
            assert (tensor == frozen[plain]).all(), name
    _, again = train(3, resume=str(tmp_path / "out" / "checkpoint-3"))
    again.save_pretrained(tmp_path / "again")
    resumed = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, msg=name)


def test_an_adapter_for_another_target_is_warned_of(draft, target, tmp_path, caplog):
    model = peft.get_peft_model(copy.deepcopy(draft), lora_config(r=4))
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    trainer = DominoTrainer(model, target, args, train_dataset=rows())
    trainer.save_model(str(tmp_path))
    load_adapter(copy.deepcopy(draft), tmp_path, target=target)
    assert "acceptance" not in caplog.text
    load_adapter(copy.deepcopy(draft), tmp_path, target=make_target(seed=3))
    assert "acceptance may be low" in caplog.text


def test_adapting_teaches_a_draft_its_new_target(tmp_path):
    """A draft made for nothing, and a target whose answers it can learn by heart: τ rises, and the command says so."""
    target = make_target(seed=6, eos_token_id=22)
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    torch.manual_seed(1)
    DominoForSpeculativeDraft(make_draft(target).config).save_pretrained(tmp_path / "draft")
    texts = ["ab", "bc", "cd", "de"]
    lines = [json.dumps({"turns": [text]}) + "\n" for text in texts * 4]  # held out are the same prompts
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    command = ["adapt", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--device", "cpu"]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out"), "--dtype", "float32"]
    command += [
        "--eval-prompts",
        "4",
        "--max-new-tokens",
        "16",
        "--learning-rate",
        "2e-2",
        "--preset",
        "head+backbone",
    ]
    done = CliRunner().invoke(app, [*command, "--steps", "60", "--lambda-base-start", "0.5"])
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["gain"][0] > 1.2 and "times that of before" in done.output
    assert results["prompts"] == 12
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft" in card and "| adapted |" in card
    draft = DominoForSpeculativeDraft.from_pretrained(tmp_path / "draft")
    assert load_adapter(draft, tmp_path / "out", target=target).peft_config["default"].r == 16

    options = ["--reference", str(tmp_path / "target"), "--output", str(tmp_path / "again")]
    kept = CliRunner().invoke(app, [*command, *options])
    assert kept.exit_code == 0 and "nothing was trained" in kept.output
    assert not (tmp_path / "again" / "data").exists()
    few = CliRunner().invoke(app, [*command, "--eval-prompts", "16"])
    assert few.exit_code == 2 and "16 would be held out" in few.stderr
    wrong = CliRunner().invoke(app, [*command, "--preset", "tail"])
    assert wrong.exit_code == 2 and "`tail` is no preset" in wrong.stderr
    other = make_target(seed=6, hidden_size=64)
    make_draft(other, mask_token_id=MASK).save_pretrained(tmp_path / "wide")
    misfit = CliRunner().invoke(app, [*command[:3], str(tmp_path / "wide"), *command[4:]])
    assert misfit.exit_code == 2 and "hidden size is 64, the target's 32" in misfit.stderr
