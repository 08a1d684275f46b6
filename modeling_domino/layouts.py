"""The file layouts of Domino and DFlash drafts: how each spells our configuration and names our tensors.

Pure translation between dictionaries; files are elsewhere. Layouts:

    domino               ours: flat keys, `model_type: domino`
    sglang               the author's public one, also of SpecForge, NeMo Automodel and ModelOpt: `dflash_config`
    speculators-dflash   speculators PR #773: `domino_head.*`, P and alignment at the top level
    speculators-domino   speculators issue #664: `logits_correction.*`, `sample_from_anchor`
    transformers-dflash  transformers' own assistant (muse_glimmer_assistant): read only

The two speculators layouts count tapped layers from 1 (0 is the embedding output) and bring the target's embeddings
and head along.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .configuration_domino import DominoConfig, read_public_layout, rope_theta
from .target_files import EMBEDDINGS, LM_HEAD, TargetFiles


WRITTEN = ("domino", "sglang", "speculators-dflash", "speculators-domino")
PUBLIC_ARCHITECTURES = {"DFlashDraftModel", "DominoDraftModel", "Qwen3DFlashDraftModel"}
HEAD_PREFIXES = {"speculators-dflash": "domino_head.", "speculators-domino": "logits_correction."}
HEAD_MODULES = ("prefix_gru.", "embed_proj.")
# Copies that the speculators layouts bring along; they are the target's.
TARGET_TENSORS = {EMBEDDINGS, LM_HEAD, "verifier_lm_head.weight", "verifier_norm.weight"}
NATIVE_NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
PUBLIC_VALUES = {"shift_label": True, "pure_draft_prefix_len": 1}
PLAIN = {"shift_label": False, "pure_draft_prefix_len": 1, "projector_type": "dflash"}

BACKBONE_KEYS = (
    *["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
    *["num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "layer_types"],
    *["sliding_window", "use_sliding_window", "max_window_layers", "attention_bias", "attention_dropout"],
    *["initializer_range", "tie_word_embeddings", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"],
)
NESTED_KEYS = (
    *["mask_token_id", "target_layer_ids", "pure_draft_prefix_len", "gru_hidden_dim", "emb_dim", "shift_label"],
)
# Keys beside our own fields that say nothing about decoding, or whose meaning is read by name.
KNOWN_ELSEWHERE = {
    *["auto_map", "torch_dtype", "rope_theta", "rope_scaling", "projector_type"],
    *["lambda_base_start", "lambda_base_decay_ratio", "auf", "loss_decay_gamma", "num_anchors"],
    *["output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16", "pruned_heads"],
    *["is_decoder", "cross_attention_hidden_size", "add_cross_attention", "tie_encoder_decoder", "finetuning_task"],
}
NESTED_KNOWN = {
    *NESTED_KEYS,
    *["block_size", "num_target_layers", "projector_type", "causal", "use_swa", "swa_window_size"],
    *["use_bias_norm", "use_bias_gate", "bias_gate_init"],
}
SPECULATORS_KEYS = {
    *["speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config"],
    *["draft_vocab_size", "aux_hidden_state_layer_ids", "logits_correction_emb_dim", "sample_from_anchor"],
    *["sliding_window_non_causal", "has_no_defaults_at_init"],
}


def detect_layout(config: dict[str, Any]) -> str:
    """
    Which layout a configuration is in.

    Raises:
        ValueError: None that can be read.
    """
    speculators = config.get("speculators_model_type")
    if speculators is not None:
        if f"speculators-{speculators}" not in HEAD_PREFIXES:
            raise ValueError(f"`speculators_model_type` is {speculators!r}, expected 'dflash' or 'domino'.")
        return f"speculators-{speculators}"
    if config.get("model_type") == DominoConfig.model_type:
        return "domino"
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers-dflash"
    if "dflash_config" in config or PUBLIC_ARCHITECTURES & set(config.get("architectures") or []):
        return "sglang"
    raise ValueError(
        f"This is no draft that can be read: `model_type` is {config.get('model_type')!r} and `architectures` "
        f"{config.get('architectures')}, but neither `dflash_config` nor `speculators_model_type` is there."
    )


def unknown_keys(config: dict[str, Any], layout: str) -> list[str]:
    """Keys that no reader of the layout knows, as `key` or `outer.key`; those that begin with _ are transformers' own."""
    known = set(DominoConfig.__dataclass_fields__) | set(PreTrainedConfig.__dataclass_fields__) | KNOWN_ELSEWHERE
    if layout.startswith("speculators"):
        outer, inner = known | SPECULATORS_KEYS, {"transformer_layer_config": known}
    else:
        outer, inner = known | {"dflash_config"}, {"dflash_config": NESTED_KNOWN}
    found = [key for key in config if key not in outer]
    for place, keys in inner.items():
        found += [f"{place}.{key}" for key in config.get(place) or {} if key not in keys]
    return [key for key in found if not key.rpartition(".")[2].startswith("_")]


