"""The base-anchored curriculum (paper section 4.2): L = (1-λ)·CE(final) + λ·CE(base), λ from 1 to 0.

Final logits are base + W2·a, with a = SiLU(W1 [H ; S]), so both losses share the product with the target's head. It
is taken in chunks of positions, and each chunk's gradients are formed at once: nothing of size [positions, V] outlives
its chunk, and the frozen head is multiplied twice, not three times as when a chunk is recomputed in the backward pass.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class TwoTermLoss(NamedTuple):
    """
    Args:
        loss: (1-λ)·final + λ·base, a scalar that can be differentiated.
        base_loss, final_loss: Its two terms, scalars without gradients.
        base_correct, final_correct: Whether the label is the most likely token, [M].
    """

    loss: Tensor
    base_loss: Tensor
    final_loss: Tensor
    base_correct: Tensor
    final_correct: Tensor


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
    hidden_states: Tensor,
    features: Tensor,
    w2: Tensor,
    lm_head: Callable[[Tensor], Tensor],
    labels: Tensor,
    weights: Tensor,
    lambda_base: float,
    normalizer: Tensor,
    *,
    offset: Tensor | None = None,
    chunk_size: int = 256,
) -> TwoTermLoss:
    """
    Both cross-entropies over M positions, `chunk_size` of them at a time.

    Args:
        hidden_states: H of each position, [M, hidden].
        features: a = SiLU(W1 [H ; S]), [M, R]; zeros where the base logits stay as they are (the first P predictions).
        w2: [V, R].
        lm_head: The target's frozen head, [m, hidden] to base logits [m, V].
        labels: Rows of the logits, [M].
        weights: [M]; positions of weight 0 are left out of the products.
        lambda_base: λ.
        normalizer: What the weighted sum is divided by, a scalar.
        offset: Added to all logits, [V] (see `sample_vocabulary`).
        chunk_size: Positions whose logits are alive at once.

    Returns:
        `TwoTermLoss`; a position of weight 0 counts as not correct.
    """
    scaled = weights / normalizer
    return TwoTermLoss(
        *_ChunkedLoss.apply(hidden_states, features, w2, lm_head, labels, scaled, lambda_base, offset, chunk_size)
    )


class _ChunkedLoss(torch.autograd.Function):
    """
    For weights w (normalised), one-hot labels y and p the softmax of either logits:

        d loss / d final = (1-λ)·w·(p_final - y)
        d loss / d base  = λ·w·(p_base - y) + d loss / d final

    The head is the target's own module, so the way from base logits back to H is left to autograd.
    """

    @staticmethod
    def forward(ctx, hidden_states, features, w2, lm_head, labels, weights, lambda_base, offset, chunk_size):
        gradients = [
            torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in (hidden_states, features, w2)
        ]
        base_loss, final_loss = torch.zeros(2, device=labels.device).unbind()
        correct = torch.zeros(2, len(labels), dtype=torch.bool, device=labels.device)
        for rows in weights.nonzero().squeeze(1).split(chunk_size):
            with torch.enable_grad():
                h = hidden_states[rows].detach().requires_grad_()
                graph = lm_head(h)
            a, label, weight = features[rows], labels[rows, None], weights[rows, None]
            base = graph.detach().to(label.device).float()
            final = base + F.linear(a, w2)
            if offset is not None:
                base, final = base + offset, final + offset
            correct[:, rows] = torch.stack([base.argmax(-1), final.argmax(-1)]) == label[:, 0]
            base_losses, base = _softmax_gradient(base, label)
            final_losses, final = _softmax_gradient(final, label)
            base_loss += (base_losses * weight).sum()
            final_loss += (final_losses * weight).sum()
            final *= weight * (1 - lambda_base)
            base.mul_(weight * lambda_base).add_(final)
            if gradients[0] is not None:
                (gradients[0][rows],) = torch.autograd.grad(graph, h, base.to(graph.device, graph.dtype))
            final = final.to(w2.dtype)
            if gradients[1] is not None:
                gradients[1][rows] = (final @ w2).to(features.dtype)
            if gradients[2] is not None:
                gradients[2] += final.T @ a.to(w2.dtype)
        ctx.save_for_backward(*gradients)
        base_correct, final_correct = correct.unbind()
        ctx.mark_non_differentiable(base_loss, final_loss, base_correct, final_correct)
        loss = (1 - lambda_base) * final_loss + lambda_base * base_loss
        return loss, base_loss, final_loss, base_correct, final_correct

    @staticmethod
    def backward(ctx, gradient, *unused):
        formed = [None if tensor is None else tensor * gradient for tensor in ctx.saved_tensors]
        return (*formed, None, None, None, None, None, None)


def _softmax_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each label, [m, 1], and p - y, [m, V]."""
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    losses = normalizers - logits.gather(1, labels)
    gradient = (logits - normalizers).exp_()
    return losses, gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -1.0))


__all__ = ["TwoTermLoss", "lambda_base", "position_weights", "sample_vocabulary", "two_term_loss"]
