"""What decoded conversations say: both averages of τ, acceptance by position, times, speedup, and their intervals.

A round is one draft and the pass of the target that verifies it; τ is tokens gained per round, bonus token included. The
prompt's own pass belongs to no round, nor does what it gives. Intervals are percentiles of a bootstrap over
conversations, paired wherever two ways of decoding are compared.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .statistics_domino import LastGeneration


@dataclass(frozen=True)
class Decoded:
    """
    One conversation, decoded in one way.

    Args:
        id: Of the conversation.
        token_ids: New tokens of each turn.
        seconds: In generate(), over all turns.
        gained: Tokens of each round, over all turns; empty without a draft.
        drafted, accepted: Tokens proposed in each round, and kept of them; empty where the way does not say.
        draft_seconds, verify_seconds: Of all rounds; None where the way does not say.
    """

    id: str
    token_ids: list[list[int]]
    seconds: float
    gained: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def new_tokens(self) -> int:
        return sum(len(turn) for turn in self.token_ids)

    @property
    def rounds(self) -> int:
        return len(self.gained)


class Estimate(NamedTuple):
    """A ratio and the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def acceptance_length(decoded: list[Decoded]) -> Estimate:
    """τ, pooled over all rounds: long answers weigh more."""
    return estimate(*_rounds(decoded))


def mean_acceptance_length(decoded: list[Decoded]) -> Estimate:
    """Mean over conversations of each one's own τ: the other average in the literature."""
    own = [sum(d.gained) / d.rounds for d in decoded if d.rounds]
    return estimate(own, [1] * len(own))


def acceptance_gain(one: list[Decoded], other: list[Decoded]) -> Estimate:
    """τ of `one` over τ of `other`, both pooled, on the same conversations."""
    return estimate(*_rounds(one), *_rounds(other))


def speedup(one: list[Decoded], other: list[Decoded]) -> Estimate:
    """Tokens per second of `one` over those of `other`, on the same conversations."""
    return estimate(*_speed(one), *_speed(other))


def speedup_ratio(
    one: list[Decoded], plain_one: list[Decoded], other: list[Decoded], plain_other: list[Decoded]
) -> Estimate:
    """Speedup of `one` over its own plain run, over that of `other`: what two machines or two days are compared by."""
    return estimate(*_speed(one), *_speed(plain_one), *_speed(other), *reversed(_speed(plain_other)))


def tokens_per_second(decoded: list[Decoded]) -> float:
    """Of all conversations together, the passes over their prompts included."""
    return sum(d.new_tokens for d in decoded) / sum(d.seconds for d in decoded)


def acceptance_by_position(decoded: list[Decoded]) -> list[float]:
    """Share of the rounds that kept drafted token i, of those that judged it: all before it accepted."""
    return list(_together(decoded).acceptance_by_position)


def rounds_by_position(decoded: list[Decoded]) -> list[int]:
    """How many rounds judged drafted token i: of such numbers are the shares of `acceptance_by_position`."""
    together = _together(decoded)
    drafted, gained = together.drafted_per_round, together.tokens_per_round
    positions = range(len(together.acceptance_by_position))
    return [sum(d > i and g > i for d, g in zip(drafted, gained, strict=True)) for i in positions]


def _together(decoded: list[Decoded]) -> LastGeneration:
    def rounds(name: str) -> tuple[int, ...]:
        return tuple(number for d in decoded for number in getattr(d, name))

    return LastGeneration(rounds("drafted"), rounds("accepted"), rounds("gained"), path="", reason="")


def seconds_per_round(decoded: list[Decoded]) -> tuple[float, float] | None:
    """Mean seconds that a round spends on its draft and on verifying it; None where the way does not say."""
    timed = [d for d in decoded if d.draft_seconds is not None and d.rounds]
    if not timed:
        return None
    rounds = sum(d.rounds for d in timed)
    return sum(d.draft_seconds for d in timed) / rounds, sum(d.verify_seconds for d in timed) / rounds


def _rounds(decoded: list[Decoded]) -> tuple[list[int], list[int]]:
    return [sum(d.gained) for d in decoded], [d.rounds for d in decoded]


def _speed(decoded: list[Decoded]) -> tuple[list[int], list[float]]:
    return [d.new_tokens for d in decoded], [d.seconds for d in decoded]


def estimate(a, b, *more, resamples: int = 4000, seed: int = 0) -> Estimate:
    """
    Σa / Σb, divided by Σc / Σd, by Σe / Σf and so on for further pairs, with its 95 % percentile interval.

    Args:
        a, b, more: One number per conversation; a resample takes the same conversations from all of them.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        ValueError: A sum to divide by is 0.
    """
    columns = torch.tensor([a, b, *more], dtype=torch.float64)
    if bool((columns[1:].sum(dim=1) == 0).any()):
        raise ValueError("Nothing to divide by: no round, token or second in these conversations.")
    count = columns.shape[1]
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(count, (resamples, count), generator=generator)
    sums = torch.stack([column[chosen].sum(dim=1) for column in columns])
    low, high = torch.nanquantile(_ratio(sums), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(_ratio(columns.sum(dim=1)).item(), low, high)


def _ratio(sums: torch.Tensor) -> torch.Tensor:
    first, *others = sums[0::2] / sums[1::2]
    return first / torch.stack(others).prod(dim=0) if others else first


__all__ = [
    "Decoded",
    "Estimate",
    "acceptance_by_position",
    "acceptance_gain",
    "acceptance_length",
    "estimate",
    "mean_acceptance_length",
    "rounds_by_position",
    "seconds_per_round",
    "speedup",
    "speedup_ratio",
    "tokens_per_second",
]
