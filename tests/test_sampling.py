"""Sampling with a draft has exactly the law of the target: chi-square against enumeration on twelve tokens."""

import pytest
import torch
from conftest import make_draft, make_target
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

from modeling_domino.processors_domino import sharpen


VOCABULARY, MASK = 12, 11
DRAWS, CALLS = 20_000, 1_000
# temperature, top_k, top_p, draft_temperature
SETTINGS = [(0.7, 6, None, 1.0), (1.3, None, 0.8, 0.5), (0.8, 8, 0.9, 0.0)]
SMALL_DRAFT = {"mask_token_id": MASK, "block_size": 3, "num_hidden_layers": 1, "target_layer_ids": [0]}
LIKELY, IMPOSSIBLE = 1e-3, 1e-6


def warpers(temperature: float, top_k: int | None, top_p: float | None) -> LogitsProcessorList:
    """In the order in which generate() applies them."""
    chosen = [TemperatureLogitsWarper(temperature)] if temperature != 1.0 else []
    chosen += [TopKLogitsWarper(top_k)] if top_k is not None else []
    chosen += [TopPLogitsWarper(top_p)] if top_p is not None else []
    return LogitsProcessorList(chosen)


def chi_square_p(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of observed counts under a law, cells with fewer than 5 expected merged into one."""
    counts, law = counts.flatten().double(), law.flatten().double()
    torch.testing.assert_close(law.sum(), torch.ones_like(law.sum()), atol=1e-5, rtol=0)
    if counts[law == 0].sum() > 0:
        return 0.0
    order = law.argsort()
    expected, observed = (law * counts.sum())[order], counts[order]
    merged = int((expected < 5).sum())
    while merged > 0 and expected[:merged].sum() < 5:
        merged += 1
    cells = [torch.cat([x[:merged].sum()[None], x[merged:]]) if merged else x for x in (observed, expected)]
    assert len(cells[0]) > 2
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    return float(torch.special.gammaincc(torch.tensor((len(cells[0]) - 1) / 2).double(), statistic / 2))


def count(tokens: torch.Tensor) -> torch.Tensor:
    """Counts [V] of tokens [n], [V, V] of pairs [n, 2]."""
    if tokens.dim() == 1:
        return torch.bincount(tokens, minlength=VOCABULARY)
    flat = torch.bincount(tokens[:, 0] * VOCABULARY + tokens[:, 1], minlength=VOCABULARY**2)
    return flat.view(VOCABULARY, VOCABULARY)


def sample(probabilities: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(probabilities, num_samples=1).squeeze(-1)


class Tables:
    """Fixed logits of a target and of a very different draft, for the first token and for the second given the first."""

    def __init__(self, temperature, top_k, top_p, draft_temperature):
        torch.manual_seed(0)
        warp = warpers(temperature, top_k, top_p)
        p, self.raw_q = torch.randn(2, VOCABULARY + 1, VOCABULARY) * 1.5
        self.p, self.q = warp(None, p), sharpen(warp(None, self.raw_q), draft_temperature)
        # Row 0 is the first token's law, row 1 + t that of a second token after t.
        self.first, self.second = self.p[0].softmax(-1), self.p[1:].softmax(-1)
        self.joint = self.first[:, None] * self.second

    def p_values(self, pairs: torch.Tensor) -> tuple[float, float]:
        return chi_square_p(count(pairs[:, 0]), self.first), chi_square_p(count(pairs), self.joint)


@pytest.mark.parametrize("setting", SETTINGS)
@torch.inference_mode()
def test_propose_and_verify_has_the_law_of_the_target(setting):
    """One block of two drafted tokens: the first token's law, and jointly that of (first, second if it was kept)."""
    tables = Tables(*setting)
    torch.manual_seed(0)
    first = sample(tables.q[:1].softmax(-1).expand(DRAWS, -1))
    drafted = torch.stack([first, sample(tables.q[1 + first].softmax(-1))], dim=1)
    q = [tables.q[None, [0, 1 + token]] for token in range(VOCABULARY)]
    p = [tables.p[None, [0, 1 + token, 0]] for token in range(VOCABULARY)]
    texts, matches = [], []
    for ids, token in zip(drafted[:, None], first.tolist(), strict=True):
        text, n = _speculative_sampling(ids, q[token], 2, p[token], assistant_ensemble_weight=1.0)
        texts.append(text[0, :2])
        matches.append(n)
    matches = torch.stack(matches)
    assert min(torch.bincount(matches, minlength=3)) > DRAWS // 200
    assert chi_square_p(count(torch.stack([text[0] for text in texts])), tables.first) > LIKELY
    rejected = torch.stack([text[0] for text, n in zip(texts, matches, strict=True) if n == 0])
    kept = torch.stack([text for text, n in zip(texts, matches, strict=True) if n > 0])
    q_first = tables.q[0].softmax(-1)
    law = torch.cat(
        [
            (tables.first - q_first).clamp(min=0)[:, None],
            torch.minimum(tables.first, q_first)[:, None] * tables.second,
        ],
        dim=1,
    )
    assert chi_square_p(torch.cat([count(rejected)[:, None], count(kept)], dim=1), law) > LIKELY


def accept_if_a_target_sample_agrees(x, p, q, raw_q):
    return sample(p) == x, (p - q).clamp(min=0)


def draw_again_without_residual(x, p, q, raw_q):
    return torch.rand(len(x)) <= (p / q).gather(1, x[:, None])[:, 0], p


def take_q_before_warping(x, p, q, raw_q):
    return torch.rand(len(x)) <= (p / raw_q).gather(1, x[:, None])[:, 0], (p - raw_q).clamp(min=0)


def the_right_rule(x, p, q, raw_q):
    return torch.rand(len(x)) <= (p / q).gather(1, x[:, None])[:, 0], (p - q).clamp(min=0)


def draw_pairs(tables: Tables, rule) -> torch.Tensor:
    """Two tokens one after the other: once rounds are exact, where a block ends makes no difference."""
    rows, pair = torch.zeros(DRAWS, dtype=torch.long), []
    for _ in range(2):
        p, q, raw_q = (table[rows].softmax(-1) for table in (tables.p, tables.q, tables.raw_q))
        x = sample(q)
        accepted, residual = rule(x, p, q, raw_q)
        empty = residual.sum(-1, keepdim=True) == 0
        token = torch.where(accepted, x, sample(torch.where(empty, p, residual)))
        pair.append(token)
        rows = 1 + token
    return torch.stack(pair, dim=1)


@pytest.mark.parametrize(
    "rule, setting",
    [
        # Against a one-hot q, agreement with a target sample is the right rule.
        *[(accept_if_a_target_sample_agrees, setting) for setting in SETTINGS if setting[3] > 0],
        *[(draw_again_without_residual, setting) for setting in SETTINGS],
        *[(take_q_before_warping, setting) for setting in SETTINGS],
    ],
)
def test_the_same_number_of_draws_shows_a_wrong_rule(rule, setting):
    tables = Tables(*setting)
    torch.manual_seed(0)
    assert max(tables.p_values(draw_pairs(tables, rule))) < IMPOSSIBLE
    torch.manual_seed(0)
    assert min(tables.p_values(draw_pairs(tables, the_right_rule))) > LIKELY


@torch.no_grad()
def exact_laws(target, prompt, warp) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p(x1), p(x1, x2) and p(x2, x3) by a forward pass over every prefix."""

    def next_law(prefixes):
        ids = torch.cat([prompt.expand(len(prefixes), -1), prefixes], dim=1)
        return warp(ids, target(ids).logits[:, -1].float()).softmax(-1)

    tokens = torch.arange(VOCABULARY)
    first = next_law(tokens.new_empty(1, 0))[0]
    pair = first[:, None] * next_law(tokens[:, None])
    third = next_law(torch.cartesian_prod(tokens, tokens)).view(VOCABULARY, VOCABULARY, VOCABULARY)
    return first, pair, (pair[:, :, None] * third).sum(0)


def assert_law(texts: torch.Tensor, target, prompt: torch.Tensor, warp: LogitsProcessorList) -> None:
    """New ids [n, 3 or more] have the target's law: of the first, of the first two, and of the two after the first."""
    laws = exact_laws(target, prompt, warp)
    parts = texts[:, 0], texts[:, :2], texts[:, 1:3]
    p_values = [chi_square_p(count(part), law) for part, law in zip(parts, laws, strict=True)]
    assert min(p_values) > LIKELY


@pytest.fixture(scope="module")
def small_target():
    return make_target(vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.15)


@pytest.mark.parametrize("setting", [(1.0, None, None, 1.0), (0.7, 6, None, 0.5)])
def test_generate_has_the_law_of_the_target(setting, small_target, path):
    temperature, top_k, top_p, draft_temperature = setting
    prompt = torch.tensor([[3, 7, 10, 5]])
    draft = make_draft(small_target, **SMALL_DRAFT)
    draft.decoding.draft_temperature = draft_temperature
    call = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": top_p or 1.0}
    torch.manual_seed(0)
    texts, stats = [], []
    for _ in range(CALLS):
        texts.append(small_target.generate(prompt, assistant_model=draft, max_new_tokens=4, **call)[0, 4:])
        stats.append(draft.last_generation)
    texts = torch.stack(texts)
    assert texts.shape == (CALLS, 4) and {s.path for s in stats} == {path}
    rounds, drafted, accepted = (sum(getattr(s, name) for s in stats) for name in ("rounds", "drafted", "accepted"))
    assert rounds > 1.3 * CALLS and 0.1 * drafted < accepted < 0.9 * drafted
    assert_law(texts, small_target, prompt, warpers(temperature, top_k, top_p))


def logits_below(seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Equal logits up to rounding, whose float32 laws p <= q leave no residual, and a token with p < q."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        p_logits = torch.randn(VOCABULARY, generator=generator)
        q_logits = p_logits + 1e-6 * torch.rand(VOCABULARY, generator=generator)
        p, q = p_logits.softmax(-1), q_logits.softmax(-1)
        if (p <= q).all() and (p / q < 1).any():
            return p_logits, q_logits, int((p / q).argmin())


def test_a_rejection_without_residual_draws_from_the_target(monkeypatch):
    p_logits, q_logits, token = logits_below(seed=0)
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)  # rejects whatever may be rejected
    call = torch.tensor([[3, token]]), q_logits[None, None], 1, p_logits.expand(1, 2, -1)
    with pytest.raises(RuntimeError, match="nan"):  # 0/0 under the rule without its guard
        _speculative_sampling(*call)
    torch.manual_seed(0)
    drawn = []
    for _ in range(500):
        tokens, n = _speculative_sampling(*call, assistant_ensemble_weight=1.0)
        assert n == 0 and tokens.shape == (1, 1)
        drawn.append(tokens[0, 0])
    assert chi_square_p(count(torch.stack(drawn)), p_logits.softmax(-1)) > LIKELY


def test_generate_with_a_draft_of_the_same_law_up_to_rounding(path, monkeypatch):
    """Weights of the head are rounding errors beside its bias, so any hidden state gives nearly the same law; often
    enough no residual is left, which without the guard is an error."""
    target = make_target(vocab_size=VOCABULARY, num_hidden_layers=2)
    target.lm_head = torch.nn.Linear(32, VOCABULARY)
    torch.nn.init.normal_(target.lm_head.weight, std=1e-8)
    draft = make_draft(target, **SMALL_DRAFT)
    torch.nn.init.zeros_(draft.embed_proj[2].weight)
    # Both reject whatever may be rejected.
    monkeypatch.setattr(torch, "rand_like", torch.ones_like)
    monkeypatch.setattr(torch, "rand", lambda *shape, **options: torch.full(*shape, 1 - 2**-24, **options))
    accepted = drafted = 0
    for seed in range(100):
        torch.manual_seed(seed)
        ids = target.generate(torch.tensor([[3, 7]]), assistant_model=draft, do_sample=True, max_new_tokens=8)
        assert ids.shape == (1, 10) and ids.max() < VOCABULARY
        drafted, accepted = drafted + draft.last_generation.drafted, accepted + draft.last_generation.accepted
    assert 0 < accepted < drafted
