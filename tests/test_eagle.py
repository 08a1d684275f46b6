"""The EAGLE-3-style baseline: lossless, trained on what it will meet, and learnt by heart where that is possible."""

import pytest
import torch
from conftest import MASK, make_target
from huggingface_hub.errors import StrictDataclassClassValidationError
from test_training import arguments, rows
from transformers import AutoModel

from modeling_domino.anchors import Blocks
from modeling_domino.data import PackedRows
from modeling_domino.eagle import EagleConfig, EagleForSpeculativeDraft
from modeling_domino.eagle_training import EagleTrainer
from modeling_domino.statistics_domino import RoundRecorder


def make_eagle(target, seed: int = 1, **overrides) -> EagleForSpeculativeDraft:
    options = {"mask_token_id": MASK, "block_size": 4, **overrides}
    torch.manual_seed(seed)
    return EagleForSpeculativeDraft(EagleConfig.from_target(target.config, **options)).eval()


def generate(target, prompt, draft=None, **options):
    return target.generate(prompt, assistant_model=draft, **{"max_new_tokens": 30, "do_sample": False, **options})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_text_is_the_targets(kind, prompt):
    target = make_target(kind, seed=6)
    draft = make_eagle(target)
    assert generate(target, prompt, draft).tolist() == generate(target, prompt).tolist()
    assert draft.last_generation.path == "assisted"
    assert "EagleCandidateGenerator" in draft.last_generation.reason
    assert draft.last_generation.new_tokens == 30 and max(draft.last_generation.drafted_per_round) == 4


def test_it_may_sample_pad_stop_and_go_on_with_a_cache(target, prompt):
    draft = make_eagle(target)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), prompt], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 6])
    plain = generate(target, padded, attention_mask=mask)
    assert generate(target, padded, draft, attention_mask=mask).tolist() == plain.tolist()
    sampled = generate(target, prompt, draft, do_sample=True, top_k=1)
    assert sampled.tolist() == generate(target, prompt).tolist()
    end = int(plain[0, 9 + 4])
    stopped = generate(target, padded, draft, attention_mask=mask, eos_token_id=end)
    assert stopped.tolist() == generate(target, padded, attention_mask=mask, eos_token_id=end).tolist()
    first = generate(target, prompt, draft, max_new_tokens=8, return_dict_in_generate=True)
    longer = torch.cat([first.sequences, torch.tensor([[5, 6]])], dim=1)
    second = generate(target, longer, draft, cache=first.cache, max_new_tokens=8)
    assert second.tolist() == generate(target, longer, max_new_tokens=8).tolist()


def test_it_drafts_what_training_unrolls(target, prompt, monkeypatch):
    """Step by step with a cache, over several rounds, or all blocks at once: the same tokens."""
    draft = make_eagle(target)
    drafts, add = [], RoundRecorder.add
    monkeypatch.setattr(RoundRecorder, "add", lambda *args: (drafts.append(args[1]), add(*args)))
    text = generate(target, prompt, draft)[0].tolist()
    starts = [6]
    for gained in draft.last_generation.tokens_per_round:
        starts.append(starts[-1] + gained)
    full = [(start, ids) for start, ids in zip(starts, drafts, strict=False) if len(ids) == 4]
    assert len(full) > 3
    row = {"input_ids": text, "loss_mask": [1] * len(text)}
    trainer = EagleTrainer(draft, target, arguments("unused"), train_dataset=[row])
    batch = trainer.data_collator([row])
    anchors = torch.tensor([[start for start, _ in full]])
    blocks = torch.tensor([[[text[start], *ids[:-1]] for start, ids in full]])
    ids, documents = batch["input_ids"], batch["document_ids"]
    context = trainer._context_hidden_states(ids, documents)
    where = Blocks(anchors, blocks, blocks, torch.ones_like(blocks))
    inputs = trainer._draft_inputs(ids, documents, context, where)
    states = draft(prefix_embeds=trainer._embed(blocks), objective=lambda h, a, w2: h, **inputs)
    assert target.lm_head(states).argmax(dim=-1)[0].tolist() == [ids for _, ids in full]


def test_no_block_sees_its_own_text_or_another_document(tmp_path, target):
    draft = make_eagle(target).train()
    data = rows(4)
    options = {"num_anchors": 99, "loss_normalizer": "forward"}
    trainer = EagleTrainer(draft, target, arguments(tmp_path, **options), train_dataset=data)
    alone = trainer.compute_loss(draft, trainer.data_collator(data))
    packed = trainer.compute_loss(draft, trainer.data_collator([PackedRows(data, 200)[0]]))
    torch.testing.assert_close(alone, packed)
    early = [{**row, "loss_mask": [0] * 5 + [1] * 4 + [0] * (len(row["loss_mask"]) - 9)} for row in data]
    later = [{**row, "input_ids": row["input_ids"][:9] + [7] * (len(row["input_ids"]) - 9)} for row in early]
    one, other = (trainer.compute_loss(draft, trainer.data_collator(r)) for r in (early, later))
    # Anchors differ by their seed, which reads the row: all eligible ones are taken, so the sums agree.
    torch.testing.assert_close(one, other)


def test_a_draft_that_fits_four_texts_is_accepted_whole(tmp_path, target):
    torch.manual_seed(7)
    data = []
    for _ in range(4):
        text = target.generate(torch.randint(3, MASK, (1, 6)), max_new_tokens=25, do_sample=False)[0].tolist()
        data.append({"input_ids": text, "loss_mask": [0] * 6 + [1] * 25})
    draft = make_eagle(target)
    options = {"max_steps": 120, "per_device_train_batch_size": 4, "num_anchors": 99, "learning_rate": 1e-2}
    trainer = EagleTrainer(draft, target, arguments(tmp_path, loss_decay_gamma=None, **options), train_dataset=data)
    trainer.train()
    draft.eval()
    for row in data:
        target.generate(
            torch.tensor([row["input_ids"][:6]]), assistant_model=draft, max_new_tokens=21, do_sample=False
        )
        assert draft.last_generation.tokens_per_round == (5, 5, 5, 5)


def test_it_is_saved_and_loaded_as_what_it_is(tmp_path, target, prompt):
    draft = make_eagle(target)
    draft.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    for loaded in (EagleForSpeculativeDraft.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        generate(target, prompt, loaded)
        assert type(loaded) is EagleForSpeculativeDraft
        rounds = loaded.last_generation.tokens_per_round
        generate(target, prompt, draft)
        assert rounds == draft.last_generation.tokens_per_round


def test_it_has_one_layer_and_taps_a_low_a_middle_and_a_high_one():
    assert EagleConfig(mask_token_id=5, num_target_layers=36).target_layer_ids == [2, 18, 33]
    assert EagleConfig(mask_token_id=5, num_target_layers=4).target_layer_ids == [1, 2]
    with pytest.raises(StrictDataclassClassValidationError, match="an EAGLE-3-style draft has one layer"):
        EagleConfig(mask_token_id=5, num_hidden_layers=2)


def test_training_time_test_is_not_an_option(tmp_path, target):
    with pytest.raises(ValueError, match="always unrolled on its own hidden states"):
        EagleTrainer(make_eagle(target), target, arguments(tmp_path, training_time_test=True), train_dataset=rows())
