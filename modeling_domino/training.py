"""`DominoTrainer`: training of a draft on the Hugging Face Trainer (paper section 4).

Each batch runs the frozen target once for the context hidden states, then the draft on blocks drawn from the rows:
teacher forcing (the head reads the true tokens) under the base-anchored curriculum, unless asked otherwise.
"""

import json
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer

from .anchors import PADDING, Blocks, block_attention_mask, flex_block_mask, positions_in_documents, seeded_generator
from .collator import BlockCollator, NewAnchorsEachEpoch
from .compat_domino import find_speculator
from .configuration_domino import DominoConfig
from .correction_domino import draft_block
from .features import weights_fingerprint
from .losses import TwoTermLoss, lambda_base, sample_vocabulary, two_term_loss
from .metrics import WindowMetrics
from .speculation_domino import check_fit
from .target_domino import BorrowedTarget
from .training_arguments import DominoTrainingArguments
from .uploading import HubUploads


RECIPE_FIELDS = (
    "learning_rate",
    "weight_decay",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "num_anchors",
    "loss_decay_gamma",
    "lambda_base_start",
    "lambda_base_decay_ratio",
    "loss_normalizer",
    "training_time_test",
    "train_head",
    "sampled_softmax",
)


class DominoTrainer(HubUploads, Trainer):
    """
    Trains a draft for one target; a `Trainer` in everything else.

    Args:
        model: The `DominoForSpeculativeDraft`, or a `PeftModel` of one, of which the adapter alone is trained and saved.
        target: The model it drafts for. It is frozen (`requires_grad_(False)`), moved to the training device, and
            never saved.
        args: `DominoTrainingArguments`.
        kwargs: As for `Trainer`; see `BlockCollator` for the rows of the datasets.

    Raises:
        ValueError: The draft is not in float32, or is made for another target.
    """

    def __init__(self, model, target: PreTrainedModel, args: DominoTrainingArguments, **kwargs):
        self.borrowed = BorrowedTarget(target)
        _check_draft(model, target, self.borrowed)
        options = (model.config, args.num_anchors, args.loss_decay_gamma, args.seed)
        collator = kwargs.pop("data_collator", None) or BlockCollator(*options)
        find_speculator(model).head_enabled = args.train_head  # off in a draft that was loaded without one
        if not args.train_head:
            for name, parameter in model.named_parameters():
                if name.startswith(("prefix_gru.", "embed_proj.")):
                    parameter.requires_grad_(False)
        self.target = target  # whose name a push needs before training begins
        super().__init__(model=model, args=args, data_collator=collator, **kwargs)
        self.eval_collator = BlockCollator(*options)  # the same anchors at every evaluation
        self.loss_is_scaled_for_ga = True  # by the weights of the whole optimizer step
        self.target = target.eval().requires_grad_(False)
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
            self.borrowed = BorrowedTarget(target)  # where it is now
        self.add_callback(NewAnchorsEachEpoch(collator))
        self._sums: dict[bool, WindowMetrics] = {
            True: WindowMetrics(),
            False: WindowMetrics(),
        }  # by whether they come from training

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """The batches of one optimizer step and the sum of their loss weights, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        total = sum(batch["weights"].sum() for batch in batches).to(device)
        total = self.accelerator.gather(total[None]).sum()
        return batches, torch.where(total > 0, total, 1.0)

    def get_eval_dataloader(self, eval_dataset=None):
        """Batches of the evaluation set, whose anchors do not change from one evaluation to the next."""
        training, self.data_collator = self.data_collator, self.eval_collator
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = training

    def compute_loss(self, model, inputs: dict, return_outputs: bool = False, num_items_in_batch=None):
        """
        The two-term loss of one micro-batch, divided by the weight sum of its optimizer step (or its own).

        Raises:
            FloatingPointError: The loss is not finite; nothing has been written to the weights yet.
        """
        blocks = Blocks(**{name: inputs[name] for name in ("anchors", "prefix_ids", "labels", "weights")})
        draft = self._draft
        context = inputs.get("context_hidden_states")
        if context is None:
            context = self._context_hidden_states(inputs["input_ids"], inputs["document_ids"])
        document_ids = inputs["document_ids"][:, : context.shape[1]]
        run = partial(model, **self._draft_inputs(inputs["input_ids"], document_ids, context.to(draft.dtype), blocks))
        prefix_ids = blocks.prefix_ids
        if self.args.training_time_test and model.training:
            with torch.no_grad():
                chosen = run(prefix_embeds=self._embed(prefix_ids), objective=partial(self._own_tokens, blocks))
            prefix_ids = torch.cat([prefix_ids[..., :1], chosen[..., :-1]], dim=-1)
        normalizer = num_items_in_batch
        if normalizer is None or self.args.loss_normalizer == "forward":
            total = blocks.weights.sum()
            normalizer = torch.where(total > 0, total, 1.0)
        losses = run(
            prefix_embeds=self._embed(prefix_ids),
            objective=partial(self._losses, blocks, normalizer, sampled=model.training),
        )
        if not torch.isfinite(losses.loss):
            raise FloatingPointError(
                f"The loss is {losses.loss.item()} at step {self.state.global_step}, in the batch of rows "
                f"{inputs['ids']}: look at these rows, lower `learning_rate`, or resume from the last checkpoint."
            )
        self._sums[model.training].add(losses, blocks.weights, normalizer)
        loss = losses.loss
        if num_items_in_batch is not None:
            if self.args.loss_normalizer == "step":
                loss = loss * self.accelerator.num_processes  # DDP averages gradients over processes
            else:
                loss = loss / self.current_gradient_accumulation_steps
        return (loss, losses) if return_outputs else loss

    def prediction_step(self, model, inputs: dict, prediction_loss_only: bool, ignore_keys=None):
        """Evaluation loss of one batch; a draft has no labels of its own to return."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss, None, None

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """
        The Trainer's metrics, those of `log`, and with `eval_generate_rows` what generate() decodes: `eval_tau` and
        `eval_tau_head_off`, tokens per round pooled over all rounds, bonus token included, greedily.
        """
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.args.eval_generate_rows and not isinstance(rows, dict):
            rows = [rows[i] for i in range(min(self.args.eval_generate_rows, len(rows)))]
            decoded = {f"{metric_key_prefix}_tau": self._decoded_tau(rows)}
            with self._draft.head_disabled():
                decoded[f"{metric_key_prefix}_tau_head_off"] = self._decoded_tau(rows)
            self.log(dict(decoded))
            metrics |= decoded
        return metrics

    def log(self, logs: dict, *args, **kwargs) -> None:
        """
        Adds λ, both terms of the loss, accuracy and acceptance length of both heads, acceptance of each position given
        that those before it were accepted, and predictions per second (with `eval_` before them in evaluation).

        `accept_len` is the mean over blocks of 1 + the leading run of right tokens, under teacher forcing: what a block
        from a random anchor would gain. It is not τ, which only generate() gives.
        """
        training = "loss" in logs
        if training or "eval_loss" in logs:
            prefix = "" if training else "eval_"
            measured = self._sums[training].take(self.accelerator)
            if not training:
                measured.pop("predictions_per_second", None)
            logs |= {prefix + name: value for name, value in measured.items()}
        if training:
            logs["lambda_base"] = self.lambda_base
        super().log(logs, *args, **kwargs)

    @property
    def lambda_base(self) -> float:
        """λ at the current optimizer step."""
        return lambda_base(
            self.state.global_step,
            self.state.max_steps,
            self.args.lambda_base_start,
            self.args.lambda_base_decay_ratio,
        )

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return  # every process comes here
        recipe = {name: getattr(self.args, name) for name in RECIPE_FIELDS}
        recipe |= {**self._target_facts, "steps": self.state.global_step}
        path = Path(output_dir or self.args.output_dir) / "training_recipe.json"
        path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")

    @property
    def _draft(self):
        """The draft itself, whatever wraps it: DDP, or peft."""
        return find_speculator(self.accelerator.unwrap_model(self.model))

    @cached_property
    def _target_facts(self) -> dict:
        config = self.target.config
        return {
            "target": config.name_or_path,
            "target_revision": getattr(config, "_commit_hash", None),
            "target_fingerprint": weights_fingerprint(self.target),
        }

    def _draft_inputs(self, input_ids: Tensor, document_ids: Tensor, context: Tensor, blocks: Blocks) -> dict:
        """What the draft's forward pass takes, beside the tokens its head reads and the objective."""
        config = self._draft.config
        noise_ids = blocks.anchors.new_full((*blocks.anchors.shape, config.block_size), config.mask_token_id)
        noise_ids[..., 0] = blocks.prefix_ids[..., 0]
        return {
            "noise_embeds": self._embed(noise_ids),
            "context_hidden_states": context,
            "position_ids": self._positions(blocks.anchors, document_ids, config.block_size),
            "attention_mask": self._masks(blocks.anchors, document_ids, config),
        }

    def _losses(self, blocks: Blocks, normalizer, hidden_states, features, w2, *, sampled: bool) -> TwoTermLoss:
        """What the draft's forward pass computes of its logits; everything flat over the positions of all blocks."""
        labels, lm_head, offset = blocks.labels.flatten(), self.borrowed.logits, None
        if self.args.sampled_softmax is not None and sampled:
            # From the step and its labels, and no running state: a resumed run draws what an uninterrupted one does.
            generator = seeded_generator(self.args.seed, self.state.global_step, labels)
            vocabulary, offset = sample_vocabulary(labels, len(w2), self.args.sampled_softmax, generator)
            labels, w2 = torch.searchsorted(vocabulary, labels), w2[vocabulary]
            lm_head = partial(self.borrowed.logits, vocabulary=vocabulary)
        return two_term_loss(
            hidden_states.flatten(0, 2),
            features.flatten(0, 2),
            w2,
            lm_head,
            labels,
            blocks.weights.flatten(),
            self.lambda_base,
            normalizer,
            offset=offset,
            chunk_size=self.args.loss_chunk_size,
        )

    def _own_tokens(self, blocks: Blocks, hidden_states, features, w2) -> Tensor:
        """What the draft itself would propose in each block, greedily, [b, N, K]."""
        draft = self._draft
        head, flat = draft.head_weights(), hidden_states.flatten(0, 1)
        chosen = []
        rows, anchors = self.args.loss_chunk_size, blocks.prefix_ids[..., 0].flatten()
        for states, anchor_ids in zip(flat.split(rows), anchors.split(rows), strict=True):
            chosen.append(
                draft_block(
                    head,
                    states.to(head.w2.dtype),
                    self.borrowed.logits(states).to(states.device),
                    anchor_ids,
                    prefix_len=draft.config.pure_draft_prefix_len,
                    embed=self._embed,
                    choose=lambda i, logits: (logits.argmax(dim=-1), False),
                )
            )
        return torch.cat(chosen).view(blocks.labels.shape)

    def _decoded_tau(self, rows: list[dict]) -> float:
        draft, was_training = self._draft, self.model.training
        draft.eval()
        tokens = rounds = 0
        for row in rows:
            prompt = torch.as_tensor(row["input_ids"][: list(row["loss_mask"]).index(1)], device=self.target.device)
            self.target.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt)[None],
                assistant_model=draft,
                num_assistant_tokens=draft.config.max_draft_tokens,  # τ is of whole blocks
                max_new_tokens=self.args.eval_generate_tokens,
                do_sample=False,
            )
            stats = draft.last_generation
            tokens, rounds = tokens + sum(stats.tokens_per_round), rounds + stats.rounds
        draft.train(was_training)
        return tokens / max(rounds, 1)

    def _context_hidden_states(self, input_ids: Tensor, document_ids: Tensor) -> Tensor:
        with torch.no_grad(), self.borrowed.tap(self._draft.config.target_layer_ids) as taps:
            if bool((document_ids > 0).any()):
                # Positions that start again tell transformers' masks where documents begin.
                where = {"position_ids": positions_in_documents(document_ids)}
            else:
                where = {"attention_mask": (document_ids != PADDING).long()}
            # The decoder alone: its logits would be thrown away.
            self.target.get_decoder()(input_ids=input_ids, use_cache=False, **where)
            return taps.take().to(input_ids.device)

    def _embed(self, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.borrowed.embed(token_ids).to(token_ids.device, self._draft.dtype)

    @staticmethod
    def _positions(anchors: Tensor, document_ids: Tensor, block_size: int) -> Tensor:
        context = positions_in_documents(document_ids)
        # An anchor lies one after the context row before it, which has its document.
        first = context.gather(1, (anchors - 1).clamp(min=0)) + (anchors > 0)
        slots = first[..., None] + torch.arange(block_size, device=anchors.device)
        return torch.cat([context, slots.flatten(1)], dim=1)

    @staticmethod
    def _masks(anchors: Tensor, document_ids: Tensor, config: DominoConfig) -> dict:
        windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        build = flex_block_mask if config._attn_implementation == "flex_attention" else block_attention_mask
        return {
            kind: build(anchors, document_ids, config.block_size, windows[kind]) for kind in set(config.layer_types)
        }


def _check_draft(draft, target: PreTrainedModel, borrowed: BorrowedTarget) -> None:
    check_fit(draft.config, target, borrowed, target.generation_config)
    rows = target.config.get_text_config(decoder=True).vocab_size
    if draft.config.vocab_size != rows:
        raise ValueError(
            f"The draft's vocabulary has {draft.config.vocab_size} rows, the target's {rows}: training needs as many "
            "on both sides, so make the draft with `DominoConfig.from_target`."
        )
    if draft.dtype != torch.float32:
        raise ValueError(
            f"The draft is in {str(draft.dtype).removeprefix('torch.')}, where small updates are rounded away: load it "
            "with `dtype=torch.float32` and train in mixed precision with `bf16=True`."
        )


__all__ = ["DominoTrainer", "DominoTrainingArguments"]
