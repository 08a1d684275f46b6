"""How many drafted tokens are verified: what pays by a fitted cost, and never by the token that was drawn."""

import pickle

import pytest
import torch
from conftest import make_draft, make_rigged, make_target
from test_sampling import (
    DRAWS,
    IMPOSSIBLE,
    LIKELY,
    SETTINGS,
    SMALL_DRAFT,
    Tables,
    assert_law,
    sample,
    warpers,
)
from test_verification import propose, random_numbers

from modeling_domino.length_domino import KEPT, WARM, LengthChooser, RoundCost, law_confidence
from modeling_domino.verification_domino import accept_sampled


NEW = 24


def fitted(slope: float, rate: float, base: float = 0.01, lengths=(5, 3)) -> RoundCost:
    """A cost that has seen verifications of those lengths, and texts that grow at that rate."""
    cost = RoundCost()
    for n in lengths:
        for _ in range(KEPT):
            cost.add(n, 1, base + slope * n, 1 / rate)
    return cost


def test_the_slope_is_fitted_to_medians():
    cost = fitted(slope=0.002, rate=50.0)
    assert cost.slope == pytest.approx(0.002) and cost.tokens_per_second == pytest.approx(50.0)
    for _ in range(KEPT // 2):  # something else ran on the machine
        cost.add(5, 1, 3.0, 1 / 50)
    assert cost.slope == pytest.approx(0.002)
    assert RoundCost().slope is None and fitted(0.1, 1.0, lengths=(5,)).slope is None
    assert fitted(slope=-0.1, rate=1.0).slope == 0.0  # noise: a longer pass is not cheaper


@pytest.mark.parametrize(
    "chances, least, length",
    [
        ([0.9, 0.6, 0.3, 0.1], 0.2, 3),
        ([0.9, 0.6, 0.3, 0.1], 0.0, 4),
        ([0.9, 0.6, 0.3, 0.1], 0.95, 0),
        ([2.7, 1.1, 0.4], 1.0, 2),  # of three rows
    ],
)
def test_slots_that_bring_more_than_their_time_are_verified(chances, least, length):
    assert LengthChooser(fitted(slope=least / 50, rate=50.0)).choose(chances) == length


def test_half_blocks_are_measured_where_the_other_half_is_no_sure_gain():
    cost = RoundCost()
    chooser, unsure, sure = LengthChooser(cost), [0.9, 0.7, 0.6, 0.3, 0.2], [0.99] * 5
    lengths = []
    for chances in [unsure] * WARM + [sure] + [unsure] * WARM:
        lengths.append(chooser.choose(chances))
        cost.add(lengths[-1], 1, 0.01, 0.02)
    assert lengths == [5] * WARM + [5] + [3] * WARM
    assert cost.slope == 0.0 and chooser.choose(unsure) == 5


@pytest.mark.parametrize("cost", [RoundCost(), fitted(0.01, 40.0), fitted(0.1, 1.0, lengths=(5,))])
def test_a_slot_depends_on_nothing_behind_it(cost):
    torch.manual_seed(0)
    chooser = LengthChooser(cost)
    for _ in range(200):
        chances, others = (torch.rand(5).cumprod(0).tolist() for _ in range(2))
        for slot in range(5):
            changed = chances[: slot + 1] + [chances[slot] * other for other in others[slot + 1 :]]
            assert (chooser.choose(chances) > slot) == (chooser.choose(changed) > slot)


def lengths_by(tables: Tables, drafted: torch.Tensor, q_logits: torch.Tensor, by: str) -> torch.Tensor:
    """Tokens of each row that the chooser has verified, [n]."""
    laws = q_logits.softmax(-1)
    by_law = law_confidence(q_logits.flatten(0, 1)).view(-1, 2)
    torch.testing.assert_close(by_law, laws.amax(-1))
    confidence = by_law if by == "law" else laws.gather(2, drafted[..., None])[..., 0]
    chances = confidence.cumprod(1)
    least = float(chances[:, 1].min() + chances[:, 1].max()) / 2  # both lengths come
    chooser = LengthChooser(fitted(slope=least / 50, rate=50.0))
    return torch.tensor([chooser.choose(row) for row in chances.tolist()])


@pytest.mark.parametrize("by", ["law", "drawn token"])
@pytest.mark.parametrize("setting", SETTINGS[:2])
def test_lengths_by_the_law_keep_the_law_and_by_the_drawn_token_do_not(setting, by):
    tables = Tables(*setting)
    torch.manual_seed(0)
    drafted, p_logits, q_logits = propose(tables)
    counts = lengths_by(tables, drafted, q_logits, by)
    assert len(set(counts.tolist())) > 1
    accepted, tokens = accept_sampled(drafted, counts, p_logits, q_logits, *random_numbers(DRAWS, 2))
    second = torch.where(accepted > 0, tokens[:, 1], sample(tables.second[tokens[:, 0]]))
    p_values = tables.p_values(torch.stack([tokens[:, 0], second], dim=1))
    assert min(p_values) > LIKELY if by == "law" else min(p_values) < IMPOSSIBLE


def pretend(monkeypatch, slope: float, rate: float) -> None:
    """Every cost says so, whatever the clock says."""
    monkeypatch.setattr(RoundCost, "slope", slope)
    monkeypatch.setattr(RoundCost, "add", lambda self, *measured: setattr(self, "tokens_per_second", rate))


@pytest.mark.parametrize("right", [0, 3, 5])
@pytest.mark.parametrize("least", [0.0, 0.3, 2.0])
def test_greedy_texts_do_not_depend_on_it(right, least, target, prompt, monkeypatch):
    pretend(monkeypatch, least, 1.0)
    text = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    for draft in (make_rigged(target, text[0], right), make_draft(target)):
        draft.decoding.adaptive_length = None
        output = target.generate(prompt, assistant_model=draft, max_new_tokens=NEW, do_sample=False)
        assert output.tolist() == text.tolist()
        first, *others = draft.last_generation.drafted_per_round
        assert first == 5  # nothing was measured before it
        if least == 2.0:
            assert set(others) == {0}
        elif least == 0.0:
            assert set(others[:-5]) <= {5}


def test_it_is_for_greedy_calls_of_no_chosen_length(target, prompt, monkeypatch):
    pretend(monkeypatch, 2.0, 1.0)
    draft = make_draft(target)
    draft.decoding.adaptive_length = None

    def longest(**options) -> int:
        target.generate(prompt, assistant_model=draft, max_new_tokens=NEW, **{"do_sample": False, **options})
        return max(draft.last_generation.drafted_per_round[1:])

    assert longest() == 0
    assert longest(num_assistant_tokens=4) == 4
    assert longest(assistant_confidence_threshold=1e-9) == 5
    assert longest(do_sample=True) == 5
    draft.decoding.adaptive_length = True
    assert longest(do_sample=True) == 0 and longest(num_assistant_tokens=4) == 4
    draft.decoding.adaptive_length = False
    assert longest() == 5


def test_what_was_measured_is_kept_for_the_next_call_of_as_many_rows(target, prompt):
    draft = make_draft(target)
    draft.decoding.adaptive_length = None
    for rows in (1, 1, 3):
        target.generate(prompt.repeat(rows, 1), assistant_model=draft, max_new_tokens=NEW, do_sample=False)
    assert sorted(key[-1] for key in draft.round_costs) == [1, 3]
    assert all(cost.tokens_per_second > 0 for cost in draft.round_costs.values())
    assert pickle.loads(pickle.dumps(draft)).round_costs == draft.round_costs


def test_sampling_with_lengths_that_adapt_has_the_law_of_the_target(monkeypatch):
    calls = 1_000
    pretend(monkeypatch, 0.3, 50.0)  # of 50 rows
    target = make_target(vocab_size=12, num_hidden_layers=2, initializer_range=0.15)
    draft = make_draft(target, **SMALL_DRAFT)
    draft.decoding.adaptive_length = True
    prompt = torch.tensor([[3, 7, 10, 5]])
    torch.manual_seed(0)
    copies, lengths, texts = prompt.repeat(50, 1), set(), []
    for _ in range(calls // 50):
        output = target.generate(copies, assistant_model=draft, do_sample=True, top_k=8, max_new_tokens=4)
        texts.append(output[:, 4:])
        lengths |= set(draft.last_generation.drafted_per_round)
    texts = torch.cat(texts)
    assert len(lengths) > 1
    assert_law(texts, target, prompt, warpers(1.0, 8, None))
