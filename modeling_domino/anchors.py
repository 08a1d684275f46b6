"""Training geometry: where blocks start, what they see, which tokens they predict (paper section 4.1).

A row of S tokens gives N blocks. The block of anchor a has slots [x_a, MASK, ...] at positions a..a+B-1, sees the
context rows strictly before a and its own slots, and its K predictions are x_{a+1}..x_{a+K}. A row may hold several
documents one after the other (packing): a block never looks at, and never predicts, a token of another one.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


PADDING = -1  # document id of padding


@dataclass
class Blocks:
    """
    The blocks of a batch; b rows, N blocks a row, K predictions a block.

    Args:
        anchors: Anchor positions, [b, N]; 0 where a row has fewer blocks.
        prefix_ids: x_a..x_{a+K-1}, what the head reads, [b, N, K].
        labels: x_{a+1}..x_{a+K}, [b, N, K].
        weights: Of each prediction in the loss, [b, N, K]; 0 beyond the document's end and on unsupervised labels.
    """

    anchors: Tensor
    prefix_ids: Tensor
    labels: Tensor
    weights: Tensor


def seeded_generator(seed: int, time: int, token_ids: list[int] | Tensor) -> torch.Generator:
    """
    Randomness for some tokens at a time: of a row's anchors in an epoch, or of the sampled vocabulary in a step.

    It depends on nothing else, neither on the batch a row comes in nor on the process, so every distribution of the
    same rows trains on the same blocks, and a resumed run on those of an uninterrupted one. A row is known by its
    tokens.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.int64).cpu().numpy().tobytes()
    digest = hashlib.blake2b(ids, digest_size=8, key=f"{seed}/{time}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def eligible_anchors(loss_mask: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """
    Positions where a block may start: their token and the next one are supervised, and context lies before them.

    Args:
        loss_mask: 1 on supervised tokens, [S].
        document_ids: Of each token, [S]; one document when None.

    Returns:
        Sorted positions.
    """
    supervised = loss_mask.bool()
    eligible = supervised[1:-1] & supervised[2:]
    if document_ids is not None:
        same = document_ids[1:] == document_ids[:-1]
        eligible = eligible & same[:-1] & same[1:]
    return eligible.nonzero().squeeze(1) + 1


def sample_anchors(
    loss_mask: Tensor, num_anchors: int, generator: torch.Generator, document_ids: Tensor | None = None
) -> Tensor:
    """At most `num_anchors` of the eligible anchors, drawn without replacement; sorted positions."""
    positions = eligible_anchors(loss_mask, document_ids)
    order = torch.randperm(len(positions), generator=generator)[:num_anchors]
    return positions[order].sort().values


def build_blocks(
    input_ids: Tensor,
    loss_mask: Tensor,
    row_anchors: list[Tensor],
    num_predictions: int,
    position_weights: Tensor,
    document_ids: Tensor | None = None,
) -> Blocks:
    """
    Args:
        input_ids: Right-padded rows, [b, S].
        loss_mask: 1 on supervised tokens, 0 on padding, [b, S].
        row_anchors: Anchors of each row. Without any in the whole batch, each row gets one block of weight 0, so that
            a process whose rows have none still takes part in every collective operation.
        num_predictions: K.
        position_weights: Decay over the predictions of a block, [K].
        document_ids: [b, S]; one document a row when None.
    """
    length = input_ids.shape[1]
    counts = torch.tensor([len(row) for row in row_anchors])
    anchors = torch.zeros(len(row_anchors), max(1, int(counts.max())), dtype=torch.long)
    for padded, row in zip(anchors, row_anchors, strict=True):
        padded[: len(row)] = row
    used = torch.arange(anchors.shape[1]) < counts[:, None]
    prefix_positions = anchors[..., None] + torch.arange(num_predictions)
    label_positions = prefix_positions + 1
    inside = (label_positions < length) & used[..., None]

    def gather(values: Tensor, positions: Tensor) -> Tensor:
        flat = positions.clamp(max=length - 1).flatten(1)
        return values.gather(1, flat).view(positions.shape)

    if document_ids is not None:
        inside = inside & (gather(document_ids, label_positions) == document_ids.gather(1, anchors)[..., None])
    # The mask is read at the label: a block may end in the middle of a supervised run.
    supervised = gather(loss_mask, label_positions) * inside
    return Blocks(
        anchors=anchors,
        prefix_ids=gather(input_ids, prefix_positions),
        labels=gather(input_ids, label_positions),
        weights=supervised * position_weights,
    )


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """0, 1, 2, ... from the start of each document, [b, S]."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def block_mask_mod(
    anchors: Tensor, document_ids: Tensor, block_size: int, sliding_window: int | None = None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """
    What block slots see in training: context of their document strictly before their own anchor, and their own block,
    both directions.

    Args:
        anchors: [b, N].
        document_ids: Of the context rows, `PADDING` where there is none, [b, C].
        block_size: B.
        sliding_window: W; a slot then sees nothing W or more positions away.

    Returns:
        A `mask_mod` as torch's flex_attention takes it: (row, head, slot, key) to whether the slot may look. Slots are
        those of all blocks, keys the context rows and then all slots.
    """
    context_rows = document_ids.shape[1]

    def may_look(row: Tensor, head: Tensor, slot: Tensor, key: Tensor) -> Tensor:
        anchor = anchors[row, slot // block_size]
        context = key.clamp(max=context_rows - 1)
        # The anchor itself may lie one row behind the context: the token before it always has its document.
        document = document_ids[row, (anchor - 1).clamp(min=0)]
        sees_context = (key < anchor) & (key < context_rows) & (document_ids[row, context] == document)
        sees_context = sees_context & (document != PADDING)
        if sliding_window is not None:
            sees_context = sees_context & (anchor + slot % block_size - key < sliding_window)
        own_block = (key >= context_rows) & ((key - context_rows) // block_size == slot // block_size)
        return sees_context | own_block

    return may_look


def block_attention_mask(
    anchors: Tensor, document_ids: Tensor, block_size: int, sliding_window: int | None = None
) -> Tensor:
    """`block_mask_mod` as a dense mask, [b, 1, N·B, C + N·B], for sdpa and eager attention."""
    batch, blocks = anchors.shape
    slots = blocks * block_size
    device = anchors.device
    row = torch.arange(batch, device=device)[:, None, None, None]
    slot = torch.arange(slots, device=device)[:, None]
    key = torch.arange(document_ids.shape[1] + slots, device=device)
    head = torch.zeros((), dtype=torch.long, device=device)
    return block_mask_mod(anchors, document_ids, block_size, sliding_window)(row, head, slot, key)


def flex_block_mask(anchors: Tensor, document_ids: Tensor, block_size: int, sliding_window: int | None = None):
    """`block_mask_mod` as the `BlockMask` of flex_attention, which skips what no slot of a tile sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, blocks = anchors.shape
    slots = blocks * block_size
    mask_mod = block_mask_mod(anchors, document_ids, block_size, sliding_window)
    keys = document_ids.shape[1] + slots
    return create_block_mask(mask_mod, B=batch, H=None, Q_LEN=slots, KV_LEN=keys, device=anchors.device)


__all__ = [
    "PADDING",
    "Blocks",
    "block_attention_mask",
    "block_mask_mod",
    "build_blocks",
    "eligible_anchors",
    "flex_block_mask",
    "positions_in_documents",
    "sample_anchors",
    "seeded_generator",
]
