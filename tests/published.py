"""Drafts as their publishers' code writes them: key lists and names of each framework, values from a draft at hand.

Nothing here comes from our writer, so that reading is tested against what is published and not against ourselves.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from modeling_domino import DominoForSpeculativeDraft


HEAD = ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"]
QWEN3_KEYS = [
    *["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
    *["num_key_value_heads", "head_dim", "max_position_embeddings", "layer_types", "sliding_window"],
    *["use_sliding_window", "max_window_layers", "rms_norm_eps", "initializer_range", "tie_word_embeddings"],
    *["attention_bias", "attention_dropout", "hidden_act", "use_cache", "bos_token_id", "eos_token_id"],
]


def write_folder(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def dtype_of(draft) -> str:
    return str(draft.dtype).removeprefix("torch.")


def qwen3(draft) -> dict:
    config = draft.config
    return {
        "model_type": "qwen3",
        **{key: getattr(config, key) for key in QWEN3_KEYS},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
    }


def nested(draft, **more) -> dict:
    config = draft.config
    return {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "projector_type": "domino",
        "pure_draft_prefix_len": config.pure_draft_prefix_len,
        "emb_dim": config.emb_dim,
        "gru_hidden_dim": config.gru_hidden_dim,
        "shift_label": config.shift_label,
        **more,
    }


def backbone(draft) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in draft.state_dict().items() if name not in HEAD}


def author(draft) -> tuple[dict, dict]:
    """Huang2020/Qwen3-8B-Domino-b16."""
    config = draft.config
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "emb_dim": config.emb_dim,
        "num_target_layers": config.num_target_layers,
        "dflash_config": nested(draft),
        "dtype": dtype_of(draft),
        **qwen3(draft),
    }, draft.state_dict()


def author_early(draft) -> tuple[dict, dict]:
    """The first training code: `causal_v5`, switches of parts that were dropped, and the head under `logit_head.`"""
    config, tensors = author(draft)
    legacy = {"projector_type": "causal_v5", "use_bias_norm": False, "use_bias_gate": False, "bias_gate_init": -2.0}
    config["dflash_config"] = nested(draft, **legacy)
    del config["emb_dim"]
    return config, {("logit_head." if name in HEAD else "") + name: tensor for name, tensor in tensors.items()}


def author_flat(draft) -> tuple[dict, dict]:
    """All of the draft's keys at the top level."""
    config, tensors = author(draft)
    return {**config, **config.pop("dflash_config")}, tensors


def specforge(draft) -> tuple[dict, dict]:
    """SpecForge's present templates name their own class."""
    config, tensors = author(draft)
    return {
        **config,
        "architectures": ["DominoDraftModel"],
        "auto_map": {"AutoModel": "domino.DominoDraftModel"},
    }, tensors


def nemo(draft) -> tuple[dict, dict]:
    """NeMo Automodel: block size in both places, no `emb_dim` at the top level, no `auto_map`."""
    config, tensors = author(draft)
    del config["emb_dim"], config["auto_map"]
    return {
        **config,
        "architectures": ["Qwen3DFlashDraftModel"],
        "dflash_config": nested(draft, block_size=draft.config.block_size),
    }, tensors


def modelopt(draft) -> tuple[dict, dict]:
    """ModelOpt: `torch_dtype`, scaled rotary positions; sliding layers by `use_swa`, with `layer_types` left full."""
    config, tensors = author(draft)
    del config["auto_map"], config["dtype"]
    config["torch_dtype"] = dtype_of(draft)
    scaling = {key: value for key, value in draft.config.rope_parameters.items() if key != "rope_theta"}
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling
    if "sliding_attention" in draft.config.layer_types:
        config["layer_types"] = ["full_attention"] * draft.config.num_hidden_layers
        config["dflash_config"] |= {
            "use_swa": True,
            "swa_window_size": draft.config.sliding_window,
            "causal": False,
        }
    return config, tensors


def z_lab(draft) -> tuple[dict, dict]:
    """A plain DFlash draft: newer ones nest the block size."""
    config, _ = author(draft)
    del config["emb_dim"], config["block_size"]
    config["dflash_config"] = {
        "mask_token_id": draft.config.mask_token_id,
        "target_layer_ids": draft.config.target_layer_ids,
        "block_size": draft.config.block_size,
    }
    return config, backbone(draft)


