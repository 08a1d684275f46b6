"""How many drafted tokens to verify: as many as pay on this machine, by the draft's own confidence.

    chance_j = c_1 · ... · c_j       that slot j will be accepted, c_i the largest probability of the law at slot i
    cost     T(n) = base + slope · n        seconds of a verification of n drafted tokens, fitted while decoding
    slot j is verified while    sum of chance_j over all rows  >=  (tokens a second) · slope

A token more must bring, on average, what its time brings elsewhere (a stopping rule of renewal-reward processes). Whether
slot j is verified depends on the tokens before it and on the law at it, never on the token drawn there or on what follows:
a token left out for its own low probability would bias sampling.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from torch import Tensor


KEPT = 9  # measurements of each length that count
WARM = 3  # rounds of whole blocks, and then of half ones, before the cost is fitted


def law_confidence(scores: Tensor) -> Tensor:
    """The largest probability of each law, [b], from its logits [b, V]."""
    scores = scores.float()
    return (scores.amax(dim=-1) - scores.logsumexp(dim=-1)).exp()


@dataclass
class RoundCost:
    """Seconds of verifications by drafted tokens, and how fast texts grow; kept from call to call."""

    seconds: dict[int, deque] = field(default_factory=dict)
    tokens_per_second: float = 0.0

    def add(self, drafted: int, gained: int, verify_seconds: float, round_seconds: float) -> None:
        """One round: tokens verified in each row, tokens that all rows gained, and its times."""
        self.seconds.setdefault(drafted, deque(maxlen=KEPT)).append(verify_seconds)
        rate = gained / round_seconds
        share = 0.1 if self.tokens_per_second else 1.0
        self.tokens_per_second += share * (rate - self.tokens_per_second)

    @property
    def slope(self) -> float | None:
        """Seconds that one more drafted token takes, by least squares over the medians; None before it is known."""
        known = [(n, median(times), len(times)) for n, times in self.seconds.items() if len(times) >= WARM]
        if len(known) < 2:
            return None
        total = sum(weight for *_, weight in known)
        mean_n = sum(n * weight for n, _, weight in known) / total
        mean_t = sum(time * weight for _, time, weight in known) / total
        spread = sum(weight * (n - mean_n) ** 2 for n, _, weight in known)
        return max(0.0, sum(weight * (n - mean_n) * (time - mean_t) for n, time, weight in known) / spread)


class LengthChooser:
    """
    Args:
        cost: Of rounds of this many rows of this target.
    """

    def __init__(self, cost: RoundCost):
        self.cost = cost

    def choose(self, chances: list[float]) -> int:
        """
        Args:
            chances: Of each slot, that it is accepted with all before it, summed over the rows.

        Returns:
            How many slots to verify, from none to all. Slot j counts or not by `chances[: j + 1]` alone.
        """
        slope = self.cost.slope
        if slope is not None:
            least = self.cost.tokens_per_second * slope
            return next((j for j, chance in enumerate(chances) if chance < least), len(chances))
        # A slope needs a second length: half a block, in rounds whose other half is no sure gain.
        half = (len(chances) + 1) // 2
        whole_is_known = max((len(times) for n, times in self.cost.seconds.items() if n > half), default=0) >= WARM
        if whole_is_known and half < len(chances) and chances[half] < 0.7 * chances[0]:
            return half
        return len(chances)


__all__ = ["LengthChooser", "RoundCost", "law_confidence"]
