"""What one `generate()` call did, round by round, and the numbers the field quotes about it."""

from dataclasses import dataclass, field


PER_ROUND = ("drafted_per_round", "accepted_per_round", "tokens_per_round")


@dataclass(frozen=True)
class LastGeneration:
    """
    Statistics of one call. A round is one draft and one verification; the token that the prefill gives belongs to
    none, so `new_tokens == 1 + sum(tokens_per_round)` in a row.

    Args:
        drafted_per_round: Tokens proposed in each round.
        accepted_per_round: Of these, how many survived verification.
        tokens_per_round: Tokens gained: the accepted ones, and the bonus token unless EOS, the length limit or a
            stopping criterion ended the round before it.
        path: Which loop ran: "loop", ours, or "assisted", transformers' own.
        reason: Why that one.
        draft_seconds, verify_seconds: Spent by each round on its draft, and on the pass of the target that verified it;
            calls that differ in these alone are equal. On an accelerator our loop waits once a round, at its end.
        rows: Of a batch, what each row did, in order. The numbers above are then those of all rows one after the other,
            and their `draft_seconds` and `verify_seconds` those of the longest, whose passes the others share.
    """

    drafted_per_round: tuple[int, ...]
    accepted_per_round: tuple[int, ...]
    tokens_per_round: tuple[int, ...]
    path: str
    reason: str
    draft_seconds: tuple[float, ...] = field(default=(), compare=False)
    verify_seconds: tuple[float, ...] = field(default=(), compare=False)
    rows: "tuple[LastGeneration, ...]" = ()

    @property
    def rounds(self) -> int:
        return len(self.tokens_per_round)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_round)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_round)

    @property
    def new_tokens(self) -> int:
        return max(len(self.rows), 1) + sum(self.tokens_per_round)

    @property
    def acceptance_length(self) -> float:
        """τ, mean tokens gained per round, the bonus token included; 0.0 when the prefill's token ended the call."""
        return sum(self.tokens_per_round) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Conditional: of the rounds that verified drafted token i with all before it accepted, the share that kept it."""
        rates = []
        for i in range(max(self.drafted_per_round, default=0)):
            rounds = zip(self.drafted_per_round, self.accepted_per_round, self.tokens_per_round, strict=True)
            # A round that ended inside its own accepted run (EOS, length) never judged the tokens after it.
            judged = [accepted > i for drafted, accepted, tokens in rounds if drafted > i and tokens > i]
            if not judged:
                break
            rates.append(sum(judged) / len(judged))
        return tuple(rates)


@dataclass
class RoundRecorder:
    """Collects rounds while a call runs."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)

    def add(self, drafted_ids: list[int], gained_ids: list[int], draft_seconds: float, verify_seconds: float) -> None:
        """One round: what was proposed, what the sequence gained, and how long both took."""
        agrees = [a == b for a, b in zip(drafted_ids, gained_ids, strict=False)]
        self.drafted.append(len(drafted_ids))
        self.accepted.append(agrees.index(False) if False in agrees else len(agrees))
        self.tokens.append(len(gained_ids))
        self.draft_seconds.append(draft_seconds)
        self.verify_seconds.append(verify_seconds)

    def summary(self, path: str, reason: str) -> LastGeneration:
        return LastGeneration(
            tuple(self.drafted),
            tuple(self.accepted),
            tuple(self.tokens),
            path,
            reason,
            tuple(self.draft_seconds),
            tuple(self.verify_seconds),
        )


def of_rows(rows: list[LastGeneration]) -> LastGeneration:
    """Statistics of a batch, or of its only row."""
    if len(rows) == 1:
        return rows[0]
    longest = max(rows, key=lambda row: row.rounds)
    return LastGeneration(
        *(tuple(n for row in rows for n in getattr(row, name)) for name in PER_ROUND),
        path=longest.path,
        reason=longest.reason,
        draft_seconds=longest.draft_seconds,
        verify_seconds=longest.verify_seconds,
        rows=tuple(rows),
    )


__all__ = ["LastGeneration", "RoundRecorder", "of_rows"]