def speculators(draft, target, name: str, kind: str, *, prefix: str, head: dict, tokens: int) -> tuple[dict, dict]:
    config = draft.config
    tensors = {(prefix if key in HEAD else "") + key: tensor for key, tensor in draft.state_dict().items()}
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().to(draft.dtype)
    tensors["lm_head.weight"] = target.get_output_embeddings().weight.detach().to(draft.dtype)
    return {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DominoSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": name, "architectures": [type(target).__name__]},
        },
        "transformer_layer_config": qwen3(draft),
        "draft_vocab_size": config.vocab_size,
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "tie_word_embeddings": False,
        "dtype": dtype_of(draft),
        **head,
    }, tensors


def speculators_dflash(draft, target, name: str) -> tuple[dict, dict]:
    """Pull request #773."""
    config = draft.config
    head = {
        "projector_type": "domino",
        "pure_draft_prefix_len": config.pure_draft_prefix_len,
        "emb_dim": config.emb_dim,
        "gru_hidden_dim": config.gru_hidden_dim,
        "lambda_base_start": 1.0,
        "lambda_base_decay_ratio": 1.0,
        "auf": False,
        "shift_label": config.shift_label,
    }
    tokens = config.block_size - 1
    return speculators(draft, target, name, "dflash", prefix="domino_head.", head=head, tokens=tokens)


def speculators_domino(draft, target, name: str) -> tuple[dict, dict]:
    """The converter of issue #664."""
    config = draft.config
    head = {
        "gru_hidden_dim": config.gru_hidden_dim,
        "logits_correction_emb_dim": config.emb_dim,
        "pure_draft_prefix_len": config.pure_draft_prefix_len,
        "sample_from_anchor": config.shift_label,
        "lambda_base_start": 1.0,
        "lambda_base_decay_ratio": 0.5,
    }
    tokens = config.max_draft_tokens
    return speculators(draft, target, name, "domino", prefix="logits_correction.", head=head, tokens=tokens)


def speculators_plain(draft, target, name: str) -> tuple[dict, dict]:
    """A DFlash draft in speculators' layout, its training-only copies included."""
    tokens = draft.config.block_size - 1
    config, tensors = speculators(draft, target, name, "dflash", prefix="", head={}, tokens=tokens)
    tensors = {key: tensor for key, tensor in tensors.items() if key not in HEAD}
    tensors["verifier_lm_head.weight"] = tensors["lm_head.weight"]
    tensors["verifier_norm.weight"] = torch.ones(draft.config.hidden_size, dtype=draft.dtype)
    return config, tensors


def public_shapes(hidden: int, intermediate: int) -> dict[str, list[int]]:
    """Names and shapes of the public Qwen3 checkpoints: 32/8 heads of 128, five layers, G 1024, R 256."""
    layer = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [4096, hidden],
        "self_attn.k_proj.weight": [1024, hidden],
        "self_attn.v_proj.weight": [1024, hidden],
        "self_attn.o_proj.weight": [hidden, 4096],
        "self_attn.q_norm.weight": [128],
        "self_attn.k_norm.weight": [128],
        "mlp.gate_proj.weight": [intermediate, hidden],
        "mlp.up_proj.weight": [intermediate, hidden],
        "mlp.down_proj.weight": [hidden, intermediate],
    }
    return {
        "fc.weight": [hidden, 5 * hidden],
        "hidden_norm.weight": [hidden],
        "norm.weight": [hidden],
        "prefix_gru.weight_ih_l0": [3072, hidden],
        "prefix_gru.weight_hh_l0": [3072, 1024],
        "embed_proj.0.weight": [256, hidden + 1024],
        "embed_proj.2.weight": [151936, 256],
        **{f"layers.{i}.{name}": shape for i in range(5) for name, shape in layer.items()},
    }


@torch.no_grad()
def logits(draft: DominoForSpeculativeDraft, context_rows: int = 7) -> torch.Tensor:
    """Final logits of one block from inputs that depend on the draft's shapes alone, [1, 1, K, V]."""
    config = draft.config
    generator = torch.Generator().manual_seed(11)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(draft.dtype)

    slots, hidden = config.block_size, config.hidden_size
    lm_head = random(config.vocab_size, hidden)
    return draft(
        noise_embeds=random(1, 1, slots, hidden),
        context_hidden_states=random(1, context_rows, len(config.target_layer_ids) * hidden),
        prefix_embeds=random(1, 1, config.max_draft_tokens, hidden),
        position_ids=torch.arange(context_rows + slots)[None],
        lm_head=lambda states: states @ lm_head.T,
    ).logits
