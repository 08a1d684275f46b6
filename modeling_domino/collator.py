"""From rows to the blocks of a batch: pads, and draws anchors anew in every epoch."""

import multiprocessing

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from .anchors import PADDING, build_blocks, sample_anchors, seeded_generator
from .configuration_domino import DominoConfig
from .losses import position_weights


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
        self.seed = seed
        self._epoch = multiprocessing.Value("q", 0)  # shared with the workers of a DataLoader

    def set_epoch(self, epoch: int) -> None:
        """Anchors are drawn anew in every epoch."""
        self._epoch.value = epoch

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """
        Args:
            rows: With `input_ids` and `loss_mask` (1 on supervised tokens), [S] each; with `document_ids`, [S], where
                several documents share a row; optionally with `id`, and with the `context_hidden_states` that the
                target gave for them, [S - 1 or S, taps · H].

        Returns:
            `input_ids` and `document_ids`, [b, S], the fields of `Blocks`, `ids`, and `context_hidden_states` if given.
            A batch without a single eligible anchor has blocks of weight 0.
        """

        def pad(values: list, value: int = 0) -> Tensor:
            return pad_sequence([torch.as_tensor(v) for v in values], batch_first=True, padding_value=value)

        input_ids, loss_mask = pad([row["input_ids"] for row in rows]), pad([row["loss_mask"] for row in rows])
        documents = [row.get("document_ids", [0] * len(row["input_ids"])) for row in rows]
        document_ids = pad(documents, PADDING)
        anchors = [
            sample_anchors(
                torch.as_tensor(row["loss_mask"]),
                self.num_anchors,
                seeded_generator(self.seed, self._epoch.value, row["input_ids"]),
                torch.as_tensor(document),
            )
            for row, document in zip(rows, documents, strict=True)
        ]
        blocks = build_blocks(input_ids, loss_mask, anchors, self.num_predictions, self.weights, document_ids)
        batch = {"input_ids": input_ids, "document_ids": document_ids, **vars(blocks)}
        batch["ids"] = [str(row.get("id", "without id")) for row in rows]
        if "context_hidden_states" in rows[0]:
            batch["context_hidden_states"] = pad([row["context_hidden_states"] for row in rows])
        return batch


class NewAnchorsEachEpoch(TrainerCallback):
    """Tells a collator which epoch begins."""

    def __init__(self, collator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        if isinstance(self.collator, BlockCollator):
            self.collator.set_epoch(int(state.epoch or 0))


__all__ = ["BlockCollator", "NewAnchorsEachEpoch"]
