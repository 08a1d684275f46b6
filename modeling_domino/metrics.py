"""What training logs: means over all micro-batches and processes since the last log, never of the last batch alone."""

import time

import torch
from torch import Tensor

from .losses import TwoTermLoss


class WindowMetrics:
    """What is logged, summed over micro-batches as it comes and over processes when it is taken."""

    def __init__(self):
        self._tensors: list[Tensor] = []
        self._since = time.perf_counter()

    def add(self, losses: TwoTermLoss, weights: Tensor, normalizer: Tensor) -> None:
        """Takes in a micro-batch: its losses, the weights [b, N, K] of its predictions, and what they were divided by."""
        valid = (weights > 0).flatten(0, 1)  # [blocks, K]
        runs = []
        for correct in (losses.base_correct, losses.final_correct):
            runs.append((correct.view_as(valid) & valid).long().cumprod(dim=1))
        reached = torch.cat([valid[:, :1], runs[1][:, :-1].bool() & valid[:, 1:]], dim=1)
        scalars = [
            losses.base_loss.detach() * normalizer,
            losses.final_loss.detach() * normalizer,
            weights.sum(),
            valid.sum(),
            valid[:, 0].sum(),
            losses.base_correct.sum(),
            losses.final_correct.sum(),
            runs[0].sum(),
            runs[1].sum(),
            ~valid.any(),
        ]
        scalars = torch.stack([value.double() for value in scalars])
        self._tensors.append(torch.cat([scalars, reached.sum(0), runs[1].sum(0)]))

    def take(self, accelerator) -> dict[str, float]:
        """The means since the last call, the same on every process; nothing when there was no micro-batch."""
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        if not self._tensors:
            return {}
        sums, self._tensors = torch.stack(self._tensors).sum(0), []
        sums = accelerator.gather(sums[None]).sum(0).tolist()
        base, final, weight, valid, blocks, base_correct, correct, base_run, run, empty = sums[:10]
        positions = len(sums[10:]) // 2
        reached, accepted = sums[10 : 10 + positions], sums[10 + positions :]
        return {
            "base_loss": base / max(weight, 1e-9),
            "final_loss": final / max(weight, 1e-9),
            "base_accuracy": base_correct / max(valid, 1),
            "accuracy": correct / max(valid, 1),
            "base_accept_len": 1 + base_run / max(blocks, 1),
            "accept_len": 1 + run / max(blocks, 1),
            "predictions_per_second": valid / seconds,
            **({"batches_without_anchors": empty} if empty else {}),
            **{f"acceptance_{i + 1}": a / r for i, (a, r) in enumerate(zip(accepted, reached, strict=True)) if r},
        }


__all__ = ["WindowMetrics"]
