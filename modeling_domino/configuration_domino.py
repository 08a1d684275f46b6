"""What a Domino draft is made of: block, mask token, tapped target layers, head sizes (paper section 3).

`DominoConfig()` is the paper's draft for Qwen3-8B. `DominoConfig.from_target` derives one for any decoder-only
target. A configuration read from a file, ours or the public layout (`model_type: qwen3` with a nested
`dflash_config`), must name all that nothing else would contradict (alignment, block, mask token, rope base): a wrong
guess gives the target's text all the same, only slowly.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.utils import logging


logger = logging.get_logger(__name__)

DOMINO_PROJECTORS = ("domino", "causal_v5")
PLAIN_PROJECTORS = (None, "dflash")  # DFlash: a backbone without a correction head
# What a file must say: no shape of a tensor and no error would tell of a wrong default.
REQUIRED_KEYS = ("shift_label", "pure_draft_prefix_len", "block_size", "mask_token_id")
# Other frameworks' lists of taps, which count the embedding output as 0.
ONE_BASED_TAPS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


@strict
class DominoConfig(Qwen3Config):
    r"""
    Configuration of a [`DominoForSpeculativeDraft`]. The backbone fields are those of [`Qwen3Config`], whose layers
    the draft uses whatever the target is.

    Args:
        block_size (`int`, *optional*, defaults to 16):
            B, the slots of one block: the anchor and B-1 mask tokens.
        mask_token_id (`int`, *optional*, defaults to 151669):
            Id that fills the masked slots; a row of the target's embedding that no text uses.
        num_target_layers (`int`, *optional*, defaults to 36):
            Decoder layers of the target.
        target_layer_ids (`list[int]`, *optional*):
            Zero-based target layers whose outputs are the context; the public formula's by default.
        gru_hidden_dim (`int`, *optional*, defaults to 1024):
            G, width of the prefix GRU.
        emb_dim (`int`, *optional*, defaults to 256):
            R, rank of the correction in logit space.
        pure_draft_prefix_len (`int`, *optional*, defaults to 1):
            P, leading predictions of a block that keep their base logits.
        shift_label (`bool`, *optional*, defaults to `True`):
            True: slot k predicts token anchor+k+1. False: slot k predicts token anchor+k, and slot 0 is unused.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`):
            Always false: the draft owns neither embeddings nor a language-model head.
    """

    model_type = "domino"
    default_theta = 1_000_000.0

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 40960
    block_size: int = 16
    mask_token_id: int = 151669
    num_target_layers: int = 36
    target_layer_ids: list[int] | None = None
    gru_hidden_dim: int = 1024
    emb_dim: int = 256
    pure_draft_prefix_len: int = 1
    shift_label: bool = True

    def __post_init__(self, **kwargs):
        self._refuse_misspelt(kwargs)
        if self.target_layer_ids is None:
            self.target_layer_ids = spread_layer_ids(self.num_target_layers, self.num_hidden_layers)
        if self.layer_types is not None and "sliding_attention" in self.layer_types:
            self.use_sliding_window = True
        super().__post_init__(**kwargs)

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens one block can draft: B, or B-1 when slot 0 predicts nothing (`shift_label=False`)."""
        return self.block_size if self.shift_label else self.block_size - 1

    @classmethod
    def _refuse_misspelt(cls, unknown: Iterable[str]) -> None:
        known = set(cls.__dataclass_fields__)
        inherited = set(PreTrainedConfig.__dataclass_fields__)
        for key in unknown:
            near = difflib.get_close_matches(key, known - inherited, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"DominoConfig has no field `{key}`: did you mean `{near[0]}`?")

    def validate_block(self):
        """The block must hold at least one prediction, and P must leave its slots inside the block."""
        smallest = 1 if self.shift_label else 2
        if self.block_size < smallest:
            raise ValueError(
                f"`block_size` is {self.block_size}, expected at least {smallest} with "
                f"`shift_label={self.shift_label}`: raise it so that a block drafts one token or more."
            )
        if not 0 <= self.pure_draft_prefix_len <= self.block_size - 1:
            raise ValueError(
                f"`pure_draft_prefix_len` is {self.pure_draft_prefix_len}, expected a value in "
                f"[0, {self.block_size - 1}] for `block_size={self.block_size}`."
            )

    def validate_target_layers(self):
        """Taps are raw layer outputs; the last layer's is normed by transformers and cannot be told apart."""
        last = self.num_target_layers - 1
        if not self.target_layer_ids:
            raise ValueError("`target_layer_ids` is empty: name at least one target layer to tap.")
        for layer_id in self.target_layer_ids:
            if not 0 <= layer_id <= last:
                raise ValueError(
                    f"`target_layer_ids` taps layer {layer_id}, but the target has layers 0 to {last} "
                    f"(`num_target_layers={self.num_target_layers}`): choose ids within them."
                )
            if layer_id == last:
                raise ValueError(
                    f"`target_layer_ids` taps layer {layer_id}, the target's last, whose output transformers "
                    f"returns after the final norm: choose ids up to {last - 1}."
                )

    def validate_mask_token(self):
        """The mask must be an embedding row that no generated text can contain."""
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"`mask_token_id` is {self.mask_token_id}, outside the {self.vocab_size} embedding rows of the "
                f"target: choose an id in [0, {self.vocab_size - 1}]."
            )
        for name, ids in (("BOS", self.bos_token_id), ("EOS", self.eos_token_id), ("PAD", self.pad_token_id)):
            if self.mask_token_id in (ids if isinstance(ids, list) else [ids]):
                raise ValueError(
                    f"`mask_token_id` is {self.mask_token_id}, which is also the {name} token: choose a row that no "
                    "text uses."
                )

    def validate_draft_layers(self):
        """The published layers have no bias, and a sliding window must cover the block itself."""
        if self.attention_bias:
            raise ValueError("`attention_bias=True` is not a Domino draft: its layers have no bias; set it to False.")
        if self.tie_word_embeddings:
            raise ValueError("`tie_word_embeddings=True` has no meaning: a draft owns no embeddings; set it to False.")
        if "sliding_attention" in self.layer_types and (self.sliding_window or 0) < self.block_size:
            raise ValueError(
                f"`sliding_window` is {self.sliding_window}, expected at least `block_size={self.block_size}` when "
                "`layer_types` has sliding layers, since slots of one block attend to each other."
            )

    @classmethod
    def from_target(cls, target_config: PreTrainedConfig, *, tokenizer=None, **overrides) -> "DominoConfig":
        """
        Derives the configuration of a draft for a decoder-only target.

        Args:
            target_config: Configuration of the target; the text part of a multimodal one is used.
            tokenizer: The target's tokenizer, from which a mask token is picked when `mask_token_id` is not given.
            overrides: Any field of `DominoConfig`; wins over what is derived.

        Returns:
            A validated `DominoConfig`. What the target could not tell and was invented is logged in one warning.

        Raises:
            ValueError: No mask token could be picked, or an override is no field. Values that do not fit the target
                raise the validation errors of `huggingface_hub.dataclasses`.
        """
        unknown = sorted(set(overrides) - set(cls.__dataclass_fields__))
        cls._refuse_misspelt(unknown)
        if unknown:
            raise ValueError(f"DominoConfig has no field `{unknown[0]}`: its fields are listed in its docstring.")
        if target_config.is_encoder_decoder:
            raise ValueError(
                f"The target is a `{target_config.model_type}` encoder-decoder; Domino drafts for decoder-only targets."
            )
        text = target_config.get_text_config(decoder=True)
        invented = []

        def inherit(name: str, default):
            value = getattr(text, name, None)
            if value is None:
                invented.append(f"{name}={default}")
                return default
            return value

        heads = text.num_attention_heads
        fields = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // heads,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
        }
        for name, default in (
            ("intermediate_size", 4 * text.hidden_size),
            ("max_position_embeddings", cls.max_position_embeddings),
            ("rms_norm_eps", cls.rms_norm_eps),
            ("initializer_range", cls.initializer_range),
        ):
            if name not in overrides:
                fields[name] = inherit(name, default)
        if "rope_parameters" not in overrides:
            theta = rope_theta(vars(text))
            if theta is None:
                theta = 10_000.0
                invented.append(f"rope_theta={theta:g}")
            fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if "mask_token_id" not in overrides:
            if tokenizer is None:
                raise ValueError(
                    "A Domino draft needs a mask token: pass `mask_token_id=` (an embedding row that no text uses) or "
                    "`tokenizer=` (the target's) to have one picked."
                )
            fields["mask_token_id"], what = pick_mask_token(tokenizer, fields["vocab_size"])
            invented.append(f"mask_token_id={fields['mask_token_id']} ({what})")
        if invented:
            logger.warning(f"DominoConfig.from_target chose what the target does not say: {', '.join(invented)}.")
        return cls(**{**fields, **overrides})

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return read_public_layout(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """
        Reads our layout or the public one.

        Raises:
            ValueError: The file leaves out alignment, block size, mask token or rope base, which are never guessed, or
                lists its taps in another framework's way.
        """
        config_dict = read_public_layout(config_dict)
        missing = [key for key in REQUIRED_KEYS if config_dict.get(key) is None]
        if rope_theta(config_dict) is None:
            missing.append("rope_theta")
        if missing:
            raise ValueError(
                f"The draft's configuration lacks {' and '.join(f'`{key}`' for key in missing)}, which cannot be "
                "guessed: a wrong value decodes slowly, without any error. Add the values the draft was trained with "
                "(public Domino drafts for Qwen3: `shift_label: true`, `pure_draft_prefix_len: 1`, `block_size: 16`, "
                "`mask_token_id: 151669`, `rope_theta: 1000000`)."
            )
        for key in ONE_BASED_TAPS:
            if key in config_dict:
                raise ValueError(
                    f"`{key}: {config_dict[key]}` counts the embedding output as 0; a Domino draft names its taps in "
                    "`target_layer_ids`, where 0 is the first decoder layer: subtract one from each and rename the key "
                    "(`domino convert` does so for a speculators file)."
                )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def from_json_file(cls, json_file):
        """As `from_dict`, so that no way of reading a file guesses."""
        return cls.from_dict(cls._dict_from_json_file(json_file))


def spread_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """The public default: `num_taps` layers spread evenly from layer 1 to the third last, never the last.

    Targets of few layers give fewer, distinct ids.
    """
    if num_target_layers < 2:
        raise ValueError(f"The target has {num_target_layers} layer(s); a draft taps layers before the last one.")
    if num_taps == 1:
        return [min(num_target_layers // 2, num_target_layers - 2)]
    first, last = 1, num_target_layers - 3
    ids = (round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))
    return sorted({min(max(layer_id, 0), num_target_layers - 2) for layer_id in ids})


def pick_mask_token(tokenizer, embedding_rows: int) -> tuple[int, str]:
    """A row that no token uses, else a special token that neither chat template nor ordinary text produces.

    Returns:
        The id and, in words, what it is.
    """
    used = max(tokenizer.get_vocab().values()) + 1
    if used < embedding_rows:
        return used, "a row that no token uses"
    template = str(tokenizer.chat_template or "")
    reserved = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    spare = {
        token_id: token.content
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special and token_id not in reserved and token.content not in template
    }
    if not spare:
        raise ValueError(
            f"All {embedding_rows} embedding rows are in use and the tokenizer has no spare special token: pass "
            "`mask_token_id=` with the id of a token that your texts never contain."
        )
    mask_token_id = max(spare)
    return mask_token_id, f"the special token {spare[mask_token_id]!r}, since every row is in use"


def read_public_layout(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Flattens the public layout (nested `dflash_config`) into our fields; our own layout passes unchanged.

    A plain DFlash file, which has no correction head, is unshifted by definition and keeps `projector_type: dflash`,
    so that whoever loads the weights knows that no head belongs to them.

    Raises:
        ValueError: A key stands in both places with different values, or the file wants what a Domino draft has not.
    """
    if "dflash_config" not in config_dict:
        return config_dict
    flat = {key: value for key, value in config_dict.items() if key not in ("dflash_config", "auto_map")}
    for key, value in config_dict["dflash_config"].items():
        if flat.get(key) not in (None, value):
            raise ValueError(
                f"`{key}` is {flat[key]} at the top level but {value} in `dflash_config`: make the two agree."
            )
        flat[key] = value
    projector = flat.pop("projector_type", None)
    if projector in PLAIN_PROJECTORS:
        _read_as_plain(flat)
    elif projector not in DOMINO_PROJECTORS:
        raise ValueError(
            f"`dflash_config.projector_type` is {projector!r}, expected one of {DOMINO_PROJECTORS}, or 'dflash' for a "
            "draft without a head: this file is not a Domino draft."
        )
    _read_legacy_options(flat)
    _read_window(flat)
    flat["model_type"] = DominoConfig.model_type
    flat["architectures"] = ["DominoForSpeculativeDraft"]
    return flat


def _read_as_plain(flat: dict[str, Any]) -> None:
    if flat.get("shift_label"):
        raise ValueError(
            "`shift_label` is true in a file without a Domino head (`dflash_config.projector_type` is missing or "
            "'dflash'), but DFlash drafts are unshifted: if the file has a head, add `projector_type: domino`."
        )
    flat["shift_label"] = False
    if flat.get("pure_draft_prefix_len") is None:
        flat["pure_draft_prefix_len"] = 1  # without a head it changes nothing
    for key in ("emb_dim", "gru_hidden_dim"):
        if flat.get(key) is None:
            flat.pop(key, None)
    flat["projector_type"] = "dflash"


def _read_legacy_options(flat: dict[str, Any]) -> None:
    """Switches of early training code: off, they say nothing; on, they stand for parts that no public draft has."""
    for key in ("use_bias_norm", "use_bias_gate"):
        if flat.pop(key, False):
            raise ValueError(f"`{key}` is true, which this implementation has not: no public draft uses it.")
    flat.pop("bias_gate_init", None)


def _read_window(flat: dict[str, Any]) -> None:
    """ModelOpt's way to say that all layers slide: `use_swa`, with `layer_types` left at full attention."""
    if flat.pop("causal", False):
        raise ValueError(
            "`causal` is true: the sliding layers of this draft see a block from left to right only, but Domino layers "
            "see it both ways. Decoding it here would lose acceptance without an error."
        )
    use_swa, window = flat.pop("use_swa", False), flat.pop("swa_window_size", None)
    if not use_swa:
        return
    if window is None:
        window = flat.get("sliding_window")
    if window is None or flat.get("sliding_window") not in (None, window):
        raise ValueError(
            f"`use_swa` is true, but `swa_window_size` is {window} and `sliding_window` {flat.get('sliding_window')}: "
            "state one window."
        )
    flat["sliding_window"] = window
    if "sliding_attention" not in (flat.get("layer_types") or []):
        flat["layer_types"] = ["sliding_attention"] * flat.get("num_hidden_layers", DominoConfig.num_hidden_layers)


def rope_theta(config: dict[str, Any]) -> float | None:
    """The rope base; that of the full-attention layers where each layer type has its own. New place, then old."""
    parameters = config.get("rope_parameters") or {}
    parameters = parameters.get("full_attention") or parameters
    return parameters.get("rope_theta") or config.get("rope_theta")


DominoConfig.register_for_auto_class()

__all__ = ["DominoConfig", "pick_mask_token", "read_public_layout", "rope_theta", "spread_layer_ids"]
