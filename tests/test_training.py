"""Training: geometry and losses in integers, curriculum end points, and a real Trainer that teaches a draft its target."""

import math

import pytest
import torch
from conftest import MASK, make_draft, make_target, make_tokenizer

from modeling_domino import DominoForSpeculativeDraft, DominoTrainer, DominoTrainingArguments
from modeling_domino.anchors import block_attention_mask, build_blocks, sample_anchors
from modeling_domino.data import regenerate
from modeling_domino.losses import lambda_base, position_weights, sample_vocabulary, two_term_loss
from modeling_domino.training import BlockCollator


def rows(count: int = 6, length: int = 20) -> list[dict]:
    torch.manual_seed(3)
    return [
        {"input_ids": torch.randint(3, MASK, (length - i,)).tolist(), "loss_mask": [0] * 5 + [1] * (length - i - 5)}
        for i in range(count)
    ]


def arguments(tmp_path, **overrides) -> DominoTrainingArguments:
    small = {"num_anchors": 8, "max_steps": 4, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    return DominoTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, **{**small, "per_device_train_batch_size": 2, **overrides}
    )


def test_anchors_have_a_supervised_token_and_a_supervised_next_one():
    loss_mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    generator = torch.Generator().manual_seed(0)
    assert sample_anchors(loss_mask, 99, generator).tolist() == [3, 4]  # 0 has no context before it
    drawn = {tuple(sample_anchors(loss_mask, 1, generator).tolist()) for _ in range(20)}
    assert drawn == {(3,), (4,)}


def test_blocks_in_integers():
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    anchors = [torch.tensor([2, 4]), torch.tensor([1])]
    blocks = build_blocks(input_ids, loss_mask, anchors, 3, torch.tensor([4.0, 2.0, 1.0]))
    assert blocks.anchors.tolist() == [[2, 4], [1, 0]]
    assert blocks.prefix_ids[0].tolist() == [[12, 13, 14], [14, 15, 15]]
    assert blocks.labels[0, 0].tolist() == [13, 14, 15] and blocks.labels[0, 1, 0] == 15
    # The last block of row 0 runs out of the row, that of row 1 into padding; the second of row 1 does not exist.
    assert blocks.weights.tolist() == [[[4, 2, 1], [4, 0, 0]], [[4, 2, 0], [0, 0, 0]]]


def test_blocks_see_context_strictly_before_their_anchor_and_only_themselves():
    mask = block_attention_mask(torch.tensor([[2, 3]]), torch.tensor([[0, 1, 1, 1]]), 2)[0, 0].int().tolist()
    assert mask == [[0, 1, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 1, 1, 0, 0, 0, 1, 1]] * 2


def test_future_tokens_do_not_reach_a_block():
    """Changing everything after the anchor changes no logits but through the head's own teacher-forced prefix."""
    draft = make_draft(make_target(), pure_draft_prefix_len=4)
    context, noise = torch.randn(1, 9, 64), torch.randn(1, 1, 5, 32)
    changed = context.clone()
    changed[:, 4:] += 1.0
    mask = {"full_attention": block_attention_mask(torch.tensor([[4]]), torch.ones(1, 9), 5)}
    positions = torch.cat([torch.arange(9), 4 + torch.arange(5)])[None]
    with torch.no_grad():
        first, second = (draft.backbone(noise, c, positions, attention_mask=mask) for c in (context, changed))
    assert torch.equal(first, second)


def test_position_weights_are_the_published_ones():
    expected = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368]
    assert position_weights(16, 7.0)[:8].tolist() == pytest.approx(expected, abs=5e-4)
    assert position_weights(3, None).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("step", "ratio", "expected"), [(0, 1.0, 1.0), (50, 1.0, 0.5), (100, 1.0, 0.0), (25, 0.5, 0.5), (50, 0.5, 0.0)]
)
def test_curriculum_falls_linearly_over_its_share_of_the_steps(step, ratio, expected):
    assert lambda_base(step, 100, 1.0, ratio) == expected


