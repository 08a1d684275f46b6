"""Warm starts: a DFlash draft becomes the start of a Domino training, and a draft is re-fitted to another target."""

import published
import pytest
import torch
from conftest import MASK, make_draft, make_target
from published import HEAD, logits, write_folder
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from modeling_domino import DominoForSpeculativeDraft, DominoTrainer, DominoTrainingArguments
from modeling_domino.conversion import convert


W2 = "embed_proj.2.weight"


def save_target(folder, words: list[str], seed: int = 6, **overrides):
    """A target whose tokenizer has these words, one id each; further rows are padding."""
    target = make_target(seed=seed, **overrides)
    target.save_pretrained(folder)
    vocabulary = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(folder)
    return target


LETTERS = [chr(ord("a") + i) for i in range(23)]  # 23 of 24 rows


@pytest.fixture
def plain(tmp_path):
    """A DFlash draft without a head, as published."""
    draft = make_draft(make_target(seed=6), shift_label=False)
    return draft, str(write_folder(tmp_path / "z-lab", *published.z_lab(draft)))


def load(folder) -> DominoForSpeculativeDraft:
    return DominoForSpeculativeDraft.from_pretrained(folder)


def test_a_fresh_head_is_neutral_whole_and_repeatable(plain, tmp_path):
    draft, folder = plain
    notes = convert(folder, tmp_path / "start", to="domino", fresh_head=True, gru_hidden_dim=16, emb_dim=8)
    assert notes == [f"Initialised a neutral head (G 16, R 8): {', '.join(sorted(HEAD))}."]
    start = load(tmp_path / "start")
    assert start.head_enabled and not start.config.shift_label
    assert (start.config.gru_hidden_dim, start.config.emb_dim) == (16, 8)
    with draft.head_disabled():
        assert torch.equal(logits(start), logits(draft))
    tensors = start.state_dict()
    assert not tensors[W2].any() and all(tensors[name].abs().max() > 0 for name in HEAD[:3])
    bound = 16**-0.5
    for name in HEAD[:2]:  # uniform, as in a new draft
        assert tensors[name].abs().max() <= bound and tensors[name].abs().mean() == pytest.approx(bound / 2, rel=0.2)
    options = {"to": "domino", "fresh_head": True, "gru_hidden_dim": 16, "emb_dim": 8}
    for name, seed in (("same", 0), ("other", 1)):
        convert(folder, tmp_path / name, seed=seed, **options)
    same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "other"))
    assert all(torch.equal(same[name], tensor) for name, tensor in tensors.items())
    assert not torch.equal(other[HEAD[0]], tensors[HEAD[0]])
    default = convert(folder, tmp_path / "default", to="domino", fresh_head=True)
    assert "(G 1024, R 256)" in default[0]  # the paper's


@pytest.mark.parametrize("form", ["fresh head", "as it is"])
def test_a_dflash_draft_trains_as_a_domino_draft(form, plain, tmp_path):
    _, folder = plain
    if form == "fresh head":
        convert(folder, tmp_path / "start", to="domino", fresh_head=True, gru_hidden_dim=16, emb_dim=8)
        folder = tmp_path / "start"
    draft = load(folder)
    rows = [{"input_ids": list(range(3, 20)), "loss_mask": [0] * 4 + [1] * 13}] * 2
    arguments = DominoTrainingArguments(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        max_steps=3,
        num_anchors=8,
        lambda_base_start=0.5,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DominoTrainer(draft, make_target(seed=6), arguments, train_dataset=rows)
    assert draft.head_enabled
    trainer.train()
    trainer.save_model()
    trained = load(tmp_path / "out")
    assert trained.head_enabled and trained.embed_proj[2].weight.any()


def test_a_target_that_fits_changes_nothing(tmp_path):
    save_target(tmp_path / "target", LETTERS)
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "draft")
    notes = convert(str(tmp_path / "draft"), tmp_path / "new", to="domino", target=str(tmp_path / "target"))
    assert notes == [f"All weights fit {tmp_path / 'target'} as they are."]
    assert torch.equal(logits(load(tmp_path / "new")), logits(draft))


