"""Lossless acceptance of drafted tokens, for all rows and positions at once: tensors in, tensors out.

    greedy      keep d_1, d_2, ... while each is the target's most likely token, then add the target's own
    sampling    keep d_i with probability min(1, p(d_i) / q(d_i)); at the first rejection draw from max(p - q, 0), after
                the last drafted token from p (Leviathan et al., arXiv 2211.17192, algorithm 1)

`p` is the target's law at a position and `q` the law that the token there was drawn from: any `q` gives the target's law.
Random numbers are arguments, so a kernel can be compared with these functions number for number. Shapes: `b` rows, `K`
drafted tokens a row, `V` vocabulary. Row `i` of the target's logits follows the anchor and the first `i` drafted tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def accept_greedy(drafted: Tensor, counts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """
    Args:
        drafted: Proposed ids, [b, K].
        counts: How many of a row's `drafted` are proposals, [b], at most K.
        logits: Of the target, [b, K + 1, V].

    Returns:
        Accepted tokens of each row, [b], and the target's choices, [b, K + 1]: a row's text goes on with the first
        `accepted + 1` of them.
    """
    tokens = logits.argmax(dim=-1)
    agrees = (tokens[:, :-1] == drafted) & _are_proposals(drafted, counts)
    return agrees.long().cumprod(dim=1).sum(dim=1), tokens


def accept_sampled(
    drafted: Tensor, counts: Tensor, p_logits: Tensor, q_logits: Tensor, uniforms: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Args:
        drafted: Proposed ids, [b, K].
        counts: How many of a row's `drafted` are proposals, [b], at most K. Whether a token is one may depend on those
            before it and on itself, if the row's proposals end with it, but never on being left out.
        p_logits: Logits whose softmax is the target's law, after all processors, float32, [b, K + 1, V].
        q_logits: Those whose softmax each token was drawn from, float32, [b, K, V].
        uniforms: In [0, 1), [b, K].
        noise: Of the exponential distribution with mean 1, [b, V].

    Returns:
        As `accept_greedy`, but for the ids behind a row's `accepted + 1` first, which mean nothing.
    """
    p = p_logits.softmax(dim=-1)
    proposals = _are_proposals(drafted, counts)
    # Behind the last proposal q is nothing, so that what is left of p there is p itself.
    q = F.pad(q_logits.softmax(dim=-1) * proposals[..., None], (0, 0, 0, 1))
    of_drafted = drafted[..., None]
    p_drafted, q_drafted = (law[:, :-1].gather(-1, of_drafted)[..., 0] for law in (p, q))
    keeps = (uniforms * q_drafted < p_drafted) & proposals
    accepted = keeps.long().cumprod(dim=1).sum(dim=1)
    where = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_next, q_next = (law.gather(1, where)[:, 0] for law in (p, q))
    left = (p_next - q_next).clamp(min=0)
    # Laws that are equal up to rounding leave nothing.
    left = torch.where(left.sum(dim=-1, keepdim=True) > 0, left, p_next)
    own = draw(left, noise)
    return accepted, F.pad(drafted, (0, 1)).scatter(1, accepted[:, None], own[:, None])


def draw(weights: Tensor, noise: Tensor) -> Tensor:
    """
    Ids [b], each with a probability proportional to its weight.

    Args:
        weights: Not negative, their sum not 0, [b, V].
        noise: Of the exponential distribution with mean 1, [b, V]: the smallest of `noise / weights` falls to an id with
            just that probability.
    """
    return (weights / noise.clamp(min=torch.finfo(noise.dtype).tiny)).argmax(dim=-1)


def pack_round(
    accepted: Tensor, tokens: Tensor, drafted: Tensor, counts: Tensor, rooms: Tensor, eos_token_ids: Tensor
) -> Tensor:
    """
    What the host has to know of a round, in one tensor.

    Args:
        accepted, tokens: From `accept_greedy` or `accept_sampled`, [b] and [b, K + 1].
        drafted, counts: As those got them, [b, K] and [b].
        rooms: Tokens that each row may still gain, [b]; 0 for a row that has ended.
        eos_token_ids: [E], where E may be 0.

    Returns:
        Integers, [b, 3 + (K + 1) + K]: tokens gained, whether the row has ended (by EOS or for want of room), counts,
        `tokens`, `drafted`.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    is_eos = torch.isin(tokens, eos_token_ids) & (places <= accepted[:, None])
    first_eos = torch.where(is_eos, places, tokens.shape[1]).amin(dim=1)
    gained = torch.minimum(torch.minimum(accepted + 1, first_eos + 1), rooms)
    ended = (first_eos < gained) | (gained >= rooms)
    return torch.cat([torch.stack([gained, ended.long(), counts], dim=1), tokens, drafted], dim=1)


def _are_proposals(drafted: Tensor, counts: Tensor) -> Tensor:
    return torch.arange(drafted.shape[1], device=drafted.device) < counts[:, None]


__all__ = ["accept_greedy", "accept_sampled", "draw", "pack_round"]
