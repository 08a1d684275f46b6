"""Logits processors over several rows and positions at once, and the laws that a draft makes of processed logits."""

from collections.abc import Sized
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


# What these make of a row of scores depends on nothing else.
INDEPENDENT = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class BlockProcessors:
    """
    A list of processors, applied to blocks of scores: at once where the text before a position does not matter, else
    position by position.

    A processor may know rows by their number in the batch (prompts, allowed tokens), so it always gets the whole batch;
    of rows whose text has another length the answer is dropped.

    Args:
        processors: Of the call.
        rows: Rows of the batch.
    """

    def __init__(self, processors: LogitsProcessorList, rows: int):
        self._processors, self._rows = processors, rows

    def __len__(self) -> int:
        return len(self._processors)

    @property
    def read_text(self) -> bool:
        """Whether any of them looks at the text."""
        return any(type(processor) not in INDEPENDENT for processor in self._processors)

    def __call__(self, scores: Tensor, text: Tensor, rows: list[int], lengths: list[int]) -> Tensor:
        """
        Args:
            scores: Float32, [b, n, V]: those at `[r, i]` follow the first `lengths[r] + i` ids of the text.
            text: Ids of the whole batch, [rows, columns].
            rows: Of the batch, which `scores` has, b of them.
            lengths: Of their texts, b of them.
        """
        for processor in self._processors:
            if type(processor) in INDEPENDENT:
                scores = processor(None, scores.flatten(0, 1)).view_as(scores)
            else:
                scores = self._by_position(processor, scores, text, rows, lengths)
        return scores

    def _by_position(self, processor, scores: Tensor, text: Tensor, rows: list[int], lengths: list[int]) -> Tensor:
        positions = []
        for i in range(scores.shape[1]):
            given = scores[:, i]
            processed = given.clone()
            for length in sorted(set(lengths)):
                here = [place for place, own in enumerate(lengths) if own == length]
                if len(here) == self._rows:
                    processed = processor(text[:, : length + i], given)
                    continue
                whole = given.new_zeros(self._rows, given.shape[1])
                whole[rows] = given
                processed[here] = processor(text[:, : length + i], whole)[[rows[place] for place in here]]
            positions.append(processed)
        return torch.stack(positions, dim=1)


@contextmanager
def refuse_stateful(processors: list[LogitsProcessor]):
    """
    Watches whether processors change when they are called.

    Raises:
        ValueError: One did: it would count drafted tokens that are rejected later.
    """

    def state(value):
        if isinstance(value, Tensor):
            return id(value), value._version
        return (id(value), len(value)) if isinstance(value, Sized) and not isinstance(value, str) else value

    def states(processor) -> dict:
        return {name: state(value) for name, value in getattr(processor, "__dict__", {}).items()}

    before = [states(processor) for processor in processors]
    yield
    for processor, known in zip(processors, before, strict=True):
        now = states(processor)
        if changed := [name for name in now if name not in known or now[name] != known[name]]:
            raise ValueError(
                f"The logits processor `{type(processor).__name__}` keeps a state (`{changed[0]}` changed when it was "
                "called), which rejected drafts would spoil: let it depend on `input_ids` alone, or drop "
                "`assistant_model`."
            )


def sharpen(scores: Tensor, draft_temperature: float) -> Tensor:
    """Draft logits at a fraction of the target's temperature; 0 gives the one-hot law of the most likely token."""
    if draft_temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
    return scores / draft_temperature


__all__ = ["BlockProcessors", "refuse_stateful", "sharpen"]
