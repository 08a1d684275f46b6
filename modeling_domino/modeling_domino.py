"""`DominoForSpeculativeDraft`: a parallel backbone over the target's context, and a small causal correction head.

    context = hidden_norm(fc(tapped target layers))            rows of the verified prefix
    H_0..H_{B-1} = backbone([E(x_a), E(MASK) x (B-1)], context)     one bidirectional pass (paper section 3.1)
    logits = lm_head(H) + correction                           see correction_domino.py

Embeddings and lm_head are the target's and are passed in; the draft owns neither.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import ModelOutput, logging
from transformers.utils.generic import is_flash_attention_requested

from .cache_domino import RowsCache
from .configuration_domino import DominoConfig
from .correction_domino import HeadWeights, PrefixGRU
from .speculation_domino import SpeculationMixin


logger = logging.get_logger(__name__)

HEAD_TENSORS = frozenset(
    {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
)


@dataclass
class DominoOutput(ModelOutput):
    """
    Args:
        last_hidden_state: H of every slot, [b, N, B, H].
        base_logits: Target head on the K predicting slots, [b, N, K, V].
        logits: Final logits, base plus correction, same shape. Row i predicts token x_{a+1+i}.
    """

    last_hidden_state: Tensor | None = None
    base_logits: Tensor | None = None
    logits: Tensor | None = None


class DominoRotaryEmbedding(Qwen3RotaryEmbedding):
    """Rotary frequencies that stay float32 when the draft is cast: rounded ones lose acceptance with position."""

    def _apply(self, fn, recurse: bool = True):
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, frequencies in before.items():
            cast = getattr(self, name)
            if cast.dtype != torch.float32:
                setattr(self, name, frequencies.to(device=cast.device, dtype=torch.float32))
        return self


class DominoAttention(Qwen3Attention):
    """Block queries attend to context rows and, in both directions, to the rows of their block.

    The cache holds keys and values of the verified prefix only: block rows are never written to it.
    """

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        context_hidden_states: Tensor,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        batch, block_rows, _ = hidden_states.shape
        context_rows = context_hidden_states.shape[1]
        query = self.q_norm(self.q_proj(hidden_states).view(batch, block_rows, -1, self.head_dim)).transpose(1, 2)
        # Positions cover context and block, queries are the block alone.
        query = _rotate(query, *(part[:, context_rows:] for part in position_embeddings))
        key, value = self.keys_and_values(
            torch.cat([context_hidden_states, hidden_states], dim=1), position_embeddings
        )

        if isinstance(cache, RowsCache):  # a block lies behind its context until the next one overwrites it
            key, value = cache.update(key, value, self.layer_idx)
        elif cache is not None:
            new_key, block_key = key.split([context_rows, block_rows], dim=2)
            new_value, block_value = value.split([context_rows, block_rows], dim=2)
            verified_key, verified_value = cache.update(new_key, new_value, self.layer_idx)
            key = torch.cat([verified_key, block_key], dim=2)
            value = torch.cat([verified_value, block_value], dim=2)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, block_rows, -1)), weights

    def keys_and_values(self, sources: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of rows [b, n, H], each [b, heads, n, head_dim]."""
        shape = (*sources.shape[:2], -1, self.head_dim)
        key = self.k_norm(self.k_proj(sources).view(shape)).transpose(1, 2)
        return _rotate(key, *position_embeddings), self.v_proj(sources).view(shape).transpose(1, 2)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of heads [b, heads, n, head_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return states * cos + rotate_half(states) * sin


class DominoDecoderLayer(Qwen3DecoderLayer):
    """A Qwen3 layer around `DominoAttention`, whatever the target's architecture."""

    def __init__(self, config: DominoConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DominoAttention(config, layer_idx)


class DominoPreTrainedModel(PreTrainedModel):
    config: DominoConfig
    config_class = DominoConfig
    main_input_name = "noise_embeds"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PrefixGRU):
            bound = module.hidden_size**-0.5
            init.uniform_(module.weight_ih_l0, -bound, bound)
            init.uniform_(module.weight_hh_l0, -bound, bound)
        elif module is self.embed_proj[2]:
            # A fresh head is neutral: final logits equal base logits until W2 has learnt something.
            init.zeros_(module.weight)


class DominoForSpeculativeDraft(SpeculationMixin, DominoPreTrainedModel):
    """A Domino draft: `target.generate(**inputs, assistant_model=draft)` gives the target's text, faster.

    Shapes below: b rows, N blocks a row, B slots a block, K = `config.max_draft_tokens` predictions a block,
    C context rows, H hidden, V vocabulary.
    """

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DominoDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = DominoRotaryEmbedding(config)
        self.prefix_gru = PrefixGRU(hidden, config.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )
        self.gradient_checkpointing = False
        self.post_init()

    def backbone(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        position_ids: Tensor,
        *,
        attention_mask: dict[str, Tensor | None] | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """
        One parallel pass over all blocks.

        Args:
            noise_embeds: Embeddings of [x_a, MASK, ...] of each block, [b, N, B, H].
            context_hidden_states: Tapped target layers side by side, [b, C, taps · H]: with a cache, only the rows
                verified since the last pass.
            position_ids: Of the C context rows, then of all block slots, [b, C + N·B].
            attention_mask: Per layer type, True where a slot may look, [b, 1, N·B, keys]. None: every context row and
                its block (one block a row), within the window on sliding layers.
            cache: Keys and values of the verified prefix; the C rows are appended to it.

        Returns:
            H, the normed hidden state of every slot, [b, N, B, H].
        """
        batch, blocks, slots, hidden = noise_embeds.shape
        hidden_states = noise_embeds.reshape(batch, blocks * slots, hidden)
        if attention_mask is None:
            seen = cache.get_seq_length() if cache is not None else 0
            attention_mask = self._inference_mask(seen + context_hidden_states.shape[1], slots)
        masks = {kind: self._for_attention(mask, hidden_states.dtype) for kind, mask in attention_mask.items()}
        context = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            hidden_states = layer(
                hidden_states,
                attention_mask=masks[kind],
                position_embeddings=position_embeddings,
                context_hidden_states=context,
                cache=cache,
            )
        return self.norm(hidden_states).view(batch, blocks, slots, hidden)

    def extend_context(self, context_hidden_states: Tensor, position_ids: Tensor, cache: Cache) -> None:
        """Keys and values of context rows [b, C, taps · H] at positions [b, C] go to a cache, without a block."""
        context = self.hidden_norm(self.fc(context_hidden_states))
        position_embeddings = self.rotary_emb(context, position_ids)
        for index, layer in enumerate(self.layers):
            cache.update(*layer.self_attn.keys_and_values(context, position_embeddings), index)

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        prefix_embeds: Tensor,
        position_ids: Tensor,
        lm_head: Callable[[Tensor], Tensor] | None = None,
        attention_mask: dict[str, Tensor | None] | None = None,
        objective: Callable[[Tensor, Tensor, Tensor], Any] | None = None,
    ) -> Any:
        """
        Teacher-forced pass over whole blocks: the head reads the true tokens (paper section 4.1).

        Args:
            noise_embeds, context_hidden_states, position_ids, attention_mask: See `backbone`.
            prefix_embeds: Target embeddings of x_a..x_{a+K-1}, [b, N, K, H].
            lm_head: The target's head, hidden states [..., H] to logits [..., V]; not needed with an `objective`.
            objective: Takes H of the predictions [b, N, K, H], the features a = SiLU(W1 [H ; S]) [b, N, K, R] (zeros
                where base logits stay as they are) and W2 [V, R], and computes what is wanted of the logits without
                ever holding them all: final logits are base + W2·a.

        Returns:
            `DominoOutput`, or what `objective` returns.
        """
        hidden_states = self.backbone(noise_embeds, context_hidden_states, position_ids, attention_mask=attention_mask)
        predicting = self.predicting_slots(hidden_states)
        uncorrected = min(self.config.pure_draft_prefix_len, predicting.shape[2])
        if self.head_enabled:
            states, _ = self.prefix_gru(prefix_embeds.flatten(0, 1))
            states = states.view(*predicting.shape[:3], -1)
            features = self.embed_proj[:2](torch.cat([predicting, states], dim=-1)[:, :, uncorrected:])
            features = F.pad(features, (0, 0, uncorrected, 0))
        else:
            features = predicting.new_zeros(*predicting.shape[:3], self.config.emb_dim)
        if objective is not None:
            return objective(predicting, features, _dense(self.embed_proj[2]))
        base_logits = lm_head(predicting)
        return DominoOutput(hidden_states, base_logits, base_logits + self.embed_proj[2](features))

    def predicting_slots(self, hidden_states: Tensor) -> Tensor:
        """The K slots whose row i predicts x_{a+1+i}: all of them, or all but slot 0 when labels are not shifted."""
        return hidden_states if self.config.shift_label else hidden_states[:, :, 1:]

    def head_weights(self) -> HeadWeights:
        """The head as plain matrices with every active adapter folded in; taken once per generate call.

        Decoding reads nothing else of the head, so it cannot run without an adapter that training saw.
        """
        w1 = _dense(self.embed_proj[0])
        gru_input, gru_hidden = self._gru_weights()
        hidden = self.config.hidden_size
        w2 = _dense(self.embed_proj[2])
        if w2.device.type == "cpu" and w2.dtype == torch.float32:
            w2 = w2.T.contiguous().T  # read column by column, the product with one row takes a third of the time
        return HeadWeights(
            gru_input=gru_input,
            gru_hidden=gru_hidden,
            w1_hidden=w1[:, :hidden],
            w1_state=w1[:, hidden:],
            w2=w2,
        )

    def _gru_weights(self) -> tuple[Tensor, Tensor]:
        """What the GRU's own forward reads: peft puts adapted values in place only while a wrapped module runs."""
        if type(self.prefix_gru) is PrefixGRU:
            return self.prefix_gru.weight_ih_l0, self.prefix_gru.weight_hh_l0
        seen = []

        def keep(module, *_):
            seen.append((module.weight_ih_l0, module.weight_hh_l0))

        with ExitStack() as hooks:  # on all of them: a copy that is trained in full stands beside the original
            for module in self.prefix_gru.modules():
                if isinstance(module, PrefixGRU):
                    hooks.enter_context(module.register_forward_hook(keep))
            self.prefix_gru(torch.zeros(1, 1, self.config.hidden_size, dtype=self.dtype, device=self.device))
        return seen[0]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As `PreTrainedModel.from_pretrained`, for our layout and the public one (`logit_head.` prefix too).

        A draft without a head (a plain DFlash file) decodes with the head off.

        Raises:
            ValueError: Tensors are missing or unknown, except that all four head tensors may be absent together,
                which gives a neutral head, turned off, and a warning.
        """
        kwargs["key_mapping"] = {r"^logit_head\.": "", **(kwargs.get("key_mapping") or {})}
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        is_plain = vars(model.config).pop("projector_type", None) == "dflash"  # read_public_layout says so
        model.head_enabled = _check_tensors(str(pretrained_model_name_or_path), info, is_plain)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, save_original_format: bool = False, **kwargs):
        """As `PreTrainedModel.save_pretrained`; the names written are always the plain public ones."""
        return super().save_pretrained(save_directory, *args, save_original_format=save_original_format, **kwargs)

    def _inference_mask(self, context_rows: int, slots: int) -> dict[str, Tensor | None]:
        """One block over the whole verified prefix: no mask, but for sliding layers past their window."""
        masks: dict[str, Tensor | None] = {"full_attention": None, "sliding_attention": None}
        window = self.config.sliding_window
        if window is not None and context_rows + slots > window and not is_flash_attention_requested(self.config):
            keys = torch.arange(context_rows + slots, device=self.device)
            masks["sliding_attention"] = ((keys[context_rows:, None] - keys[None]).abs() < window)[None, None]
        return masks

    def _for_attention(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if mask is None:
            return None
        if is_flash_attention_requested(self.config):
            raise ValueError(
                f"`attn_implementation={self.config._attn_implementation!r}` cannot take a block mask: load the draft "
                "with `attn_implementation='sdpa'` to train it."
            )
        if not isinstance(mask, Tensor):
            return mask  # flex_attention's BlockMask
        if self.config._attn_implementation in ("eager", "flex_attention"):  # both add it to the scores
            return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        return mask


def _dense(linear: nn.Module) -> Tensor:
    """The matrix of a bias-free linear map, whatever wraps it (an adapter has no single weight to read)."""
    if type(linear) is nn.Linear:
        return linear.weight
    weight = linear.weight
    return linear(torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)).T.contiguous()


def _check_tensors(name: str, info: dict, is_plain: bool) -> bool:
    """Refuses what does not belong to the configuration; returns whether there is a head."""
    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    has_head = not missing >= HEAD_TENSORS
    if not has_head:
        logger.warning(
            f"{name} holds no correction head: a neutral one was initialised and turned off, so the draft decodes with "
            "its base logits. Train the head before expecting more than the backbone gives."
        )
        missing -= HEAD_TENSORS
    if missing or unexpected:
        raise ValueError(
            f"{name} is not a Domino draft of this configuration: missing tensors {sorted(missing)}, unknown tensors "
            f"{sorted(unexpected)}. Check that config.json belongs to these weights; the four head tensors may only be "
            "absent all together."
        )
    if has_head and is_plain:
        raise ValueError(
            f"{name} holds the tensors of a Domino head, but its config.json describes a DFlash draft without one: add "
            "`projector_type`, `shift_label`, `pure_draft_prefix_len`, `gru_hidden_dim` and `emb_dim` as it was trained."
        )
    return has_head


DominoForSpeculativeDraft.register_for_auto_class("AutoModel")

__all__ = ["DominoForSpeculativeDraft", "DominoOutput"]
