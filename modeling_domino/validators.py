"""What serving engines accept, as rules on a draft's files: each engine's own checks, and what none of them checks.

An engine that reads a Domino file wrongly still returns the target's text, at one token a round. So the rules here also
hold what would fail in silence. Sources: SGLang #36899 (`domino_utils.py`, `dflash_utils.py`, `models/dflash.py`),
speculators PR #773 and issue #664, the state of vLLM (RFC #46707) and TensorRT-LLM (PR #15720).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from .configuration_domino import DOMINO_PROJECTORS, PLAIN_PROJECTORS, REQUIRED_KEYS, DominoConfig, rope_theta
from .draft_files import dtype_name, expected_shapes
from .layouts import HEAD_PREFIXES, TARGET_TENSORS, detect_layout, our_name, read_fields, speculative_tokens
from .modeling_domino import HEAD_TENSORS
from .speculation_domino import MAX_PADDING_ROWS
from .stored_tensors import StoredTensor, is_float
from .target_files import EMBEDDINGS, LM_HEAD, TargetFiles


W2 = "embed_proj.2.weight"


@dataclass(frozen=True)
class Violation:
    """
    Args:
        what: The rule that is broken and the value found.
        remedy: What to do about it.
    """

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass
class Checkpoint:
    """
    A draft as an engine would find it.

    Args:
        config: config.json.
        tensors: By their names in the files.
        target: What it shall draft for, where known.
        code: Names of the Python files beside it; None where they are not there to be looked at.
    """

    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    target: TargetFiles | None = None
    code: frozenset[str] | None = None

    @property
    def layout(self) -> str | None:
        """None where it is none of ours."""
        try:
            return detect_layout(self.config)
        except ValueError:
            return None

    @property
    def nested(self) -> dict[str, Any]:
        """`dflash_config` of the public layout."""
        found = self.config.get("dflash_config")
        return found if isinstance(found, dict) else {}

    @property
    def head(self) -> set[str]:
        """Head tensors in the files, by our names."""
        return {our_name(name, self.layout or "") for name in self.tensors} & HEAD_TENSORS

    @cached_property
    def reading(self) -> DominoConfig | ValueError:
        """The configuration as we read it, or why it cannot be."""
        try:
            fields = read_fields(self.config, self.layout, self.target)
            fields.pop("projector_type", None)
            return DominoConfig.from_dict(fields)
        except (ValueError, StrictDataclassError) as error:
            return ValueError(" ".join(str(error).split()))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Of every tensor that the configuration asks for, by our names; None where it cannot be read."""
        return None if isinstance(self.reading, ValueError) else expected_shapes(self.reading)


