"""`DominoTrainer`: teacher-forced training of a draft on the Hugging Face Trainer (paper section 4).

Each batch runs the frozen target once for the context hidden states, then the draft on blocks drawn from the rows.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import SchedulerType

from .anchors import Blocks, block_attention_mask, build_blocks, sample_anchors
from .configuration_domino import DominoConfig
from .losses import lambda_base, position_weights, sample_vocabulary, two_term_loss
from .target_domino import BorrowedTarget


@dataclass
class DominoTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's recipe as defaults: lr 6e-4, cosine, 4 % warm-up, no weight decay."""

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: SchedulerType | str = field(default="cosine", metadata={"help": "Schedule after warm-up."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up: steps, or a share of all steps below 1."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Always False: the collator reads all."})
    num_anchors: int = field(default=256, metadata={"help": "Most blocks drawn from a row in each epoch."})
    loss_decay_gamma: float | None = field(
        default=7.0, metadata={"help": "γ of the weight exp(-i/γ) of a block's i-th prediction; None turns it off."}
    )
    lambda_base_start: float = field(default=1.0, metadata={"help": "λ, weight of the base loss, at step 0."})
    lambda_base_decay_ratio: float = field(
        default=1.0, metadata={"help": "Share of all steps over which λ falls to 0; 1.0 in every published recipe."}
    )

    sampled_softmax: int | None = field(
        default=None,
        metadata={"help": "Tokens drawn beside the labels to estimate the softmax over; None: the full vocabulary."},
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_anchors", "sampled_softmax"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"`{name}` is {value}, expected at least 1.")
        if self.loss_decay_gamma is not None and self.loss_decay_gamma <= 0:
            raise ValueError(
                f"`loss_decay_gamma` is {self.loss_decay_gamma}, expected a positive value or None (off)."
            )
        if not 0 <= self.lambda_base_start <= 1:
            raise ValueError(f"`lambda_base_start` is {self.lambda_base_start}, expected a value in [0, 1].")
        if not 0 < self.lambda_base_decay_ratio <= 1:
            raise ValueError(f"`lambda_base_decay_ratio` is {self.lambda_base_decay_ratio}, expected one in (0, 1].")


class BlockCollator:
    """
    Pads rows on the right and draws their blocks.

    Args:
        config: Of the draft.
        num_anchors: Most blocks of a row.
        loss_decay_gamma: See `DominoTrainingArguments`.
        seed: Of the anchors.
    """

    def __init__(self, config: DominoConfig, num_anchors: int, loss_decay_gamma: float | None, seed: int):
        self.num_predictions = config.max_draft_tokens
        self.num_anchors = num_anchors
        self.weights = position_weights(self.num_predictions, loss_decay_gamma)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """
        Args:
            rows: With `input_ids` and `loss_mask` (1 on supervised tokens), [S] each, and optionally the
                `context_hidden_states` that the target gave for them, [S - 1 or S, taps · H].

        Returns:
            `input_ids` and `attention_mask`, [b, S], the fields of `Blocks`, and `context_hidden_states` if given.

        Raises:
            ValueError: No row of the batch has two consecutive supervised tokens.
        """

        def pad(values: list) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(value) for value in values], batch_first=True)

        input_ids, loss_mask = pad([row["input_ids"] for row in rows]), pad([row["loss_mask"] for row in rows])
        attention_mask = pad([[1] * len(row["input_ids"]) for row in rows])
        anchors = [sample_anchors(mask, self.num_anchors, self.generator) for mask in loss_mask]
        if not any(len(row) for row in anchors):
            raise ValueError(
                "No row of this batch has two consecutive supervised tokens after its first one: check that "
                "`loss_mask` is 1 on the answers, and drop rows without an answer."
            )
        blocks = build_blocks(input_ids, loss_mask, anchors, self.num_predictions, self.weights)
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, **vars(blocks)}
        if "context_hidden_states" in rows[0]:
            batch["context_hidden_states"] = pad([row["context_hidden_states"] for row in rows])
        return batch


