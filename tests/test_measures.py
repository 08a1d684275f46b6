"""Averages, intervals and speedups, on numbers written by hand and on a simulated machine of known latencies."""

import pytest
import torch

from modeling_domino.measures import (
    Decoded,
    acceptance_by_position,
    acceptance_gain,
    acceptance_length,
    estimate,
    mean_acceptance_length,
    rounds_by_position,
    seconds_per_round,
    speedup,
    speedup_ratio,
    tokens_per_second,
)


def decoded(gained: int, rounds: int, tokens: int = 10, seconds: float = 1.0) -> Decoded:
    """`gained` tokens in so many rounds."""
    each = [gained // rounds] * rounds if rounds else []
    if each:
        each[0] += gained - sum(each)
    return Decoded("x", [[0] * tokens], seconds, gained=each)


class Machine:
    """
    Decodes by the clock: passes of known length, and a draft of which every token is right with a known chance.

    Args:
        chance: Of each drafted token, given that those before it were right.
        prompt, target, draft, verify: Seconds of a pass.
    """

    K = 4

    def __init__(self, chance: float, prompt=0.3, target=0.1, draft=0.03, verify=0.12, seed: int = 0):
        self.chance, self.prompt, self.target, self.draft, self.verify = chance, prompt, target, draft, verify
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def tau(self) -> float:
        return sum(self.chance**i for i in range(self.K + 1))

    def plain(self, number: int, tokens: int) -> Decoded:
        return Decoded(str(number), [[0] * tokens], self.prompt + (tokens - 1) * self.target)

    def drafted(self, number: int, rounds: int) -> Decoded:
        right = torch.rand(rounds, self.K, generator=self.generator) < self.chance
        accepted = right.long().cumprod(dim=1).sum(dim=1).tolist()
        gained = [n + 1 for n in accepted]
        return Decoded(
            str(number),
            [[0] * (1 + sum(gained))],
            self.prompt + rounds * (self.draft + self.verify),
            gained=gained,
            drafted=[self.K] * rounds,
            accepted=accepted,
            draft_seconds=rounds * self.draft,
            verify_seconds=rounds * self.verify,
        )

    def both(self, conversations: int) -> tuple[list[Decoded], list[Decoded]]:
        """The same texts with the draft and without."""
        lengths = torch.randint(5, 60, (conversations,), generator=self.generator).tolist()
        fast = [self.drafted(n, rounds) for n, rounds in enumerate(lengths)]
        return fast, [self.plain(n, d.new_tokens) for n, d in enumerate(fast)]


def test_both_averages_of_the_acceptance_length():
    results = [decoded(30, 10), decoded(4, 4), decoded(0, 0)]  # the last one ended with its prompt's pass
    assert acceptance_length(results).value == pytest.approx(34 / 14)
    assert mean_acceptance_length(results).value == pytest.approx((3 + 1) / 2)


def test_speed_is_pooled_over_tokens_and_seconds():
    fast = [decoded(1, 1, tokens=10, seconds=1.0), decoded(1, 1, tokens=30, seconds=2.0)]
    slow = [decoded(1, 1, tokens=10, seconds=4.0), decoded(1, 1, tokens=30, seconds=4.0)]
    assert speedup(fast, slow).value == pytest.approx((40 / 3) / (40 / 8))
    assert tokens_per_second(fast) == pytest.approx(40 / 3)


def test_a_simulated_machine_is_measured_as_it_was_made():
    machine = Machine(chance=0.7)
    fast, slow = machine.both(400)
    rounds, tokens = sum(d.rounds for d in fast), sum(d.new_tokens for d in fast)
    assert acceptance_length(fast).value == pytest.approx(machine.tau, rel=0.02)
    assert mean_acceptance_length(fast).value == pytest.approx(machine.tau, rel=0.02)
    assert acceptance_by_position(fast) == pytest.approx([0.7] * 4, abs=0.02)
    assert seconds_per_round(fast) == pytest.approx((0.03, 0.12))
    assert seconds_per_round(slow) is None and acceptance_by_position(slow) == rounds_by_position(slow) == []
    kept = [sum(accepted > i for d in fast for accepted in d.accepted) for i in range(4)]
    assert [r * n for r, n in zip(acceptance_by_position(fast), rounds_by_position(fast), strict=True)] == kept
    exact = (400 * 0.3 + (tokens - 400) * 0.1) / (400 * 0.3 + rounds * 0.15)
    assert speedup(fast, slow).value == pytest.approx(exact)
    assert exact == pytest.approx(machine.tau * 0.1 / 0.15, rel=0.1)  # prompts' passes, the same in both, dampen it


def test_intervals_of_simulated_machines_cover_the_truth_as_often_as_they_say():
    truth = Machine(chance=0.6).tau
    inside = 0
    for seed in range(200):
        tau = acceptance_length(Machine(chance=0.6, seed=seed).both(40)[0])
        inside += tau.low < truth < tau.high
    assert 0.88 <= inside / 200 <= 0.99  # 95 % asked for; a bootstrap of 40 is a little narrow


def test_a_difference_that_is_not_there_is_seldom_found_and_a_real_one_is():
    """The negative control: two machines alike, and one that drafts a little better."""
    found = {0.6: 0, 0.66: 0}
    for seed in range(100):
        reference, _ = Machine(chance=0.6, seed=seed).both(60)
        for chance in found:
            other = Machine(chance=chance, seed=1000 + seed).both(60)[0]
            gain = acceptance_gain(other, reference)
            found[chance] += not gain.low <= 1 <= gain.high
    assert found[0.6] <= 12 and found[0.66] >= 60


def test_a_draft_that_costs_more_than_it_gains_is_slower():
    fast, slow = Machine(chance=0.2, draft=0.1).both(50)
    assert speedup(fast, slow).high < 1


def test_speedups_of_two_machines_are_compared_by_their_own_baselines():
    quick = Machine(chance=0.7, seed=1)
    slow = Machine(chance=0.7, prompt=0.6, target=0.2, draft=0.06, verify=0.24, seed=1)  # half as fast in everything
    ratio = speedup_ratio(*quick.both(30), *slow.both(30))
    assert ratio == pytest.approx((1.0, 1.0, 1.0))
    better = speedup_ratio(*quick.both(30), *Machine(chance=0.5).both(30))
    assert better.low > 1


def test_intervals_of_uneven_conversations_cover_the_truth():
    generator = torch.Generator().manual_seed(3)
    inside = 0
    for _ in range(200):
        rounds = torch.randint(20, 60, (40,), generator=generator).double()
        gained = rounds * (2.5 + torch.randn(40, generator=generator, dtype=torch.float64))
        _, low, high = estimate(gained.tolist(), rounds.tolist(), resamples=400)
        inside += low < 2.5 < high
    assert 0.88 <= inside / 200 <= 0.99


def test_comparisons_are_paired():
    torch.manual_seed(0)
    rounds = torch.randint(10, 90, (30,)).tolist()
    one = [decoded(3 * n, 2 * n) for n in rounds]  # τ 1.5 whatever the conversation
    other = [decoded(3 * n, 2 * n) for n in rounds[::-1]]
    gain = acceptance_gain(one, other)
    assert gain.low == pytest.approx(1.0) and gain.high == pytest.approx(1.0)
    hard_and_easy = [decoded(n * (1 + n % 5), n) for n in rounds]
    better = [decoded(round(1.1 * sum(d.gained) * 100), d.rounds * 100) for d in hard_and_easy]
    gain = acceptance_gain(better, hard_and_easy)
    assert gain.low == pytest.approx(1.1, abs=1e-3) and gain.high == pytest.approx(1.1, abs=1e-3)
    assert acceptance_length(hard_and_easy).high - acceptance_length(hard_and_easy).low > 0.5


@pytest.mark.parametrize("measure", [acceptance_length, mean_acceptance_length])
def test_nothing_to_divide_by_is_an_error(measure):
    with pytest.raises(ValueError, match="Nothing to divide by"):
        measure([decoded(0, 0)])


def test_an_estimate_reads_as_people_write_it():
    assert str(estimate([4, 4], [2, 2])) == "2.00 [2.00, 2.00]"
