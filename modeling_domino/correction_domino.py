"""The method's heart in plain PyTorch: prefix GRU, low-rank correction in logit space, left-to-right block loop.

    S_i = GRU(E(x_a), ..., E(x_{a+i}))                         state after the i drafted tokens and the anchor
    final_i = base_i + W2 · SiLU(W1 [H_i ; S_i])    for i >= P, base_i before

(paper section 3.2). Prediction i is the one of token x_{a+1+i}, whatever slot it comes from, so both alignments
(`shift_label`) share this file. It knows neither the model nor generate(): kernels are tested against it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


# Logit of tokens that are not in a candidate pool: no probability in any float type, and still a law if a processor forbids
# the whole pool.
OUTSIDE = -1e4


class HeadWeights(NamedTuple):
    """The head as plain matrices, every active adapter folded in. Rows of `w2` are the target's vocabulary."""

    gru_input: Tensor  # [3G, H], gates r, z, n as in torch.nn.GRU
    gru_hidden: Tensor  # [3G, G]
    w1_hidden: Tensor  # [R, H], the columns of W1 that multiply the backbone's hidden state
    w1_state: Tensor  # [R, G], those that multiply the prefix state
    w2: Tensor  # [V, R]

    def for_vocabulary(self, rows: int) -> "HeadWeights":
        """The same head for a target whose embedding is padded to another number of rows: no correction beyond ours."""
        missing = rows - self.w2.shape[0]
        if missing == 0:
            return self
        return self._replace(w2=self.w2[:rows] if missing < 0 else F.pad(self.w2, (0, 0, 0, missing)))


def gru_step(input_gates: Tensor, state: Tensor, gru_hidden: Tensor) -> Tensor:
    """One bias-free GRU step.

    Args:
        input_gates: `W_ih · E(x)`, shape [b, 3G].
        state: Shape [b, G].
        gru_hidden: `W_hh`, shape [3G, G].

    Returns:
        The next state, shape [b, G].
    """
    reset_in, update_in, new_in = input_gates.chunk(3, dim=-1)
    reset_h, update_h, new_h = F.linear(state, gru_hidden).chunk(3, dim=-1)
    reset, update = torch.sigmoid(reset_in + reset_h), torch.sigmoid(update_in + update_h)
    new = torch.tanh(new_in + reset * new_h)
    return new + update * (state - new)


def gru_scan(embeds: Tensor, state: Tensor, gru_input: Tensor, gru_hidden: Tensor) -> Tensor:
    """States after each of T tokens, [b, T, G], from their embeddings [b, T, H] and a first state [b, G]."""
    states = []
    for input_gates in F.linear(embeds, gru_input).unbind(dim=1):
        state = gru_step(input_gates, state, gru_hidden)
        states.append(state)
    return torch.stack(states, dim=1)


class PrefixGRU(nn.Module):
    """Bias-free GRU over the embeddings of a block's tokens; parameters are named as in `torch.nn.GRU`.

    Ours because `torch.nn.GRU` can neither be traced whole nor adapted by peft.
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        bound = hidden_size**-0.5
        nn.init.uniform_(self.weight_ih_l0, -bound, bound)
        nn.init.uniform_(self.weight_hh_l0, -bound, bound)

    def forward(self, embeds: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """States [b, T, G] after each of T token embeddings [b, T, H], and the last one [b, G]."""
        if state is None:
            state = embeds.new_zeros(embeds.shape[0], self.hidden_size)
        states = gru_scan(embeds, state, self.weight_ih_l0, self.weight_hh_l0)
        return states, states[:, -1]

    def extra_repr(self) -> str:
        return (
            f"{self.weight_ih_l0.shape[1]}, {self.hidden_size}, bias=False, "
            "target_parameters=['prefix_gru.weight_ih_l0', 'prefix_gru.weight_hh_l0']"
        )


def draft_block(
    head: HeadWeights,
    hidden_states: Tensor,
    base_logits: Tensor,
    anchor_ids: Tensor,
    *,
    prefix_len: int,
    embed: Callable[[Tensor], Tensor],
    choose: Callable[[int, Tensor], tuple[Tensor, bool]],
    candidate_pool: int = 0,
) -> Tensor:
    """Drafts up to K tokens left to right, each conditioned on those chosen before it (paper algorithm 1).

    Args:
        head: The correction head.
        hidden_states: Backbone output of the K predicting slots, [b, K, H].
        base_logits: Target head on them, [b, K, V].
        anchor_ids: Last verified token, [b].
        prefix_len: P, predictions that keep their base logits.
        embed: Token ids [b] to target embeddings [b, H].
        choose: (i, logits [b, V]) to (ids [b], whether the draft ends with them).
        candidate_pool: M, tokens of each slot that are corrected, those of the largest base logits; all others are out
            of the question. 0 corrects all V.

    Returns:
        Drafted ids, [b, n] with 1 <= n <= K.
    """
    from_hidden = F.linear(hidden_states, head.w1_hidden)
    state = hidden_states.new_zeros(hidden_states.shape[0], head.gru_hidden.shape[1])
    pool = base_logits.topk(min(candidate_pool, base_logits.shape[-1])).indices if candidate_pool else None
    token_ids, drafted = anchor_ids, []
    for i in range(base_logits.shape[1]):
        state = gru_step(F.linear(embed(token_ids), head.gru_input), state, head.gru_hidden)
        logits = base_logits[:, i]
        if i >= prefix_len:
            rank = F.silu(from_hidden[:, i] + F.linear(state, head.w1_state))
            logits = (
                logits + F.linear(rank, head.w2) if pool is None else correct_pool(logits, rank, head.w2, pool[:, i])
            )
        token_ids, ends = choose(i, logits)
        drafted.append(token_ids)
        if ends:
            break
    return torch.stack(drafted, dim=1)


def correct_pool(base_logits: Tensor, rank: Tensor, w2: Tensor, pool: Tensor) -> Tensor:
    """Final logits of a pool of tokens: M rows of W2 are read instead of V.

    Args:
        base_logits: Of one slot, [b, V].
        rank: a = SiLU(W1 [H ; S]) of it, [b, R].
        w2: Shape [V, R].
        pool: Ids, [b, M].

    Returns:
        [b, V]: base plus correction in the pool, `OUTSIDE` elsewhere.
    """
    corrected = base_logits.gather(-1, pool) + torch.einsum("br,bmr->bm", rank, w2[pool])
    return torch.full_like(base_logits, OUTSIDE).scatter(-1, pool, corrected)


__all__ = ["OUTSIDE", "HeadWeights", "PrefixGRU", "correct_pool", "draft_block", "gru_scan", "gru_step"]
