"""The two-term loss: value and gradients against the naive form, in chunks, and the curriculum's numbers."""

import math

import pytest
import torch
from torch.nn import functional as F

from modeling_domino.losses import lambda_base, position_weights, sample_vocabulary, two_term_loss


def test_position_weights_are_the_published_ones():
    expected = [1, 0.867, 0.751, 0.651, 0.565, 0.490, 0.424, 0.368]
    assert position_weights(16, 7.0)[:8].tolist() == pytest.approx(expected, abs=5e-4)
    assert position_weights(3, None).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("step", "ratio", "expected"), [(0, 1.0, 1.0), (50, 1.0, 0.5), (100, 1.0, 0.0), (25, 0.5, 0.5), (50, 0.5, 0.0)]
)
def test_curriculum_falls_linearly_over_its_share_of_the_steps(step, ratio, expected):
    assert lambda_base(step, 100, 1.0, ratio) == expected


class SoftcappedHead(torch.nn.Module):
    """A frozen head that is more than a matrix, as Gemma's is."""

    def __init__(self, vocabulary: int, hidden: int):
        super().__init__()
        self.linear = torch.nn.Linear(hidden, vocabulary).requires_grad_(False)

    def forward(self, hidden_states):
        return 5 * torch.tanh(self.linear(hidden_states) / 5)


def naive(hidden_states, features, w2, lm_head, labels, weights, lam, normalizer, offset):
    base = lm_head(hidden_states)
    final = base + F.linear(features, w2)
    base_loss, final_loss = (
        (F.cross_entropy(logits + offset, labels, reduction="none") * weights).sum() / normalizer
        for logits in (base, final)
    )
    return (1 - lam) * final_loss + lam * base_loss, base_loss, final_loss


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("with_offset", [False, True])
def test_chunks_give_the_value_and_the_gradients_of_the_naive_form(chunk_size, lam, with_offset):
    torch.manual_seed(0)
    head, labels = SoftcappedHead(11, 6), torch.randint(0, 11, (13,))
    weights = torch.rand(13) * (torch.rand(13) > 0.3)
    normalizer = torch.tensor(3.0)
    offset = torch.randn(11) if with_offset else None
    results = []
    for form in (naive, two_term_loss):
        torch.manual_seed(1)
        leaves = [torch.randn(size, requires_grad=True) for size in ((13, 6), (13, 4), (11, 4))]
        if form is naive:
            out = naive(*leaves, head, labels, weights, lam, normalizer, 0.0 if offset is None else offset)
        else:
            out = two_term_loss(*leaves, head, labels, weights, lam, normalizer, offset=offset, chunk_size=chunk_size)
        (2 * out[0]).backward()  # what comes from above is passed on
        results.append([*out[:3], *(leaf.grad for leaf in leaves)])
    for expected, given in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-5)
    if lam == 1.0:
        assert results[1][5].abs().max() == 0  # W2 rests, with a gradient of zeros


def test_gradients_are_handed_out_once_and_unlikely_labels_have_a_finite_loss():
    hidden = torch.tensor([[0.0, 500.0]], requires_grad=True)
    out = two_term_loss(
        hidden,
        torch.zeros(1, 1),
        torch.zeros(2, 1),
        lambda h: h,
        torch.tensor([0]),
        torch.ones(1),
        0.5,
        torch.ones(()),
    )
    assert out.loss.item() == pytest.approx(500.0)
    out.loss.backward(retain_graph=True)
    assert hidden.grad.tolist() == [[-1.0, 1.0]]
    with pytest.raises(RuntimeError, match="compute it again"):
        out.loss.backward()


def test_positions_of_no_weight_count_as_not_correct_and_frozen_inputs_get_no_gradient():
    hidden, w2 = torch.eye(3), torch.zeros(3, 2)
    out = two_term_loss(
        hidden, torch.zeros(3, 2), w2, lambda h: 9 * h, torch.arange(3), torch.tensor([1.0, 0.0, 1.0]), 0.5, 2.0
    )
    assert out.base_correct.tolist() == out.final_correct.tolist() == [True, False, True]
    assert float(out.loss) == pytest.approx(math.log(1 + 2 * math.exp(-9)), rel=1e-3)
    assert not out.loss.requires_grad


def test_bfloat16_inputs_keep_a_float32_loss():
    torch.manual_seed(0)
    hidden, features, w2 = (torch.randn(s, dtype=torch.bfloat16, requires_grad=True) for s in ((5, 6), (5, 4), (9, 4)))
    head = torch.nn.Linear(6, 9, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    out = two_term_loss(hidden, features, w2, head, torch.arange(5), torch.ones(5), 0.5, 5.0)
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert {tensor.grad.dtype for tensor in (hidden, features, w2)} == {torch.bfloat16}
    assert torch.isfinite(hidden.grad).all() and hidden.grad.abs().sum() > 0


def test_sampled_softmax_estimates_the_full_one():
    torch.manual_seed(0)
    labels, scores = torch.tensor([[5, 9], [5, 700]]), torch.randn(4, 1000)
    full = scores.logsumexp(-1)
    generator, estimates = torch.Generator().manual_seed(0), []
    for _ in range(200):
        ids, offset = sample_vocabulary(labels, 1000, 100, generator)
        assert ids.tolist() == sorted(set(ids.tolist())) and {5, 9, 700} <= set(ids.tolist()) and len(ids) == 103
        assert offset.unique().tolist() == pytest.approx([0.0, math.log(997 / 100)])
        estimates.append((scores[:, ids] + offset).exp().sum(-1))
    # Unbiased in the partition function; 200 draws of 100 of 997 terms leave about 1 %.
    assert torch.stack(estimates).mean(0).log().tolist() == pytest.approx(full.tolist(), abs=0.03)
    ids, offset = sample_vocabulary(labels, 1000, 5000, generator)
    assert ids.tolist() == list(range(1000)) and offset.abs().max() == 0