class DominoTrainer(Trainer):
    """
    Trains a draft for one target; a `Trainer` in everything else.

    Args:
        model: The `DominoForSpeculativeDraft`.
        target: The model it drafts for. It is frozen (`requires_grad_(False)`) and moved to the training device.
        args: `DominoTrainingArguments`.
        kwargs: As for `Trainer`; rows of the datasets have `input_ids` and `loss_mask`, and may bring
            `context_hidden_states` (see data.py), which spares running the target.
    """

    def __init__(self, model, target: PreTrainedModel, args: DominoTrainingArguments, **kwargs):
        collator = BlockCollator(model.config, args.num_anchors, args.loss_decay_gamma, args.seed)
        super().__init__(model=model, args=args, data_collator=kwargs.pop("data_collator", collator), **kwargs)
        self.loss_is_scaled_for_ga = True  # by the weight sum of the whole optimizer step
        self.target = target.eval().requires_grad_(False)
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        self.borrowed = BorrowedTarget(target)
        self._vocabulary_generator = torch.Generator().manual_seed(args.seed)
        self._losses = {True: [], False: []}  # by whether they come from training

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device):
        """The batches of one optimizer step and the sum of their loss weights, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        total = sum(batch["weights"].sum() for batch in batches).to(device)
        return batches, self.accelerator.gather(total).sum()

    def compute_loss(self, model, inputs: dict, return_outputs: bool = False, num_items_in_batch=None):
        """The two-term loss of one micro-batch, divided by the weight sum of its optimizer step."""
        input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
        blocks = Blocks(**{name: inputs[name] for name in ("anchors", "prefix_ids", "labels", "weights")})
        config = self._draft.config
        context = inputs.get("context_hidden_states")
        if context is None:
            context = self._context_hidden_states(input_ids, attention_mask)
        context_mask = attention_mask[:, : context.shape[1]]
        noise_ids = torch.full(
            (*blocks.anchors.shape, config.block_size), config.mask_token_id, device=input_ids.device
        )
        noise_ids[..., 0] = blocks.prefix_ids[..., 0]
        labels, lm_head, vocabulary, offset = blocks.labels, self.borrowed.logits, None, 0.0
        if self.args.sampled_softmax is not None and model.training:
            vocabulary, offset = sample_vocabulary(
                labels, config.vocab_size, self.args.sampled_softmax, self._vocabulary_generator
            )
            labels = torch.searchsorted(vocabulary, labels)
            lm_head = partial(self.borrowed.logits, vocabulary=vocabulary)
        outputs = model(
            noise_embeds=self._embed(noise_ids),
            context_hidden_states=context.to(self._draft.dtype),
            prefix_embeds=self._embed(blocks.prefix_ids),
            position_ids=self._positions(blocks.anchors, context.shape[1], config.block_size),
            lm_head=lm_head,
            vocabulary=vocabulary,
            attention_mask=self._masks(blocks.anchors, context_mask, config),
        )
        normalizer = num_items_in_batch if num_items_in_batch is not None else blocks.weights.sum()
        loss, base_loss, final_loss = two_term_loss(
            outputs.base_logits + offset, outputs.logits + offset, labels, blocks.weights, self.lambda_base, normalizer
        )
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages gradients over processes
        share = blocks.weights.sum() / normalizer
        self._losses[model.training].append(torch.stack([base_loss, final_loss, share]).detach())
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs: dict, prediction_loss_only: bool, ignore_keys=None):
        """Evaluation loss of one batch; a draft has no labels of its own to return."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss, None, None

    def log(self, logs: dict, *args, **kwargs) -> None:
        """Adds `lambda_base` and both terms of the loss (with `eval_` before them in evaluation)."""
        training = "loss" in logs
        prefix = "" if training else "eval_"
        if (training or "eval_loss" in logs) and self._losses[training]:
            base_loss, final_loss, share = torch.stack(self._losses[training]).sum(dim=0).tolist()
            logs[f"{prefix}base_loss"], logs[f"{prefix}final_loss"] = base_loss / share, final_loss / share
            self._losses[training].clear()
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

    @property
    def _draft(self):
        return self.accelerator.unwrap_model(self.model)

    def _context_hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        with torch.no_grad(), self.borrowed.tap(self._draft.config.target_layer_ids) as taps:
            # The decoder alone: its logits would be thrown away.
            self.target.get_decoder()(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            return taps.take().to(input_ids.device)

    def _embed(self, token_ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.borrowed.embed(token_ids).to(self._draft.dtype)

    @staticmethod
    def _positions(anchors: Tensor, context_rows: int, block_size: int) -> Tensor:
        context = torch.arange(context_rows, device=anchors.device).expand(len(anchors), -1)
        slots = anchors[..., None] + torch.arange(block_size, device=anchors.device)
        return torch.cat([context, slots.flatten(1)], dim=1)

    @staticmethod
    def _masks(anchors: Tensor, attention_mask: Tensor, config: DominoConfig) -> dict[str, Tensor]:
        windows = {"full_attention": None, "sliding_attention": config.sliding_window}
        return {
            kind: block_attention_mask(anchors, attention_mask, config.block_size, windows[kind])
            for kind in set(config.layer_types)
        }


__all__ = ["BlockCollator", "DominoTrainer", "DominoTrainingArguments"]
