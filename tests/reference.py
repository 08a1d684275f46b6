"""A Domino draft written out from the paper's formulas, one vector at a time, sharing no code with the package.

It reads weights by their public names and the target's hidden states as transformers returns them, so a misplaced tap,
position, norm or label shows: such a draft still gives the right text, only slowly.
"""

import torch


def rms_norm(vector, weight, eps):
    return weight * vector / torch.sqrt(vector.pow(2).mean() + eps)


def rotate(vector, position, theta):
    """Rotary embedding of one head, halves paired as in Llama."""
    half = len(vector) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = vector[:half], vector[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def attend(query, keys, values):
    weights = torch.stack([query @ key for key in keys]) / len(query) ** 0.5
    return sum(weight * value for weight, value in zip(weights.softmax(0), values, strict=True))


def layer(weights, config, slots, context, positions):
    """One layer on the slots of a block; every slot sees the context and the whole block."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]

    def projected(name, vector, position, norm=None):
        parts = (weights[f"self_attn.{name}.weight"] @ vector).split(size)
        if norm is None:
            return parts
        normed = [rms_norm(part, weights[f"self_attn.{norm}.weight"], config.rms_norm_eps) for part in parts]
        return [rotate(part, position, theta) for part in normed]

    normed = [rms_norm(slot, weights["input_layernorm.weight"], config.rms_norm_eps) for slot in slots]
    sources = list(zip(context + normed, positions, strict=True))
    keys = [projected("k_proj", vector, position, "k_norm") for vector, position in sources]
    values = [projected("v_proj", vector, position) for vector, position in sources]
    result = []
    for slot, vector, position in zip(slots, normed, positions[len(context) :], strict=True):
        queries = projected("q_proj", vector, position, "q_norm")
        mixed = []
        for head in range(heads):
            group = head * groups // heads
            mixed.append(attend(queries[head], [key[group] for key in keys], [value[group] for value in values]))
        slot = slot + weights["self_attn.o_proj.weight"] @ torch.cat(mixed)
        inner = rms_norm(slot, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = torch.nn.functional.silu(weights["mlp.gate_proj.weight"] @ inner)
        result.append(slot + weights["mlp.down_proj.weight"] @ (gate * (weights["mlp.up_proj.weight"] @ inner)))
    return result


def gru(weights, state, vector):
    inputs, hidden = weights["prefix_gru.weight_ih_l0"] @ vector, weights["prefix_gru.weight_hh_l0"] @ state
    (r_in, z_in, n_in), (r_h, z_h, n_h) = inputs.chunk(3), hidden.chunk(3)
    reset, update = torch.sigmoid(r_in + r_h), torch.sigmoid(z_in + z_h)
    return (1 - update) * torch.tanh(n_in + reset * n_h) + update * state


def first_block(draft, target, token_ids, anchor):
    """
    Tokens and final logits that a draft must propose after the target's first token.

    Args:
        draft: Whose weights and configuration are read.
        target: Plain model.
        token_ids: Prompt, a list.
        anchor: The target's first token.
    """
    config, weights = draft.config, {name: tensor.detach() for name, tensor in draft.state_dict().items()}
    states = target(
        torch.tensor([token_ids]), output_hidden_states=True
    ).hidden_states  # embeddings, then layer 0, ...
    tapped = [torch.cat([states[i + 1][0, t] for i in config.target_layer_ids]) for t in range(len(token_ids))]
    context = [
        rms_norm(weights["fc.weight"] @ vector, weights["hidden_norm.weight"], config.rms_norm_eps)
        for vector in tapped
    ]
    embed = target.get_input_embeddings()

    def embedding(token):
        return embed(torch.tensor(token)).detach()

    slots = [embedding(anchor)] + [embedding(config.mask_token_id)] * (config.block_size - 1)
    positions = list(range(len(token_ids) + config.block_size))
    for index in range(config.num_hidden_layers):
        prefix = f"layers.{index}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        slots = layer(own, config, slots, context, positions)
    slots = [rms_norm(slot, weights["norm.weight"], config.rms_norm_eps) for slot in slots]
    if not config.shift_label:
        slots = slots[1:]  # slot k is about the token k places after the anchor, and slot 0 about the anchor itself
    state, token, tokens, logits = torch.zeros(config.gru_hidden_dim), anchor, [], []
    for index, slot in enumerate(slots):
        state = gru(weights, state, embedding(token))
        scores = target.get_output_embeddings()(slot)
        if index >= config.pure_draft_prefix_len:
            inner = weights["embed_proj.0.weight"] @ torch.cat([slot, state])
            scores = scores + weights["embed_proj.2.weight"] @ torch.nn.functional.silu(inner)
        token = int(scores.argmax())
        tokens.append(token)
        logits.append(scores)
    return tokens, torch.stack(logits)
