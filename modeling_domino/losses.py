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
from torch.autograd.function import once_differentiable
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
    chunk_size: int = 128,
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
        losses = torch.zeros(2, device=labels.device)
        correct = torch.zeros(2, len(labels), dtype=torch.bool, device=labels.device)
        counted = weights.nonzero().squeeze(1)
        buffer = torch.empty(min(chunk_size, len(counted)), len(w2), device=labels.device)

        def add(rows: Tensor) -> None:  # a function, so that nothing of a chunk lives on into the next
            with torch.enable_grad():
                h = hidden_states[rows].detach().requires_grad_()
                graph = lm_head(h)
            a, label, weight = features[rows], labels[rows, None], weights[rows, None]
            base = graph.detach().to(label.device)
            final = F.linear(a, w2).float().add_(base)
            if offset is not None:
                base, final = base + offset, final.add_(offset)
            minus = torch.full_like(weight, -1.0)
            each, correct[1, rows] = _softmax(final, label, out=buffer[: len(rows)])
            losses[1] += (each * weight).sum()
            d_final = buffer[: len(rows)].scatter_add_(1, label, minus).mul_(weight * (1 - lambda_base))
            each, correct[0, rows] = _softmax(base, label, out=final)
            losses[0] += (each * weight).sum()
            d_base = final.scatter_add_(1, label, minus).mul_(weight * lambda_base).add_(d_final)
            if gradients[0] is not None:
                (gradients[0][rows],) = torch.autograd.grad(graph, h, d_base.to(graph.device, graph.dtype))
            d_final = d_final.to(w2.dtype)
            if gradients[1] is not None:
                gradients[1][rows] = (d_final @ w2).to(features.dtype)
            if gradients[2] is not None:
                gradients[2].addmm_(d_final.T, a.to(w2.dtype))

        for rows in counted.split(chunk_size):
            add(rows)
        ctx.gradients = gradients
        (base_loss, final_loss), (base_correct, final_correct) = losses.unbind(), correct.unbind()
        ctx.mark_non_differentiable(base_loss, final_loss, base_correct, final_correct)
        loss = (1 - lambda_base) * final_loss + lambda_base * base_loss
        return loss, base_loss, final_loss, base_correct, final_correct

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient, *unused):
        if ctx.gradients is None:
            raise RuntimeError(
                "The gradients of this loss were handed out by an earlier backward pass: compute it again."
            )
        # In place: a second copy of the gradient of W2 would be most of the memory.
        formed = [None if tensor is None else tensor.mul_(gradient) for tensor in ctx.gradients]
        ctx.gradients = None
        return (*formed, None, None, None, None, None, None)


def _softmax(logits: Tensor, labels: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Writes the softmax to `out`; -log p of each label, [m, 1], and whether it is the most likely token, [m]."""
    highest, best = logits.max(dim=-1, keepdim=True)
    torch.softmax(logits, dim=-1, dtype=torch.float32, out=out)
    # The most likely token's probability does not underflow, as that of a label may.
    normalizers = highest.float() - out.gather(1, best).log()
    return normalizers - logits.gather(1, labels).float(), (best == labels)[:, 0]


__all__ = ["TwoTermLoss", "lambda_base", "position_weights", "sample_vocabulary", "two_term_loss"]
