"""An EAGLE-3-style draft: the autoregressive baseline that block drafts are compared with (arXiv 2503.01840).

One decoder layer reads, at each position, the embedding of the next token beside a hidden state: the fused taps of the
target where it has seen the token (g), the draft's own output where it has not (h).

    h_1 = layer([E(x_a) ; g_{a-1}]),  h_{i+1} = layer([E(d_i) ; h_i]),  logits_i = lm_head(norm(h_i))

So K tokens cost K passes of the layer and K products with the head. Chain drafting; as in our other drafts embeddings and
head are the target's (the published drafts bring a head over a reduced vocabulary), which is why it says "style".
"""

from collections.abc import Callable
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, Cache, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .candidate_generator_domino import DominoCandidateGenerator
from .configuration_domino import DominoConfig
from .modeling_domino import DominoAttention, DominoPreTrainedModel, DominoRotaryEmbedding
from .speculation_domino import SpeculationMixin


@strict
class EagleConfig(DominoConfig):
    """A `DominoConfig` of one layer; `block_size` is K, and what describes the correction head has no meaning here."""

    model_type = "eagle3_style"
    _auto_class = None
    num_hidden_layers: int = 1

    def __post_init__(self, **kwargs):
        if self.target_layer_ids is None:  # a low, a middle and a high layer
            last = self.num_target_layers - 1
            self.target_layer_ids = sorted({min(2, last - 1), self.num_target_layers // 2, max(last - 2, 0)})
        super().__post_init__(**kwargs)

    def validate_layers(self):
        """EAGLE-3 drafts with a single layer."""
        if self.num_hidden_layers != 1:
            raise ValueError(
                f"`num_hidden_layers` is {self.num_hidden_layers}, but an EAGLE-3-style draft has one layer: leave it out."
            )


class EagleAttention(DominoAttention):
    """Attention over rows of [embedding ; hidden state], 2H wide."""

    def __init__(self, config: EagleConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self, name)
            setattr(self, name, nn.Linear(2 * narrow.in_features, narrow.out_features, bias=False))


class EagleLayer(nn.Module):
    """A Qwen3 layer whose attention reads token embeddings beside the hidden states."""

    def __init__(self, config: EagleConfig, layer_idx: int):
        super().__init__()
        self.self_attn = EagleAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.embed_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def rows(self, embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """What attention reads of positions, [..., 2H], from their embeddings and hidden states [..., H]."""
        return torch.cat([self.embed_layernorm(embeds), self.input_layernorm(hidden_states)], dim=-1)

    def forward(
        self,
        embeds: Tensor,
        hidden_states: Tensor,
        seen: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache,
    ) -> tuple[Tensor, Tensor]:
        """
        One position of each block.

        Args:
            embeds, hidden_states: Of it, [b, N, H].
            seen: Rows of positions before it that the cache does not hold yet, [b, C, 2H]; appended to the cache.
            position_embeddings: Of the C rows, then of the N positions.
            attention_mask: True where a position may look, [b, 1, N, cached + C + N]; None: everywhere.
            cache: Of keys and values.

        Returns:
            Hidden states after the layer, [b, N, H], and the rows [b, N, 2H] that the next position has to see.
        """
        rows = self.rows(embeds, hidden_states)
        attended, _ = self.self_attn(rows, position_embeddings, attention_mask, seen, cache)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), rows


class EagleCandidateGenerator(DominoCandidateGenerator):
    """Drafts one token after the other; context, criteria, processors and acceptance are those of a Domino draft."""

    def _hidden_states(self, input_ids: Tensor, model_kwargs: dict) -> Tensor:
        """The fused taps of the last verified row, [1, 1, H]; the rows before it go to the draft's cache."""
        draft = self.draft
        context, next_ids, positions = self._new_context(input_ids, model_kwargs)
        fused = draft.fc(self._to_draft(context))
        embeds = self._embed(next_ids)
        self._seen = draft.layers[0].rows(embeds[:, :-1], fused[:, :-1])
        self._positions = positions[:, :-1].to(draft.device)
        # The last row stays pending: its keys belong to a draft that may be rejected.
        self.context.rows, self.context.pending = self.length - 2, context[:, -1:]
        return fused[:, -1:]

    def _propose(self, anchor_ids: Tensor, hidden_states: Tensor, room: int, choose: Callable) -> Tensor:
        draft, cache, seen, positions = self.draft, self.context.cache, self._seen, self._positions
        verified = cache.get_seq_length() + seen.shape[1]
        token_ids, drafted = anchor_ids, []
        for i in range(room):
            hidden_states, seen = draft.layers[0](
                self._embed(token_ids[:, None]), hidden_states, seen, draft.rotary_emb(seen, positions), None, cache
            )
            token_ids, ends = choose(i, self._base_logits(draft.norm(hidden_states))[:, 0])
            drafted.append(token_ids)
            positions = torch.cat([positions[:, -1:], positions[:, -1:] + 1], dim=1)
            if ends:
                break
        cache.crop(verified - cache.get_seq_length())
        return torch.stack(drafted, dim=1)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self._to_draft(self.session.target.embed(token_ids))


class EagleForSpeculativeDraft(SpeculationMixin, DominoPreTrainedModel):
    """An EAGLE-3-style draft: `target.generate(**inputs, assistant_model=draft)`, as with a Domino draft."""

    config: EagleConfig
    config_class = EagleConfig
    _no_split_modules = ["EagleLayer"]
    candidate_generator = EagleCandidateGenerator

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config, 0)])
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DominoRotaryEmbedding(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super(DominoPreTrainedModel, self)._init_weights(module)

    def head_weights(self) -> None:
        """There is no correction head."""

    def forward(
        self,
        prefix_embeds: Tensor,
        context_embeds: Tensor,
        context_hidden_states: Tensor,
        anchors: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        objective: Callable[[Tensor, Tensor, Tensor], Any],
    ) -> Any:
        """
        Training-time test (EAGLE-3, section 3): every block is unrolled with the true tokens and the draft's own hidden
        states, as it will meet them.

        Args:
            prefix_embeds: Target embeddings of x_a..x_{a+K-1}, [b, N, K, H].
            context_embeds: Of the token after each context row, [b, C, H].
            context_hidden_states: Tapped target layers side by side, [b, C, taps · H].
            anchors: Positions of x_a, [b, N].
            position_ids: Of the context rows, [b, C].
            attention_mask: True for the context rows before a - 1 of the block's document, [b, N, C].
            objective: As for `DominoForSpeculativeDraft.forward`, with nothing to add to the base logits.
        """
        layer, blocks = self.layers[0], anchors.shape[1]
        fused = self.fc(context_hidden_states)
        last = (anchors - 1).clamp(min=0)
        hidden_states = fused.gather(1, last[..., None].expand(-1, -1, fused.shape[-1]))
        seen, seen_positions = layer.rows(context_embeds, fused), position_ids
        positions = position_ids.gather(1, last)
        own = torch.eye(blocks, dtype=torch.bool, device=anchors.device).expand(len(anchors), -1, -1)
        mask, cache, states = attention_mask, DynamicCache(), []
        for embeds in prefix_embeds.unbind(dim=2):
            mask = torch.cat([mask, own], dim=-1)
            where = self.rotary_emb(hidden_states, torch.cat([seen_positions, positions], dim=1))
            hidden_states, seen = layer(embeds, hidden_states, seen, where, mask[:, None], cache)
            states.append(self.norm(hidden_states))
            seen_positions, positions = positions, positions + 1
        states = torch.stack(states, dim=2)
        features = states.new_zeros(*states.shape[:3], 1)
        return objective(states, features, states.new_zeros(self.config.vocab_size, 1))


AutoConfig.register(EagleConfig.model_type, EagleConfig, exist_ok=True)
AutoModel.register(EagleConfig, EagleForSpeculativeDraft, exist_ok=True)

__all__ = ["EagleCandidateGenerator", "EagleConfig", "EagleForSpeculativeDraft"]
