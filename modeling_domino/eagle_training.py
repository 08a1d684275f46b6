"""`EagleTrainer`: the trainer of the EAGLE-3-style baseline, on the data, blocks and loss of `DominoTrainer`."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .anchors import PADDING, Blocks, positions_in_documents
from .training import DominoTrainer
from .training_arguments import DominoTrainingArguments


class EagleTrainer(DominoTrainer):
    """
    A `DominoTrainer` for an `EagleForSpeculativeDraft`: same rows, anchors, weights and chunked loss. There is no
    correction head, so curriculum and `train_head` have no effect.

    Raises:
        ValueError: `training_time_test` asks for what this draft always does, or `push_to_hub` for an upload.
    """

    def __init__(self, model, target: PreTrainedModel, args: DominoTrainingArguments, **kwargs):
        if args.training_time_test:
            raise ValueError(
                "`training_time_test` chooses what a correction head reads; an EAGLE-3-style draft has none and is "
                "always unrolled on its own hidden states: leave it out."
            )
        if args.push_to_hub:
            raise ValueError("`push_to_hub` is for Domino drafts: no shipped code loads the EAGLE-3-style baseline.")
        super().__init__(model, target, args, **kwargs)

    def _draft_inputs(self, input_ids: Tensor, document_ids: Tensor, context: Tensor, blocks: Blocks) -> dict:
        rows = context.shape[1]
        next_ids = torch.cat([input_ids[:, 1:], input_ids[:, -1:]], dim=1)[:, :rows]
        before = torch.arange(rows, device=context.device) < (blocks.anchors - 1)[..., None]
        document = document_ids.gather(1, (blocks.anchors - 1).clamp(min=0))
        same = (document_ids[:, None] == document[..., None]) & (document_ids[:, None] != PADDING)
        return {
            "context_embeds": self._embed(next_ids),
            "context_hidden_states": context,
            "anchors": blocks.anchors,
            "position_ids": positions_in_documents(document_ids),
            "attention_mask": before & same,
        }


__all__ = ["EagleTrainer"]