def read_fields(config: dict[str, Any], layout: str, target: TargetFiles | None = None) -> dict[str, Any]:
    """
    The fields of a `DominoConfig` that a configuration states; what it leaves out stays out.

    Args:
        config: As in config.json.
        layout: From `detect_layout`.
        target: Fills in what a layout does not say: layer count, vocabulary, rope base.

    Returns:
        Fields by our names; `projector_type: dflash` among them where no head belongs to the draft.

    Raises:
        ValueError: Keys contradict each other, or only the target knows what is missing.
    """
    if layout == "domino":
        fields = dict(config)
    elif layout == "sglang":
        fields = read_public_layout({**config, "dflash_config": _nested(config)})
        _refuse_unsaid_direction(fields, _nested(config).get("causal"), "`causal: false` in `dflash_config`")
    elif layout == "transformers-dflash":
        fields = _read_native(config, target)
    else:
        fields = _read_speculators(config, target)
    if target is not None:
        if fields.get("num_target_layers") is None:
            fields["num_target_layers"] = target.text_config.num_hidden_layers
        if rope_theta(fields) is None:
            fields["rope_theta"] = rope_theta(vars(target.text_config))
    fields |= {"model_type": DominoConfig.model_type, "architectures": ["DominoForSpeculativeDraft"]}
    fields.pop("auto_map", None)
    if fields.get("num_target_layers") is None:
        raise ValueError(
            "The file does not say how many layers the target has (`num_target_layers`): name the target with "
            "`--target`."
        )
    return fields


def our_name(name: str, layout: str) -> str | None:
    """Our name of a stored tensor; None for copies of the target's and buffers that are computed anew."""
    name = name.removeprefix("logit_head.")
    if "rotary_emb." in name:
        return None
    if layout == "transformers-dflash":
        return NATIVE_NAMES.get(name, name)
    if layout in HEAD_PREFIXES:
        return None if name in TARGET_TENSORS else name.removeprefix(HEAD_PREFIXES[layout])
    return name


def written_name(name: str, layout: str) -> str:
    """What a layout calls one of our tensors."""
    return HEAD_PREFIXES.get(layout, "") + name if name.startswith(HEAD_MODULES) else name


def public_config(config: DominoConfig, dtype: str, *, has_head: bool) -> dict[str, Any]:
    """The author's layout, as SGLang, ModelOpt's readers and TensorRT-LLM's branch parse it."""
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    head = {}
    if has_head:
        nested |= {"projector_type": "domino", **{key: getattr(config, key) for key in NESTED_KEYS}}
        head = {"emb_dim": config.emb_dim}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        **head,
        "dflash_config": nested,
        "num_target_layers": config.num_target_layers,
        **backbone_config(config, dtype),
    }


def speculators_config(
    config: DominoConfig, dtype: str, layout: str, target: TargetFiles, *, has_head: bool
) -> dict[str, Any]:
    """One of the two layouts of speculators; a draft without a head is a plain DFlash one in the first."""
    kind = layout.removeprefix("speculators-")
    if kind == "domino":
        head = {
            "gru_hidden_dim": config.gru_hidden_dim,
            "logits_correction_emb_dim": config.emb_dim,
            "pure_draft_prefix_len": config.pure_draft_prefix_len,
            "sample_from_anchor": config.shift_label,
        }
    elif has_head:
        head = {"projector_type": "domino", **{key: getattr(config, key) for key in NESTED_KEYS[2:]}}
    else:
        head = {}
    return {
        "architectures": ["DominoSpeculator" if kind == "domino" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": speculative_tokens(config, layout)},
            ],
            "verifier": {"name_or_path": target.name, "architectures": target.architectures},
        },
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "draft_vocab_size": config.vocab_size,
        **head,
        "transformer_layer_config": {"model_type": "qwen3", **backbone_config(config, dtype)},
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def speculative_tokens(config: DominoConfig, layout: str) -> int:
    """Tokens that speculators drafts a round: PR #773 always leaves one slot unused."""
    return config.max_draft_tokens if layout == "speculators-domino" else config.block_size - 1


