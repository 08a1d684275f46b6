"""A real Trainer teaches a draft its target: options, curriculum, invariances, what is logged and what is saved."""

import json
import math

import pytest
import torch
from conftest import MASK, make_draft, make_target, make_tokenizer

from modeling_domino import DominoForSpeculativeDraft, DominoTrainer, DominoTrainingArguments
from modeling_domino.collator import BlockCollator
from modeling_domino.data import PackedRows, regenerate, row_lengths


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


def test_a_batch_without_any_anchor_weighs_nothing_and_trains_nothing(tmp_path):
    """No process raises alone: the others would wait for it in the next collective operation."""
    target = make_target()
    draft = make_draft(target)
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    bad = [{"input_ids": [3, 4, 5], "loss_mask": [0, 0, 1]}] * 4
    trainer = DominoTrainer(draft, target, arguments(tmp_path, max_steps=2, logging_steps=2), train_dataset=bad)
    trainer.train()
    assert trainer.state.log_history[0]["batches_without_anchors"] == 2
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert trainer.state.log_history[-1]["train_loss"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_anchors", 0),
        ("loss_chunk_size", 0),
        ("loss_normalizer", "'batch'"),
        ("loss_decay_gamma", 0.0),
        ("lambda_base_start", 1.5),
        ("lambda_base_decay_ratio", 0.0),
    ],
)
def test_bad_training_arguments_are_refused_with_name_and_value(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}` is {value}"):
        arguments(tmp_path, **{name: value.strip("'") if isinstance(value, str) else value})


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("sampled_softmax", [None, 4])
def test_a_resumed_run_gives_the_losses_and_weights_of_an_uninterrupted_one(tmp_path, sampled_softmax):
    def run(folder, resume=None, **overrides):
        target = make_target()
        options = {"max_steps": 8, "num_anchors": 3, "logging_steps": 1, "save_strategy": "steps", "save_steps": 4}
        options["sampled_softmax"] = sampled_softmax
        args = arguments(folder, **options, logging_first_step=True, **overrides)
        trainer = DominoTrainer(make_draft(target), target, args, train_dataset=rows(6))
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    resumed = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-4"))
    assert losses_of(resumed) == losses_of(whole)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    assert len(set(losses_of(whole))) == 8


def test_anchors_are_drawn_anew_each_epoch_and_not_in_evaluation(tmp_path):
    target = make_target()
    seen = {"train": [], "eval": []}

    class Spy(DominoTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            seen["train" if model.training else "eval"].append(inputs["anchors"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = arguments(tmp_path, max_steps=-1, num_train_epochs=3, num_anchors=2, eval_strategy="epoch")
    row = rows(1, 30)
    Spy(make_draft(target), target, args, train_dataset=row, eval_dataset=row).train()
    assert len({str(anchors) for anchors in seen["train"]}) == 3
    assert len({str(anchors) for anchors in seen["eval"]}) == 1 and len(seen["eval"]) == 3


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_forward_normaliser_averages_the_means_of_forward_passes(tmp_path, accumulation):
    """The author's rule: a short row weighs as much as a long one."""
    target = make_target()
    data = [*rows(1, 30), {"input_ids": [4, 5, 6, 7, 8, 9, 3], "loss_mask": [0] * 5 + [1] * 2}]
    wanted = {}
    for normalizer in ("step", "forward"):
        args = arguments(
            tmp_path,
            per_device_train_batch_size=2 // accumulation,
            gradient_accumulation_steps=accumulation,
            num_anchors=99,
            max_steps=1,
            loss_normalizer=normalizer,
            logging_steps=1,
        )
        trainer = DominoTrainer(make_draft(target), target, args, train_dataset=data)
        trainer.train()
        wanted[normalizer] = losses_of(trainer)[0]
    same = wanted["step"] == pytest.approx(wanted["forward"], rel=1e-5)
    assert same == (accumulation == 1)


def test_backbone_alone_trains_a_draft_without_touching_the_head(tmp_path):
    target = make_target()
    draft = make_draft(target)
    head = {name: value.clone() for name, value in draft.state_dict().items() if name.startswith(("prefix", "embed"))}
    fc = draft.fc.weight.detach().clone()
    trainer = DominoTrainer(
        draft, target, arguments(tmp_path, train_head=False, logging_steps=4), train_dataset=rows()
    )
    trainer.train()
    assert all(torch.equal(value, draft.state_dict()[name]) for name, value in head.items())
    assert not torch.equal(fc, draft.fc.weight)
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["base_loss"] == pytest.approx(logged["final_loss"])


def test_training_time_test_feeds_the_head_what_the_draft_chose(tmp_path):
    """With a draft that is always wrong after the anchor, the head never sees a true token but the anchor."""
    target = make_target()
    draft = make_draft(target)
    args = arguments(tmp_path, training_time_test=True, lambda_base_start=0.0)
    trainer = DominoTrainer(draft, target, args, train_dataset=rows())
    trainer.state.max_steps = 4
    seen = []
    hook = draft.prefix_gru.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    batch = trainer.data_collator(rows(2))
    draft.train()
    trainer.compute_loss(draft, batch)
    hook.remove()
    true, chosen = seen  # the first pass finds out what the draft chooses
    embeddings = target.get_input_embeddings().weight
    ids = (chosen[..., None, :] - embeddings).abs().sum(-1).argmin(-1).view(batch["prefix_ids"].shape)
    assert torch.equal(ids[..., 0], batch["prefix_ids"][..., 0])
    assert not torch.equal(true, chosen)
    assert torch.equal(ids, own_prefixes(trainer, draft, batch))


def own_prefixes(trainer, draft, batch):
    """By the drafting loop of decoding, one block at a time."""
    from modeling_domino.correction_domino import draft_block

    result = batch["prefix_ids"].clone()
    context = trainer._context_hidden_states(batch["input_ids"], batch["document_ids"])
    for b, row in enumerate(batch["anchors"]):
        for n, anchor in enumerate(row.tolist()):
            noise = torch.full((1, 1, draft.config.block_size), MASK)
            noise[..., 0] = batch["prefix_ids"][b, n, 0]
            positions = torch.cat([torch.arange(anchor), anchor + torch.arange(draft.config.block_size)])[None]
            with torch.no_grad():
                hidden = draft.backbone(trainer._embed(noise), context[b : b + 1, :anchor], positions)
                chosen = draft_block(
                    draft.head_weights(),
                    draft.predicting_slots(hidden)[:, 0],
                    trainer.borrowed.logits(draft.predicting_slots(hidden)[:, 0]),
                    noise[0, 0, :1],
                    prefix_len=draft.config.pure_draft_prefix_len,
                    embed=trainer._embed,
                    choose=lambda i, logits: (logits.argmax(-1), False),
                )
            result[b, n, 1:] = chosen[0, :-1]
    return result


def test_packed_documents_train_exactly_as_rows_of_their_own(tmp_path):
    target = make_target()
    draft = make_draft(target)
    apart = rows(2, 20)
    packed = {
        "input_ids": apart[0]["input_ids"] + apart[1]["input_ids"],
        "loss_mask": apart[0]["loss_mask"] + apart[1]["loss_mask"],
        "document_ids": [0] * len(apart[0]["input_ids"]) + [1] * len(apart[1]["input_ids"]),
    }
    trainer = DominoTrainer(draft, target, arguments(tmp_path), train_dataset=apart)
    trainer.state.max_steps = 2
    trainer.state.global_step = 1
    gradients = []
    for batch in (apart, [packed]):
        draft.zero_grad()
        trainer.compute_loss(draft, BlockCollator(draft.config, 99, 7.0, 0)(batch)).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in draft.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("with_features", [False, True])
def test_packed_rows_hold_every_row_once_and_train_alike(tmp_path, with_features):
    target = make_target()
    draft = make_draft(target)
    apart = [{**row, "id": f"r{i}"} for i, row in enumerate(rows(6))]
    trainer = DominoTrainer(draft, target, arguments(tmp_path), train_dataset=apart)
    if with_features:
        for row in apart:
            ids = torch.tensor([row["input_ids"]])
            row["context_hidden_states"] = trainer._context_hidden_states(ids, torch.zeros_like(ids))[0, :-1]
    packed = PackedRows(apart, 40)
    assert len(packed) == 3 and row_lengths(apart) == [20, 19, 18, 17, 16, 15]
    assert sorted(name for row in packed for name in row["id"].split()) == [f"r{i}" for i in range(6)]
    assert max(len(row["input_ids"]) for row in packed) <= 40
    collator = BlockCollator(draft.config, 99, 7.0, 0)
    losses = [trainer.compute_loss(draft, collator(list(data))) for data in (apart, packed)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)


def test_metrics_are_means_over_the_whole_window_and_not_of_its_last_batch(tmp_path):
    logged = {}
    for every in (1, 4):
        target = make_target()
        trainer = DominoTrainer(
            make_draft(target),
            target,
            arguments(tmp_path, logging_steps=every, num_anchors=99, per_device_train_batch_size=1),
            train_dataset=rows(4),
        )
        seen = []
        original = trainer.get_batch_samples
        trainer.get_batch_samples = lambda *args, seen=seen, original=original: (
            seen.append(original(*args)) or seen[-1]
        )
        trainer.train()
        logged[every] = [entry for entry in trainer.state.log_history if "loss" in entry], seen
    single, seen = logged[1]
    (window,), _ = logged[4]
    blocks = [int((batch[0]["weights"][..., 0] > 0).sum()) for batch, _ in seen]
    weights = [float(total) for _, total in seen]
    for name, shares in (("accept_len", blocks), ("final_loss", weights), ("base_loss", weights)):
        mean = sum(entry[name] * share for entry, share in zip(single, shares, strict=True)) / sum(shares)
        assert window[name] == pytest.approx(mean, rel=1e-5), name


def test_a_draft_that_fits_four_texts_is_accepted_whole_and_the_best_checkpoint_is_that_of_tau(tmp_path):
    """τ = K + 1 with the head on; evaluation decodes with generate(), and its τ chooses the checkpoint."""
    target = make_target(seed=6)
    torch.manual_seed(7)
    data = []
    for _ in range(4):
        text = target.generate(torch.randint(3, MASK, (1, 6)), max_new_tokens=25, do_sample=False)[0].tolist()
        data.append({"input_ids": text, "loss_mask": [0] * 6 + [1] * 25})
    torch.manual_seed(1)
    draft = DominoForSpeculativeDraft(make_draft(target).config)
    args = arguments(
        tmp_path,
        max_steps=90,
        per_device_train_batch_size=4,
        num_anchors=99,
        learning_rate=1e-2,
        loss_decay_gamma=None,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=30,
        save_steps=30,
        save_total_limit=1,
        eval_generate_rows=4,
        eval_generate_tokens=1 + 4 * 6,  # the prefill's own token, and whole rounds of K + 1 = 6
        load_best_model_at_end=True,
        metric_for_best_model="tau",
        greater_is_better=True,
        dataloader_pin_memory=False,
    )
    trainer = DominoTrainer(draft, target, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    taus = [entry["eval_tau"] for entry in trainer.state.log_history if "eval_tau" in entry]
    assert trainer.state.best_metric == max(taus) == draft.config.max_draft_tokens + 1
    measured = [entry for entry in trainer.state.log_history if "eval_accept_len" in entry]
    assert measured[0]["eval_accept_len"] < measured[-1]["eval_accept_len"]
    assert measured[-1]["eval_accuracy"] == 1.0 and measured[-1]["eval_acceptance_1"] == 1.0
    recipe = json.loads((tmp_path / trainer.state.best_model_checkpoint / "training_recipe.json").read_text())
    assert recipe["loss_normalizer"] == "step" and recipe["loss_decay_gamma"] is None


def test_a_loss_that_is_not_finite_stops_with_step_and_rows(tmp_path):
    target = make_target()
    draft = make_draft(target)
    data = [{**row, "id": f"row-{i}"} for i, row in enumerate(rows(2))]
    with torch.no_grad():
        draft.fc.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"nan at step 0.*row-[01]"):
        DominoTrainer(draft, target, arguments(tmp_path), train_dataset=data).train()


def test_activation_checkpointing_and_bfloat16_with_float32_master_weights(tmp_path):
    target = make_target()
    results = []
    for overrides in ({}, {"activation_checkpointing": True}, {"bf16": True}):
        draft = make_draft(target)
        trainer = DominoTrainer(draft, target, arguments(tmp_path, logging_steps=1, **overrides), train_dataset=rows())
        trainer.train()
        results.append(losses_of(trainer))
        assert draft.dtype == torch.float32
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert results[2] == pytest.approx(results[0], rel=3e-2) and results[2] != results[0]


def test_drafts_that_cannot_be_trained_are_refused(tmp_path):
    target = make_target()
    with pytest.raises(ValueError, match=r"in bfloat16, where small updates are rounded away"):
        DominoTrainer(make_draft(target).to(torch.bfloat16), target, arguments(tmp_path))
    with pytest.raises(ValueError, match="hidden size is 32, the target's 40"):
        DominoTrainer(make_draft(target), make_target(hidden_size=40), arguments(tmp_path))
    with pytest.raises(ValueError, match="vocabulary has 24 rows, the target's 25"):
        DominoTrainer(make_draft(target), make_target(vocab_size=25), arguments(tmp_path))
