"""Acceptance length and speed as generate() gives them: the same conversations with and without a draft, in turns.

τ is pooled over rounds (all tokens gained by rounds, over all rounds) and counts the bonus token; the token that a
prompt's own pass gives belongs to no round. Intervals are percentiles of a bootstrap over conversations.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import chat_ids


@dataclass(frozen=True)
class Decoded:
    """
    One conversation, decoded in one way.

    Args:
        id: Of the conversation.
        token_ids: New tokens of each turn.
        seconds: In generate(), over all turns.
        rounds: Drafts verified; 0 without a draft.
        gained: Tokens those rounds gained, bonus tokens included.
    """

    id: str
    token_ids: list[list[int]]
    seconds: float
    rounds: int
    gained: int

    @property
    def new_tokens(self) -> int:
        return sum(len(turn) for turn in self.token_ids)


class Estimate(NamedTuple):
    """A ratio and the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def decode_conversation(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: dict,
    draft=None,
    *,
    head: bool = True,
    **options,
) -> Decoded:
    """
    Answers every user turn, each after the answers to those before it.

    Args:
        target, tokenizer: The model and its tokenizer.
        conversation: `id` and `messages`, as from `read_conversations`; answers in it are replaced.
        draft: Assists; None decodes plainly.
        head: False switches the draft's correction head off.
        options: Of generate().
    """
    messages, answers, seconds, rounds, gained = [], [], 0.0, 0, 0
    with nullcontext() if draft is None or head else draft.head_disabled():
        for message in conversation["messages"]:
            if message["role"] == "assistant":
                continue
            messages.append(message)
            if message["role"] != "user":
                continue
            ids = torch.tensor([chat_ids(tokenizer, messages)], device=target.device)
            _wait(target)
            started = time.perf_counter()
            output = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)
            _wait(target)
            seconds += time.perf_counter() - started
            answers.append(output[0, ids.shape[1] :].tolist())
            messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1], skip_special_tokens=True)})
            if draft is not None:
                rounds += draft.last_generation.rounds
                gained += sum(draft.last_generation.tokens_per_round)
    return Decoded(conversation["id"], answers, seconds, rounds, gained)


def decode_alternately(
    conversations: list[dict], ways: dict[str, Callable[[dict], Decoded]], progress: Callable = iter
) -> dict[str, list[Decoded]]:
    """Every conversation in every way before the next one; the order of the ways turns with each conversation."""
    results: dict[str, list[Decoded]] = {name: [] for name in ways}
    names = list(ways)
    for index, conversation in enumerate(progress(conversations)):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(ways[name](conversation))
    return results


def acceptance_length(decoded: list[Decoded]) -> Estimate:
    """τ, pooled over all rounds."""
    return estimate([d.gained for d in decoded], [d.rounds for d in decoded])


def mean_acceptance_length(decoded: list[Decoded]) -> float:
    """Mean over conversations of each one's own τ: the other average in the literature."""
    own = [d.gained / d.rounds for d in decoded if d.rounds]
    return sum(own) / len(own)


def acceptance_gain(one: list[Decoded], other: list[Decoded]) -> Estimate:
    """τ of `one` over τ of `other`, both pooled, on the same conversations."""
    return estimate(
        [d.gained for d in one], [d.rounds for d in one], [d.gained for d in other], [d.rounds for d in other]
    )


def speedup(one: list[Decoded], other: list[Decoded]) -> Estimate:
    """Tokens per second of `one` over those of `other`, on the same conversations."""
    return estimate(
        [d.new_tokens for d in one],
        [d.seconds for d in one],
        [d.new_tokens for d in other],
        [d.seconds for d in other],
    )


def estimate(a, b, c=None, d=None, *, resamples: int = 4000, seed: int = 0) -> Estimate:
    """
    (Σa / Σb), divided by (Σc / Σd) where these are given, with its 95 % percentile interval.

    Args:
        a, b, c, d: One number per conversation; a resample takes the same conversations from all of them.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        ValueError: A denominator is 0.
    """
    columns = torch.tensor([column for column in (a, b, c, d) if column is not None], dtype=torch.float64)
    if bool((columns[1:].sum(dim=1) == 0).any()):
        raise ValueError("Nothing to divide by: no round, token or second in these conversations.")
    count = columns.shape[1]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(count, (resamples, count), generator=generator)
    sums = torch.stack([column[chosen].sum(dim=1) for column in columns])
    low, high = torch.nanquantile(_ratio(sums), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(_ratio(columns.sum(dim=1)).item(), low, high)


def _ratio(sums: torch.Tensor) -> torch.Tensor:
    first = sums[0] / sums[1]
    return first if len(sums) == 2 else first / (sums[2] / sums[3])


def _wait(target: PreTrainedModel) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)


__all__ = [
    "Decoded",
    "Estimate",
    "acceptance_gain",
    "acceptance_length",
    "decode_alternately",
    "decode_conversation",
    "estimate",
    "mean_acceptance_length",
    "speedup",
]