def violations(engine: str, checkpoint: Checkpoint) -> list[Violation]:
    """
    Everything that keeps an engine from decoding with a draft as it was trained.

    Args:
        engine: A name in `ENGINES`.
        checkpoint: The draft.

    Raises:
        ValueError: No such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"`{engine}` is no known engine: expected one of {', '.join(ENGINES)}.")
    return list(dict.fromkeys(ENGINES[engine](checkpoint)))


def _for_sglang(checkpoint: Checkpoint) -> Iterator[Violation]:
    if checkpoint.layout != "sglang":
        yield _wrong_layout(checkpoint, "sglang")
        return
    config, nested = checkpoint.config, checkpoint.nested
    if config.get("architectures") != ["DFlashDraftModel"]:
        yield Violation(
            f"`architectures` is {config.get('architectures')}", "SGLang knows the draft as ['DFlashDraftModel']"
        )
    if config.get("model_type") != "qwen3":
        yield Violation(f"`model_type` is {config.get('model_type')!r}", "write 'qwen3', whose fields the draft has")
    if "auto_map" in config:
        yield Violation("`auto_map` is there", "remove it: SGLang has its own code and would fetch the author's")
    if "dflash_config" not in config:
        yield Violation("`dflash_config` is missing", "put the draft's keys into it; at the top level none is read")
    if nested.get("projector_type") in PLAIN_PROJECTORS:
        yield from _plain_dflash(checkpoint)
    else:
        yield from _sglang_head(checkpoint)
    if not isinstance(config.get("rope_theta"), int | float):
        yield Violation(
            "`rope_theta` is missing at the top level",
            "write it flat; older readers take a default from `rope_parameters` and acceptance falls with position",
        )
    elif isinstance(config.get("rope_parameters"), dict) and rope_theta(config) != config["rope_theta"]:
        yield Violation("`rope_theta` and `rope_parameters` disagree", "remove `rope_parameters`")
    if not isinstance(config.get("num_target_layers"), int):
        yield Violation("`num_target_layers` is missing", "write the target's number of decoder layers")
    if config.get("tie_word_embeddings") is not False:
        yield Violation("`tie_word_embeddings` is not false", "the draft has no embeddings to tie: write false")
    if config.get("hidden_act", "silu") != "silu":
        yield Violation(f"`hidden_act` is {config['hidden_act']!r}", "SGLang's draft layers have SiLU alone")
    slides = "sliding_attention" in (config.get("layer_types") or [])
    if slides or nested.get("use_swa"):
        yield Violation(
            "the draft has sliding layers",
            "SGLang lets them see a block from left to right only, or takes no notice of `use_swa`; serve it with "
            "transformers, or train with full attention",
        )
    yield from _description(checkpoint)
    yield from _weights(checkpoint, dtype=torch.bfloat16)
    yield from _fits_target(checkpoint)


def _sglang_head(checkpoint: Checkpoint) -> Iterator[Violation]:
    config, nested = checkpoint.config, checkpoint.nested
    if nested.get("projector_type") not in DOMINO_PROJECTORS:
        yield Violation(
            f"`dflash_config.projector_type` is {nested.get('projector_type')!r}",
            "write 'domino', or the head is not used",
        )
    for key in ("mask_token_id", "target_layer_ids", "gru_hidden_dim", "emb_dim"):
        if nested.get(key) is None:
            yield Violation(f"`dflash_config.{key}` is missing", "write it as the draft was trained")
    if config.get("emb_dim") is None or config.get("emb_dim") != nested.get("emb_dim", config.get("emb_dim")):
        yield Violation(
            f"`emb_dim` is {config.get('emb_dim')} at the top level and {nested.get('emb_dim')} in `dflash_config`",
            "write the same number in both; readers differ in which one they take",
        )
    if config.get("block_size") is None:
        yield Violation(
            "`block_size` is missing at the top level", "write it there too; older readers look nowhere else"
        )
    block_size = nested.get("block_size", config.get("block_size"))
    if isinstance(block_size, int) and block_size < 2:
        yield Violation(f"`block_size` is {block_size}", "SGLang drafts block_size - 1 tokens and needs 2 slots")
    if not isinstance(nested.get("shift_label"), bool):
        yield _bad_alignment("dflash_config.shift_label", nested.get("shift_label"))
    if nested.get("pure_draft_prefix_len") != 1 or isinstance(nested.get("pure_draft_prefix_len"), bool):
        yield Violation(
            f"`dflash_config.pure_draft_prefix_len` is {nested.get('pure_draft_prefix_len')}",
            "SGLang decodes P = 1 alone; train with it, or serve with transformers",
        )
    yield from _head_tensors(checkpoint)


def _for_speculators(checkpoint: Checkpoint) -> Iterator[Violation]:
    layout, config = checkpoint.layout, checkpoint.config
    if layout not in HEAD_PREFIXES:
        yield _wrong_layout(checkpoint, "speculators-dflash` or `--to speculators-domino")
        return
    backbone = config.get("transformer_layer_config")
    if not isinstance(backbone, dict):
        yield Violation("`transformer_layer_config` is missing", "write the Qwen3 configuration of the draft's layers")
        return
    if config.get("draft_vocab_size") != backbone.get("vocab_size"):
        yield Violation(
            f"`draft_vocab_size` is {config.get('draft_vocab_size')} of {backbone.get('vocab_size')}",
            "a Domino head needs the target's whole vocabulary; retrain without a reduced one",
        )
    is_domino = layout == "speculators-domino" or config.get("projector_type") == "domino"
    if is_domino:
        yield from _speculators_head(checkpoint)
    else:
        yield from _plain_dflash(checkpoint)
    if not (config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path"):
        yield Violation("`speculators_config.verifier.name_or_path` is missing", "name the target")
    for name in (EMBEDDINGS, LM_HEAD):
        if name not in checkpoint.tensors:
            yield Violation(f"`{name}` is missing", "this layout brings the target's along; convert with `--target`")
        elif list(checkpoint.tensors[name].shape) != [backbone.get("vocab_size"), backbone.get("hidden_size")]:
            yield Violation(
                f"`{name}` is {list(checkpoint.tensors[name].shape)}",
                f"expected [{backbone.get('vocab_size')}, {backbone.get('hidden_size')}]; take it from the right target",
            )
    yield from _description(checkpoint)
    yield from _weights(checkpoint)
    yield from _fits_target(checkpoint)


def _speculators_head(checkpoint: Checkpoint) -> Iterator[Violation]:
    layout, config = checkpoint.layout, checkpoint.config
    alignment, width = ("sample_from_anchor", "logits_correction_emb_dim")
    if layout == "speculators-dflash":
        alignment, width = ("shift_label", "emb_dim")
    for key in ("gru_hidden_dim", width, "pure_draft_prefix_len", "block_size", "mask_token_id"):
        if config.get(key) is None:
            yield Violation(f"`{key}` is missing", "write it as trained; a reader's default would not be noticed")
    if not isinstance(config.get(alignment), bool):
        yield _bad_alignment(alignment, config.get(alignment))
    elif layout == "speculators-dflash" and not config[alignment]:
        yield Violation(
            "`shift_label` is false", "speculators PR #773 decodes shifted drafts alone; use speculators-domino"
        )
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = proposals[0].get("speculative_tokens")
    expected = tokens if checkpoint.shapes is None else speculative_tokens(checkpoint.reading, layout)
    if tokens != expected:
        yield Violation(f"`speculative_tokens` is {tokens}", f"{expected} follow from `block_size` and `{alignment}`")
    yield from _head_tensors(checkpoint)


def _for_transformers(checkpoint: Checkpoint) -> Iterator[Violation]:
    config = checkpoint.config
    if checkpoint.layout != "domino":
        yield _wrong_layout(checkpoint, "domino")
        return
    for name, path in (("AutoConfig", "configuration_domino.DominoConfig"), ("AutoModel", _MODEL)):
        if (config.get("auto_map") or {}).get(name) != path:
            yield Violation(
                f"`auto_map` does not name {path}", "convert again: without it AutoModel finds no code for the draft"
            )
    for module in ("configuration_domino.py", "modeling_domino.py"):
        if checkpoint.code is not None and module not in checkpoint.code:
            yield Violation(f"{module} is missing", "convert again: `trust_remote_code` loads it from the folder")
    for key in REQUIRED_KEYS:
        if config.get(key) is None:
            yield Violation(f"`{key}` is missing", "write it as the draft was trained")
    if checkpoint.head:
        yield from _head_tensors(checkpoint)
    yield from _description(checkpoint)
    yield from _weights(checkpoint)
    yield from _fits_target(checkpoint)


_MODEL = "modeling_domino.DominoForSpeculativeDraft"


def _without_domino(engine: str, where: str) -> Callable[[Checkpoint], Iterator[Violation]]:
    """An engine whose releases decode DFlash drafts and no Domino head."""

    def rules(checkpoint: Checkpoint) -> Iterator[Violation]:
        config = checkpoint.config
        projector = checkpoint.nested.get("projector_type", config.get("projector_type"))
        if checkpoint.head or checkpoint.layout == "speculators-domino" or projector not in PLAIN_PROJECTORS:
            yield Violation(
                "this is a Domino draft",
                f"no release of {engine} decodes one (its code is in {where}); read as DFlash it would give about one "
                "token a round, without an error. Serve it with SGLang or transformers",
            )
            return
        if checkpoint.layout not in ("sglang", "speculators-dflash"):
            yield _wrong_layout(checkpoint, "sglang")
            return
        yield from _plain_dflash(checkpoint)
        yield from _description(checkpoint)
        yield from _weights(checkpoint)
        yield from _fits_target(checkpoint)

    return rules


def _plain_dflash(checkpoint: Checkpoint) -> Iterator[Violation]:
    config, nested = checkpoint.config, checkpoint.nested
    if checkpoint.head:
        yield Violation(
            f"`projector_type` is missing, but {', '.join(sorted(checkpoint.head))} are there",
            "write 'domino' and how the head was trained; as DFlash the draft gives about one token a round",
        )
    if nested.get("shift_label") or config.get("shift_label") or config.get("sample_from_anchor"):
        yield Violation(
            "the labels are shifted in a draft without a head",
            "DFlash decoding reads every prediction one position late, without an error; serve it with transformers",
        )


def _head_tensors(checkpoint: Checkpoint) -> Iterator[Violation]:
    prefix = HEAD_PREFIXES.get(checkpoint.layout, "")
    for name in sorted(HEAD_TENSORS):
        if prefix + name not in checkpoint.tensors:
            yield Violation(f"`{prefix}{name}` is missing", "export the draft again with its whole head")


def _description(checkpoint: Checkpoint) -> Iterator[Violation]:
    """What every reader needs to be told rightly, whatever its layout."""
    if isinstance(checkpoint.reading, ValueError):
        yield Violation(f"config.json cannot be read ({checkpoint.reading})", "correct it as the message says")


def _weights(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> Iterator[Violation]:
    """Names and shapes by the configuration, one float type, and values that can have been trained."""
    layout, tensors = checkpoint.layout, checkpoint.tensors
    yield from _unknown_tensors(checkpoint)
    shapes = checkpoint.shapes or {}
    ours = {our_name(name, layout): name for name in tensors if our_name(name, layout) in shapes}
    for name, shape in shapes.items():
        if name not in ours:
            if name not in HEAD_TENSORS:  # said by _head_tensors, where there is to be a head
                yield Violation(f"`{name}` is missing", "copy the weights again, or correct config.json")
        elif tensors[ours[name]].shape != shape:
            yield Violation(
                f"`{ours[name]}` is {list(tensors[ours[name]].shape)}, expected {list(shape)} by config.json",
                "correct config.json, or take the weights that belong to it",
            )
    yield from _types(checkpoint, dtype)
    for name, stored in tensors.items():
        if not is_float(stored.dtype):
            continue
        values = stored.read()
        if not values.isfinite().all():
            yield Violation(f"`{name}` has values that are not finite", "take an earlier checkpoint of the training")
        if our_name(name, layout) == W2 and layout != "domino" and not values.any():
            yield Violation(
                f"`{name}` is zero everywhere: the head was never trained and corrects nothing",
                "train it (see that λ falls), or export the backbone alone",
            )


def _types(checkpoint: Checkpoint, dtype: torch.dtype | None) -> Iterator[Violation]:
    found = sorted({dtype_name(tensor.dtype) for tensor in checkpoint.tensors.values()})
    if dtype is not None and found != [dtype_name(dtype)]:
        yield Violation(
            f"weights are in {' and '.join(found)}", f"the engine takes {dtype_name(dtype)}; convert with `--dtype`"
        )
    elif len(found) > 1:
        yield Violation(f"weights are in {' and '.join(found)}", "convert with `--dtype` to one of them")
    for key in ("dtype", "torch_dtype"):
        if len(found) == 1 and checkpoint.config.get(key) not in (None, found[0]):
            yield Violation(f"`{key}` is {checkpoint.config[key]!r}, but the weights are in {found[0]}", "correct it")


def _unknown_tensors(checkpoint: Checkpoint) -> Iterator[Violation]:
    """Names that loaders skip without a word, so that what they hold is lost."""
    layout = checkpoint.layout
    prefix = HEAD_PREFIXES.get(layout, "")
    brought = TARGET_TENSORS if layout in HEAD_PREFIXES else set()
    if checkpoint.shapes is None:
        return  # _description says why
    known = {prefix + name if name in HEAD_TENSORS else name for name in checkpoint.shapes}
    for name in sorted(checkpoint.tensors.keys() - known - brought):
        if name in ("t2d", "d2t"):
            remedy = "it maps a reduced vocabulary, which a Domino head cannot have; retrain on the full one"
        elif "rotary_emb." in name:
            remedy = "remove it: rounded frequencies lose acceptance with position, readers compute their own"
        elif name in TARGET_TENSORS:
            remedy = "remove it: the target lends its own, and a copy would go stale"
        elif our_name(name, "sglang") in HEAD_TENSORS or any(
            our_name(name, other) in HEAD_TENSORS for other in HEAD_PREFIXES
        ):
            remedy = f"the loader would skip it and decode without the head; rename it to `{prefix}{_bare(name)}`"
        elif "prefix_gru." in name:
            remedy = "the GRU has one layer and no biases; this file's head is another one"
        else:
            remedy = "no loader reads it, so something that was trained would be missing"
        yield Violation(f"`{name}` is unknown", remedy)


def _bare(name: str) -> str:
    return next(tensor for tensor in HEAD_TENSORS if name.endswith(tensor))


def _fits_target(checkpoint: Checkpoint) -> Iterator[Violation]:
    target, config = checkpoint.target, checkpoint.reading
    if target is None or isinstance(config, ValueError):
        return
    text, ours_alone = target.text_config, checkpoint.layout == "domino"
    remedy = f"use the target that it was trained for, or re-fit it: `domino convert ... --to domino --target {target.name}`"
    for what, ours, theirs in (
        ("vocabulary", config.vocab_size, text.vocab_size),
        ("hidden size", config.hidden_size, text.hidden_size),
        ("number of target layers", config.num_target_layers, text.num_hidden_layers),
    ):
        padding = MAX_PADDING_ROWS if ours_alone and what == "vocabulary" else 0
        if abs(ours - theirs) > padding:
            yield Violation(f"the draft's {what} is {ours}, the target's {theirs}", remedy)
    theta = rope_theta(vars(text))
    if not ours_alone and theta is not None and theta != config.rope_parameters["rope_theta"]:
        yield Violation(
            f"the draft's rope base is {config.rope_parameters['rope_theta']:g}, the target's {theta:g}", remedy
        )
    for kind in ("bos", "eos", "pad"):
        ids = getattr(text, f"{kind}_token_id", None)
        if config.mask_token_id in (ids if isinstance(ids, list) else [ids]):
            yield Violation(
                f"`mask_token_id` {config.mask_token_id} is the target's {kind.upper()} token",
                "write the id that the draft was trained with; a tokenizer's own mask token is not it",
            )
    if not ours_alone:
        for oddity in target.oddities:
            yield Violation(
                f"of the target, {oddity}", "engines borrow the bare matrices; serve this pair with transformers"
            )


def _bad_alignment(key: str, value: Any) -> Violation:
    return Violation(
        f"`{key}` is {value!r}, expected true or false",
        "write how the draft was trained (public ones: true); read the wrong way it gives about one token a round",
    )


def _wrong_layout(checkpoint: Checkpoint, layout: str) -> Violation:
    return Violation(
        f"the file is in the layout {checkpoint.layout or 'of no draft that is known here'}",
        f"`domino convert SRC DST --to {layout}`",
    )


ENGINES: dict[str, Callable[[Checkpoint], Iterator[Violation]]] = {
    "transformers": _for_transformers,
    "sglang": _for_sglang,
    "speculators": _for_speculators,
    "vllm": _without_domino("vLLM", "open pull requests: #48241 and speculators' branches"),
    "tensorrt-llm": _without_domino("TensorRT-LLM", "the closed pull request #15720"),
}

__all__ = ["ENGINES", "Checkpoint", "Violation", "violations"]