def test_rows_of_the_head_follow_the_strings_of_their_tokens(tmp_path):
    """The new target has the old one's words in another order, some new ones, and other padding."""
    save_target(tmp_path / "old", LETTERS)
    words = ["new0", *reversed(LETTERS[3:]), "new1"]
    save_target(tmp_path / "new", words, seed=5, vocab_size=32)
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "draft")
    source = str(tmp_path / "draft")
    with pytest.raises(ValueError, match="rows for 24 tokens and .* has 32: name the target.*`--old-target`"):
        convert(source, tmp_path / "refitted", to="domino", target=str(tmp_path / "new"))
    notes = convert(
        source,
        tmp_path / "refitted",
        to="domino",
        target=str(tmp_path / "new"),
        old_target=str(tmp_path / "old"),
    )
    assert f"Rows of {W2} moved to tokens of the same string: 20 of 32; the others start at zero." in notes
    assert "`mask_token_id` 23 became 22, a row that no token uses." in notes
    before, after = draft.state_dict(), load(tmp_path / "refitted").state_dict()
    for i in range(32):
        word = words[i] if i < len(words) else None
        expected = before[W2][LETTERS.index(word)] if word in LETTERS else torch.zeros(8)
        assert torch.equal(after[W2][i], expected), (i, word)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != W2)
    config = load(tmp_path / "refitted").config
    assert (config.vocab_size, config.mask_token_id) == (32, 22)


def test_a_mask_token_that_the_new_target_uses_is_replaced(tmp_path):
    save_target(tmp_path / "new", LETTERS[:20], eos_token_id=MASK)
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "draft")
    notes = convert(str(tmp_path / "draft"), tmp_path / "refitted", to="domino", target=str(tmp_path / "new"))
    assert f"`mask_token_id` {MASK} became 20, a row that no token uses." in notes
    assert load(tmp_path / "refitted").config.mask_token_id == 20


def test_taps_move_to_the_same_depth_with_their_columns(tmp_path):
    target = save_target(tmp_path / "old", LETTERS, num_hidden_layers=9)
    save_target(tmp_path / "new", LETTERS, num_hidden_layers=17)
    draft = make_draft(target, target_layer_ids=[1, 4, 7])
    draft.save_pretrained(tmp_path / "draft")
    notes = convert(str(tmp_path / "draft"), tmp_path / "new-draft", to="domino", target=str(tmp_path / "new"))
    refitted = load(tmp_path / "new-draft")
    assert (refitted.config.num_target_layers, refitted.config.target_layer_ids) == (17, [1, 8, 14])
    assert notes == [
        "Columns of fc.weight moved to the taps of the same depth: layer 1 to 1, layer 4 to 8, layer 7 to 14."
    ]
    assert torch.equal(refitted.fc.weight, draft.fc.weight)
    save_target(tmp_path / "shallow", LETTERS, num_hidden_layers=4)
    convert(str(tmp_path / "draft"), tmp_path / "shallow-draft", to="domino", target=str(tmp_path / "shallow"))
    shallow = load(tmp_path / "shallow-draft")
    assert shallow.config.target_layer_ids == [1]
    old = draft.fc.weight.split(32, dim=1)
    assert torch.equal(shallow.fc.weight, old[1])  # depth 1 of 3 is nearest to 4 of 8, not to 1 of 8


def test_another_width_keeps_what_has_no_width_and_lists_the_rest(tmp_path):
    save_target(tmp_path / "new", LETTERS, hidden_size=48, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    draft = make_draft(make_target(seed=6))
    draft.save_pretrained(tmp_path / "draft")
    notes = convert(str(tmp_path / "draft"), tmp_path / "wide", to="domino", target=str(tmp_path / "new"))
    wide = load(tmp_path / "wide")
    assert wide.config.hidden_size == 48 and wide.config.rope_parameters["rope_theta"] == 5e5
    assert "Rope base 10000 became 500000, the target's." in notes
    [listed] = [note for note in notes if note.startswith("Initialised anew, since the shapes differ: ")]
    before, after = draft.state_dict(), wide.state_dict()
    for name, tensor in before.items():
        if tensor.shape == after[name].shape:
            assert torch.equal(tensor, after[name]) and f" {name}" not in listed, name
        else:
            assert f"{name}," in listed or f"{name}." in listed
            assert after[name].isfinite().all() and after[name].any(), name
    assert torch.equal(after[W2], before[W2]) and torch.equal(after[HEAD[1]], before[HEAD[1]])


def test_a_speculators_draft_is_refitted_from_the_target_that_it_names(tmp_path):
    old = save_target(tmp_path / "old", LETTERS)
    save_target(tmp_path / "new", LETTERS, num_hidden_layers=9)
    draft = make_draft(old)
    folder = write_folder(tmp_path / "speculators", *published.speculators_domino(draft, old, str(tmp_path / "old")))
    convert(str(folder), tmp_path / "refitted", to="domino", target=str(tmp_path / "new"))
    config = load(tmp_path / "refitted").config
    assert draft.config.target_layer_ids == [1, 2]
    assert (config.num_target_layers, config.target_layer_ids) == (9, [1, 6])
    assert config.mask_token_id == MASK