def test_two_term_loss_is_the_weighted_mean_of_both_cross_entropies():
    torch.manual_seed(0)
    base, final, labels = torch.randn(1, 2, 3, 7), torch.randn(1, 2, 3, 7), torch.randint(0, 7, (1, 2, 3))
    weights = torch.tensor([[[1.0, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    loss, base_loss, final_loss = two_term_loss(base, final, labels, weights, 0.25, weights.sum())

    def by_hand(scores):
        picked = scores.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        return float(-(picked * weights).sum() / 2.5)

    assert float(base_loss) == pytest.approx(by_hand(base)) and float(final_loss) == pytest.approx(by_hand(final))
    assert float(loss) == pytest.approx(0.75 * by_hand(final) + 0.25 * by_hand(base))


def test_sampled_softmax_estimates_the_full_one():
    torch.manual_seed(0)
    labels, scores = torch.tensor([[5, 9], [5, 700]]), torch.randn(4, 1000)
    full = scores.logsumexp(-1)
    generator, estimates = torch.Generator().manual_seed(0), []
    for _ in range(200):
        ids, offset = sample_vocabulary(labels, 1000, 100, generator)
        assert ids.tolist() == sorted(set(ids.tolist())) and {5, 9, 700} <= set(ids.tolist()) and len(ids) == 103
        assert offset.unique().tolist() == pytest.approx([0.0, math.log(997 / 100)])
        estimates.append((scores[:, ids] + offset).exp().sum(-1))
    # Unbiased in the partition function; 200 draws of 100 of 997 terms leave about 1 %.
    assert torch.stack(estimates).mean(0).log().tolist() == pytest.approx(full.tolist(), abs=0.03)
    ids, offset = sample_vocabulary(labels, 1000, 5000, generator)
    assert ids.tolist() == list(range(1000)) and offset.abs().max() == 0


def test_head_has_no_gradient_at_lambda_one_and_one_as_it_falls(tmp_path):
    target = make_target()
    draft = make_draft(target)
    trainer = DominoTrainer(draft, target, arguments(tmp_path), train_dataset=rows())
    batch = trainer.data_collator(rows())
    trainer.state.max_steps = 10
    for step, learns in ((0, False), (1, True), (10, True)):
        trainer.state.global_step = step
        draft.zero_grad()
        trainer.compute_loss(draft, batch).backward()
        for name in ("embed_proj.0.weight", "embed_proj.2.weight", "prefix_gru.weight_ih_l0"):
            assert bool(draft.get_parameter(name).grad.abs().sum() > 0) == learns, (step, name)
    assert all(parameter.grad is None for parameter in target.parameters())


def test_accumulated_micro_batches_give_the_update_of_one_batch(tmp_path):
    """The normaliser spans the optimizer step, although micro-batches have different weight sums."""
    gradients = []
    for size, accumulation in ((4, 1), (1, 4)):
        target = make_target()
        draft = make_draft(target)
        args = arguments(tmp_path, per_device_train_batch_size=size, num_anchors=99, max_steps=1)
        args.gradient_accumulation_steps = accumulation
        args.max_grad_norm, args.learning_rate, args.optim, args.warmup_steps = 0.0, 1.0, "sgd", 0
        before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
        DominoTrainer(draft, target, args, train_dataset=rows(4)).train()
        gradients.append({name: before[name] - parameter.detach() for name, parameter in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=2e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("shift_label", [True, False])
def test_trained_draft_is_accepted_by_its_target(tmp_path, shift_label):
    """Overfits one text in both alignments: what training teaches is what decoding asks for, position by position."""
    target = make_target(seed=6)
    torch.manual_seed(7)
    prompt = torch.randint(3, MASK, (1, 6))
    text = target.generate(prompt, max_new_tokens=24, do_sample=False)
    row = {"input_ids": text[0].tolist(), "loss_mask": [0] * 6 + [1] * 24}
    torch.manual_seed(1)
    draft = DominoForSpeculativeDraft(make_draft(target, shift_label=shift_label).config)
    args = arguments(
        tmp_path, max_steps=150, num_anchors=99, learning_rate=1e-2, logging_steps=75, loss_decay_gamma=None
    )
    trainer = DominoTrainer(draft, target, args, train_dataset=[row, row])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["lambda_base"] for entry in logs] == [0.5, 0.0]
    assert logs[-1]["final_loss"] < 0.1 < logs[0]["base_loss"]
    output = target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=draft.eval())
    assert output.tolist() == text.tolist()
    most = draft.config.max_draft_tokens
    assert draft.last_generation.rounds == -(-23 // (most + 1))  # every draft right


def test_features_recorded_while_the_target_answers_are_those_that_training_would_compute(tmp_path):
    """And rows that bring them train the draft exactly as rows that do not."""
    target = make_target(seed=6)
    draft = make_draft(target)

    tokenizer = make_tokenizer(pad_token="a", eos_token="c")
    prompts = ["bed", "hello", "be", "longerprompt"]
    options = {"max_new_tokens": 9, "mask_token_id": MASK, "batch_size": 3}
    taps = draft.config.target_layer_ids
    with_features = regenerate(target, tokenizer, prompts, target_layer_ids=taps, **options)
    without = regenerate(target, tokenizer, prompts, **options)
    assert [row["input_ids"] for row in with_features] == [row["input_ids"] for row in without]
    for row in with_features:
        prompt = row["input_ids"][: row["loss_mask"].index(1)]
        alone = target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0].tolist()
        assert row["input_ids"] == alone
        states = target(torch.tensor([alone]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0, :-1] for layer in taps], dim=-1)
        torch.testing.assert_close(row["context_hidden_states"], expected, atol=1e-4, rtol=1e-3)  # other widths
    trainer = DominoTrainer(draft, target, arguments(tmp_path), train_dataset=without)
    losses = [
        trainer.compute_loss(draft, BlockCollator(draft.config, 99, None, 0)(r)) for r in (with_features, without)
    ]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


def test_evaluation_logs_both_terms_and_checkpoints_hold_the_draft_alone(tmp_path):
    target = make_target()
    draft = make_draft(target)
    args = arguments(tmp_path, sampled_softmax=4, save_strategy="steps", save_steps=4)
    trainer = DominoTrainer(draft, target, args, train_dataset=rows(), eval_dataset=rows(2))
    trainer.train()
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    logged = trainer.state.log_history[-1]
    assert {"eval_loss", "eval_base_loss", "eval_final_loss"} <= set(logged)
    again = DominoForSpeculativeDraft.from_pretrained(tmp_path / "checkpoint-4")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in draft.state_dict().items())


def test_rows_without_supervised_pairs_are_refused_in_words(tmp_path):
    collator = BlockCollator(make_draft(make_target()).config, 4, None, 0)
    with pytest.raises(ValueError, match="two consecutive supervised tokens"):
        collator([{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1]}])


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_anchors", 0), ("loss_decay_gamma", 0.0), ("lambda_base_start", 1.5), ("lambda_base_decay_ratio", 0.0)],
)
def test_bad_training_arguments_are_refused_with_name_and_value(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}"):
        arguments(tmp_path, **{name: value})
