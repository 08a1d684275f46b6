"""The base-anchored curriculum (paper section 4.2): L = (1-λ)·CE(final) + λ·CE(base), λ from 1 to 0."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def position_weights(num_predictions: int, gamma: float | None) -> Tensor:
    """exp(-i/γ) for the i-th prediction of a block, [K]; all ones when γ is None (decay off)."""
    index = torch.arange(num_predictions, dtype=torch.float32)
    return torch.ones_like(index) if gamma is None else torch.exp(-index / gamma)


def lambda_base(step: int, total_steps: int, start: float, decay_ratio: float) -> float:
    """
    Weight of the base loss at an optimizer step.

    Args:
        step: Finished optimizer steps.
        total_steps: Optimizer steps of the whole training.
        start: λ at step 0.
        decay_ratio: Share of all steps over which λ falls linearly to 0.
    """
    decay_steps = max(1, int(total_steps * decay_ratio))
    return start * max(0.0, 1.0 - step / decay_steps)


def sample_vocabulary(labels: Tensor, vocab_size: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """
    Token ids for a sampled softmax (Jean et al. 2015, arXiv 1412.2007): every label, and others drawn uniformly.

    Args:
        labels: Token ids of any shape.
        vocab_size: V.
        size: Ids to draw beside the labels.
        generator: Source of randomness.

    Returns:
        M sorted ids, and what to add to their logits so that the softmax over them estimates the full one, [M].
    """
    wanted = labels.unique()
    others = torch.ones(vocab_size, dtype=torch.bool)
    others[wanted.cpu()] = False
    others = others.nonzero().squeeze(1)
    drawn = others[torch.randperm(len(others), generator=generator)[:size]].to(wanted.device)
    ids, order = torch.cat([wanted, drawn]).sort()
    offset = torch.zeros(len(ids), device=ids.device)
    if len(drawn):
        offset[order >= len(wanted)] = math.log(len(others) / len(drawn))
    return ids, offset


def two_term_loss(
    base_logits: Tensor, logits: Tensor, labels: Tensor, weights: Tensor, lambda_base: float, normalizer: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Args:
        base_logits, logits: [b, N, K, V].
        labels: [b, N, K].
        weights: [b, N, K].
        lambda_base: λ.
        normalizer: Sum of weights over the whole optimizer step, a scalar.

    Returns:
        Loss, base loss and final loss, scalars.
    """

    def cross_entropy(scores: Tensor) -> Tensor:
        losses = F.cross_entropy(scores.flatten(0, 2).float(), labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum() / normalizer

    base, final = cross_entropy(base_logits), cross_entropy(logits)
    return (1 - lambda_base) * final + lambda_base * base, base, final


__all__ = ["lambda_base", "position_weights", "sample_vocabulary", "two_term_loss"]
