"""Training geometry: where blocks start, what they see, which tokens they predict (paper section 4.1).

A row of S tokens gives N blocks. The block of anchor a has slots [x_a, MASK, ...] at positions a..a+B-1, sees the
context rows strictly before a and its own slots, and its K predictions are x_{a+1}..x_{a+K}.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Blocks:
    """
    The blocks of a batch; b rows, N blocks a row, K predictions a block.

    Args:
        anchors: Anchor positions, [b, N]; 0 where a row has fewer blocks.
        prefix_ids: x_a..x_{a+K-1}, what the head reads, [b, N, K].
        labels: x_{a+1}..x_{a+K}, [b, N, K].
        weights: Of each prediction in the loss, [b, N, K]; 0 beyond the row's end and on unsupervised labels.
    """

    anchors: Tensor
    prefix_ids: Tensor
    labels: Tensor
    weights: Tensor


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """
    Draws anchors without replacement among positions whose token and next token are supervised.

    Args:
        loss_mask: 1 on supervised tokens, [S].
        num_anchors: Most anchors to draw.
        generator: Source of randomness.

    Returns:
        Sorted positions, at most `num_anchors` of them.
    """
    supervised = loss_mask.bool()
    eligible = supervised[:-1] & supervised[1:]
    eligible[0] = False  # a block needs a context row before its anchor
    positions = eligible.nonzero().squeeze(1)
    order = torch.randperm(len(positions), generator=generator)[:num_anchors]
    return positions[order].sort().values


def build_blocks(
    input_ids: Tensor, loss_mask: Tensor, row_anchors: list[Tensor], num_predictions: int, position_weights: Tensor
) -> Blocks:
    """
    Args:
        input_ids: Right-padded rows, [b, S].
        loss_mask: 1 on supervised tokens, 0 on padding, [b, S].
        row_anchors: Anchors of each row.
        num_predictions: K.
        position_weights: Decay over the predictions of a block, [K].
    """
    length = input_ids.shape[1]
    anchors = torch.nn.utils.rnn.pad_sequence(row_anchors, batch_first=True)
    used = torch.arange(anchors.shape[1]) < torch.tensor([len(row) for row in row_anchors])[:, None]
    prefix_positions = anchors[..., None] + torch.arange(num_predictions)
    label_positions = prefix_positions + 1
    inside = (label_positions < length) & used[..., None]

    def gather(values: Tensor, positions: Tensor) -> Tensor:
        flat = positions.clamp(max=length - 1).flatten(1)
        return values.gather(1, flat).view(positions.shape)

    # The mask is read at the label: a block may end in the middle of a supervised run.
    supervised = gather(loss_mask, label_positions) * inside
    return Blocks(
        anchors=anchors,
        prefix_ids=gather(input_ids, prefix_positions),
        labels=gather(input_ids, label_positions),
        weights=supervised * position_weights,
    )


def block_attention_mask(
    anchors: Tensor, attention_mask: Tensor, block_size: int, sliding_window: int | None = None
) -> Tensor:
    """
    What block slots see in training: context strictly before their own anchor, and their own block, both directions.

    Args:
        anchors: [b, N].
        attention_mask: 1 on real tokens of the context rows, [b, S].
        block_size: B.
        sliding_window: W; a slot then sees nothing W or more positions away.

    Returns:
        True where slot may look, [b, 1, N·B, S + N·B]; keys are the context rows, then all slots.
    """
    batch, blocks = anchors.shape
    slot_positions = (anchors[..., None] + torch.arange(block_size, device=anchors.device)).flatten(1)
    context_positions = torch.arange(attention_mask.shape[1], device=anchors.device)
    slot_anchors = anchors.repeat_interleave(block_size, dim=1)
    sees_context = (context_positions < slot_anchors[..., None]) & attention_mask[:, None].bool()
    block_of_slot = torch.arange(blocks, device=anchors.device).repeat_interleave(block_size)
    sees_slots = (block_of_slot[:, None] == block_of_slot).expand(batch, -1, -1)
    if sliding_window is not None:
        sees_context = sees_context & (slot_positions[..., None] - context_positions < sliding_window)
    return torch.cat([sees_context, sees_slots], dim=-1)[:, None]


__all__ = ["Blocks", "block_attention_mask", "build_blocks", "sample_anchors"]
