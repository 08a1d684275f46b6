"""Acceptance of drafted tokens, many rows at once: greedy match, and the exact law of the target when sampling."""

import pytest
import torch
from test_sampling import (
    DRAWS,
    IMPOSSIBLE,
    LIKELY,
    SETTINGS,
    VOCABULARY,
    Tables,
    chi_square_p,
    count,
    logits_below,
    sample,
)

from modeling_domino.verification_domino import accept_greedy, accept_sampled, draw, pack_round


def random_numbers(rows: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(rows, places), torch.empty(rows, VOCABULARY).exponential_()


def propose(tables: Tables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two drafted tokens for each of many rows, with the logits of the target and of the draft."""
    first = sample(tables.q[:1].softmax(-1).expand(DRAWS, -1))
    drafted = torch.stack([first, sample(tables.q[1 + first].softmax(-1))], dim=1)
    q_logits = torch.stack([tables.q[:1].expand(DRAWS, -1), tables.q[1 + first]], dim=1)
    p_logits = torch.stack([tables.p[:1].expand(DRAWS, -1), tables.p[1 + first], tables.p[1 + drafted[:, 1]]], dim=1)
    return drafted, p_logits, q_logits


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("ending", ["whole blocks", "with an unlikely token", "of a length of its own"])
def test_texts_of_rounds_have_the_law_of_the_target(setting, ending):
    """The first token, and both where a second one was kept or drawn: rows whose first was rejected go on by p."""
    tables = Tables(*setting)
    torch.manual_seed(0)
    drafted, p_logits, q_logits = propose(tables)
    counts = torch.full((DRAWS,), 2)
    if ending == "with an unlikely token":
        counts = torch.where(q_logits[:, 0].softmax(-1).gather(1, drafted[:, :1])[:, 0] < 0.3, 1, 2)
    elif ending == "of a length of its own":
        counts = torch.arange(DRAWS) % 3
    accepted, tokens = accept_sampled(drafted, counts, p_logits, q_logits, *random_numbers(DRAWS, 2))
    assert (accepted <= counts).all() and (tokens[:, :2] == drafted)[accepted == 2].all()
    second = torch.where(accepted > 0, tokens[:, 1], sample(tables.second[tokens[:, 0]]))
    assert min(tables.p_values(torch.stack([tokens[:, 0], second], dim=1))) > LIKELY
    # The bonus token follows the second law after an accepted first token, and the third after two.
    bonus = tokens[accepted == 2][:, 1:]
    if len(bonus) > 500:
        law = torch.zeros(VOCABULARY, VOCABULARY).double()
        law.index_add_(0, bonus[:, 0], tables.second[bonus[:, 0]].double())
        assert chi_square_p(count(bonus), law / len(bonus)) > LIKELY


@pytest.mark.parametrize("setting", SETTINGS[:2])
def test_leaving_out_a_drawn_token_for_its_own_probability_is_seen(setting):
    """The mistake that `counts` must not make: proposals that end before an unlikely token."""
    tables = Tables(*setting)
    torch.manual_seed(0)
    drafted, p_logits, q_logits = propose(tables)
    likely = q_logits.softmax(-1).gather(2, drafted[..., None])[..., 0] >= 0.2
    counts = likely.long().cumprod(dim=1).sum(dim=1)
    accepted, tokens = accept_sampled(drafted, counts, p_logits, q_logits, *random_numbers(DRAWS, 2))
    second = torch.where(accepted > 0, tokens[:, 1], sample(tables.second[tokens[:, 0]]))
    assert max(tables.p_values(torch.stack([tokens[:, 0], second], dim=1))) < IMPOSSIBLE


@pytest.mark.parametrize("wrong", ["q before warping", "p instead of the residual"])
def test_a_wrong_rule_is_seen(wrong):
    tables = Tables(*SETTINGS[1])
    torch.manual_seed(0)
    drafted, p_logits, q_logits = propose(tables)
    counts, numbers = torch.full((DRAWS,), 2), random_numbers(DRAWS, 2)
    if wrong == "q before warping":
        raw = torch.stack([tables.raw_q[:1].expand(DRAWS, -1), tables.raw_q[1 + drafted[:, 0]]], dim=1)
        _, tokens = accept_sampled(drafted, counts, p_logits, raw, *numbers)
    else:
        accepted, tokens = accept_sampled(drafted, counts, p_logits, q_logits, *numbers)
        own = draw(p_logits[torch.arange(DRAWS), accepted].softmax(-1), numbers[1])
        tokens = tokens.scatter(1, accepted[:, None], own[:, None])
    assert chi_square_p(count(tokens[:, 0]), tables.first) < IMPOSSIBLE


def test_laws_that_leave_no_residual_draw_from_the_target():
    p_logits, q_logits, token = logits_below(seed=0)
    rows = 500
    torch.manual_seed(0)
    _, noise = random_numbers(rows, 1)
    almost_one = torch.full((rows, 1), 1 - 2**-24)  # rejects whatever may be rejected
    accepted, tokens = accept_sampled(
        torch.full((rows, 1), token),
        torch.ones(rows, dtype=torch.long),
        p_logits.expand(rows, 2, -1),
        q_logits.expand(rows, 1, -1),
        almost_one,
        noise,
    )
    assert (accepted == 0).all()
    assert chi_square_p(count(tokens[:, 0]), p_logits.softmax(-1)) > LIKELY


def test_a_token_that_the_target_excludes_is_never_kept():
    p_logits = torch.tensor([[[0.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]]])
    q_logits = torch.tensor([[[-torch.inf, 0.0, -torch.inf]]])
    accepted, tokens = accept_sampled(
        torch.tensor([[1]]), torch.tensor([1]), p_logits, q_logits, torch.zeros(1, 1), torch.ones(1, 3)
    )
    assert accepted.tolist() == [0] and tokens[0, 0] != 1


def test_greedy_matches():
    chosen = torch.tensor([[5, 6, 7, 8]] * 5)
    logits = torch.nn.functional.one_hot(chosen, 12).float()
    drafted = torch.tensor([[5, 6, 7], [5, 6, 7], [5, 9, 7], [9, 6, 7], [5, 6, 9]])
    accepted, tokens = accept_greedy(drafted, torch.tensor([3, 2, 3, 3, 0]), logits)
    assert accepted.tolist() == [3, 2, 1, 0, 0] and tokens.tolist() == chosen.tolist()
    accepted, tokens = accept_greedy(drafted[:, :0], torch.zeros(5, dtype=torch.long), logits[:, :1])
    assert accepted.tolist() == [0] * 5 and tokens.tolist() == [[5]] * 5


@pytest.mark.parametrize(
    "accepted, room, eos, gained, ended",
    [
        (2, 9, [], 3, 0),
        (2, 9, [7], 3, 1),
        (2, 9, [6, 5], 1, 1),
        (1, 9, [7], 2, 0),  # behind what was gained
        (2, 3, [], 3, 1),
        (2, 2, [], 2, 1),
        (2, 2, [7], 2, 1),
        (0, 0, [5], 0, 1),
    ],
)
def test_what_the_host_hears(accepted, room, eos, gained, ended):
    tokens, drafted = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6]])
    packed = pack_round(
        torch.tensor([accepted]),
        tokens,
        drafted,
        torch.tensor([2]),
        torch.tensor([room]),
        torch.tensor(eos, dtype=torch.long),
    )
    assert packed.tolist() == [[gained, ended, 2, 5, 6, 7, 5, 6]]


def test_drawing_has_the_law_of_the_weights():
    torch.manual_seed(0)
    weights = torch.rand(VOCABULARY) * (torch.arange(VOCABULARY) % 3 > 0)
    drawn = draw(weights.expand(DRAWS, -1), torch.empty(DRAWS, VOCABULARY).exponential_())
    assert chi_square_p(count(drawn), weights / weights.sum()) > LIKELY
