"""`DominoTrainingArguments`: the recipe of a training (paper section 5.1) beside everything of `TrainingArguments`."""

from dataclasses import dataclass, field

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, SchedulerType


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
    lambda_base_start: float = field(
        default=1.0, metadata={"help": "λ, weight of the base loss, at step 0; 0 trains without curriculum."}
    )
    lambda_base_decay_ratio: float = field(
        default=1.0, metadata={"help": "Share of all steps over which λ falls to 0; 1.0 in every published recipe."}
    )
    loss_normalizer: str = field(
        default="step",
        metadata={
            "help": "What weighted losses are divided by: the weights of the whole optimizer `step`, or of each "
            "`forward` pass (as the author does), whose means are then averaged."
        },
    )
    loss_chunk_size: int = field(default=128, metadata={"help": "Positions whose logits are alive at once."})
    sampled_softmax: int | None = field(
        default=None,
        metadata={"help": "Tokens drawn beside the labels to estimate the softmax over; None: the full vocabulary."},
    )
    training_time_test: bool = field(
        default=False, metadata={"help": "The head reads tokens the draft chose itself, not the true ones (TTT)."}
    )
    train_head: bool = field(default=True, metadata={"help": "False trains the backbone alone: a DFlash-style draft."})
    eval_generate_rows: int = field(
        default=0,
        metadata={"help": "Evaluation rows decoded by generate() for `eval_tau`, with and without the head."},
    )
    eval_generate_tokens: int = field(default=64, metadata={"help": "New tokens of each of them."})
    hub_target: str | None = field(
        default=None, metadata={"help": "Hub id of the target, for the card of a push; its own name by default."}
    )
    hub_license: str | None = field(
        default=None, metadata={"help": "Licence of the weights, for the card of a push, such as apache-2.0."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("num_anchors", "sampled_softmax", "loss_chunk_size", "eval_generate_tokens"):
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
        if self.loss_normalizer not in ("step", "forward"):
            raise ValueError(f"`loss_normalizer` is {self.loss_normalizer!r}, expected 'step' or 'forward'.")
        if self.push_to_hub and self.hub_strategy not in (HubStrategy.END, HubStrategy.EVERY_SAVE):
            raise ValueError(
                f"`hub_strategy` is {self.hub_strategy.value!r}, which would upload optimizer states: use 'end' or "
                "'every_save', and resume from the checkpoints here."
            )


__all__ = ["DominoTrainingArguments"]