def backbone_config(config: DominoConfig, dtype: str) -> dict[str, Any]:
    """The Qwen3 part with a flat rope base, which readers of any transformers release find."""
    scaling = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    return {
        **{key: getattr(config, key) for key in BACKBONE_KEYS},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """`dflash_config`; early files have all of its keys at the top level."""
    nested = dict(config.get("dflash_config") or {})
    if "projector_type" in config:
        nested.setdefault("projector_type", config["projector_type"])
    return nested


def _read_native(config: dict[str, Any], target: TargetFiles | None) -> dict[str, Any]:
    if target is None:
        raise ValueError(
            "A DFlash assistant of transformers does not say which vocabulary and how many layers its target has: name "
            "the target with `--target`."
        )
    if target.norms_embeddings:
        raise ValueError(
            f"{target.name} norms its embeddings, which transformers leaves out for this draft and Domino decoding would "
            "not: its blocks would be embedded differently from training. Decode it with transformers' own "
            "`speculation_type='dflash'`."
        )
    native = AutoConfig.for_model(**config)
    # transformers counts a window inclusively where it looks both ways: |distance| <= window; we say < window.
    window = native.sliding_window + 1 if "sliding_attention" in native.layer_types else None
    return {
        **{key: getattr(native, key) for key in (*BACKBONE_KEYS, "rope_parameters") if hasattr(native, key)},
        **{key: getattr(native, key) for key in ("block_size", "mask_token_id", "target_layer_ids", "dtype")},
        **PLAIN,
        "vocab_size": target.text_config.vocab_size,
        "sliding_window": window,
        "tie_word_embeddings": False,
    }


def _read_speculators(config: dict[str, Any], target: TargetFiles | None) -> dict[str, Any]:
    fields = dict(config["transformer_layer_config"])
    reduced = config.get("draft_vocab_size", fields.get("vocab_size"))
    if reduced != fields.get("vocab_size"):
        raise ValueError(
            f"`draft_vocab_size` is {reduced} of {fields.get('vocab_size')} tokens: a Domino head corrects every token of "
            "the target, so a reduced vocabulary cannot be read. Train the draft on the full one."
        )
    taps = config.get("aux_hidden_state_layer_ids")
    if not taps or min(taps) < 1:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` is {taps}, where 0 is the embedding output: a Domino draft taps decoder "
            "layers, numbered from 1 in this layout."
        )
    fields["target_layer_ids"] = [layer_id - 1 for layer_id in taps]
    alignments = {config[key] for key in ("shift_label", "sample_from_anchor") if config.get(key) is not None}
    if len(alignments) > 1:
        raise ValueError("`shift_label` and `sample_from_anchor` contradict each other: they say the same thing.")
    if alignments:
        fields["shift_label"] = alignments.pop()
    for ours, theirs in (("emb_dim", "logits_correction_emb_dim"), *((key, key) for key in _SAME_KEYS)):
        if config.get(theirs) is not None:
            fields[ours] = config[theirs]
    if config["speculators_model_type"] == "dflash" and config.get("projector_type") != "domino":
        if fields.get("shift_label"):
            raise ValueError(
                "The alignment is shifted in a file without a Domino head (`projector_type`), but DFlash drafts are "
                "unshifted: if the file has a head, add `projector_type: domino`."
            )
        fields |= PLAIN
    causal = None if config.get("sliding_window_non_causal") is None else not config["sliding_window_non_causal"]
    _refuse_unsaid_direction(fields, causal, "`sliding_window_non_causal: true`")
    return fields


_SAME_KEYS = ("block_size", "mask_token_id", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "dtype")


def _refuse_unsaid_direction(fields: dict[str, Any], causal: bool | None, statement: str) -> None:
    slides = "sliding_attention" in (fields.get("layer_types") or [])
    if slides and causal is not False:
        raise ValueError(
            "The draft has sliding layers and does not say that they see a block both ways, as Domino layers do; "
            f"SpecForge and speculators train them from left to right. If these look both ways, add {statement}."
        )


__all__ = [
    "HEAD_PREFIXES",
    "PUBLIC_VALUES",
    "TARGET_TENSORS",
    "WRITTEN",
    "detect_layout",
    "our_name",
    "public_config",
    "read_fields",
    "speculative_tokens",
    "speculators_config",
    "unknown_keys",
    "written_name",
]
