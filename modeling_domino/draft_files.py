"""A draft by its files, in any layout: our configuration, and our names for tensors that are still on disk."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from .configuration_domino import DominoConfig
from .layouts import HEAD_PREFIXES, PUBLIC_VALUES, detect_layout, our_name, read_fields, unknown_keys
from .modeling_domino import HEAD_TENSORS, DominoForSpeculativeDraft
from .stored_tensors import StoredTensor, is_float, open_tensors
from .target_files import TargetFiles, local_folder


# Of early training code that never became public: each would be decoded by other rules than ours.
FOREIGN_HEADS = ("causal_gru.", "correction_w1.", "correction_w2.", "markov_head.")


@dataclass
class DraftFiles:
    """
    Args:
        layout: That of the files.
        config: Ours.
        tensors: By our names, in one float type; the four of the head are there or all absent.
        notes: What a reader should know was dropped, assumed or changed.
    """

    layout: str
    config: DominoConfig
    tensors: dict[str, StoredTensor]
    notes: list[str] = field(default_factory=list)

    @property
    def has_head(self) -> bool:
        """False for a backbone alone, such as a DFlash draft."""
        return self.tensors.keys() >= HEAD_TENSORS

    @property
    def dtype(self) -> torch.dtype:
        """Of every tensor."""
        return next(iter(self.tensors.values())).dtype

    def cast(self, dtype: torch.dtype) -> None:
        """All weights in another float type, and a note of it."""
        before = " and ".join(sorted({dtype_name(tensor.dtype) for tensor in self.tensors.values()}))
        self.tensors = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        self.config.dtype = dtype
        self.notes.append(f"Weights cast from {before} to {dtype_name(dtype)}.")


def dtype_name(dtype: torch.dtype) -> str:
    """As config.json spells it."""
    return str(dtype).removeprefix("torch.")


def read_config(folder: str | Path) -> dict:
    """The folder's config.json; OSError or ValueError where there is none or it is no JSON object."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file ({error}): copy it again.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object: copy it again.")
    return config


def read_draft(
    source: str,
    *,
    target: TargetFiles | None = None,
    assume_public: bool = False,
    ignore_keys: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> DraftFiles:
    """
    Opens a draft in any layout; weights are read later, one by one.

    Args:
        source: Folder or Hub id.
        target: Fills in what some layouts leave to it (see `read_fields`).
        assume_public: Where alignment or P are missing, take the public drafts' values.
        ignore_keys: Keys of config.json to drop although no reader knows them.
        dtype: Float type to round to. None: that of the files, which must then be the same everywhere.

    Raises:
        ValueError: Anything in the files that would be decoded wrongly or not at all; each message names its remedy.
        OSError: A file is missing.
    """
    folder = local_folder(source)
    raw = {key: value for key, value in read_config(folder).items() if key not in ignore_keys}
    layout = detect_layout(raw)
    if raw.get("quantization_config"):
        raise ValueError(f"{source} is quantised: convert the draft that it was made from.")
    if unknown := [key for key in unknown_keys(raw, layout) if key not in ignore_keys]:
        raise ValueError(
            f"{source}: config.json has keys that nothing here knows, {', '.join(f'`{key}`' for key in unknown)}: they "
            "may change how the draft decodes. If they do not, drop them with `--ignore-key KEY`."
        )
    for key in ignore_keys:
        (raw.get("dflash_config") or {}).pop(key.removeprefix("dflash_config."), None)
        (raw.get("transformer_layer_config") or {}).pop(key.removeprefix("transformer_layer_config."), None)
    fields = read_fields(raw, layout, target)
    is_plain = fields.pop("projector_type", None) == "dflash"
    notes = []
    if assume_public:
        for key, value in PUBLIC_VALUES.items():
            if fields.get(key) is None:
                fields[key] = value
                notes.append(f"ASSUMED, not read: `{key}` = {str(value).lower()}, as in the public Domino drafts.")
    tensors = _our_tensors(source, open_tensors(folder), layout, notes)
    has_head = not HEAD_TENSORS.isdisjoint(tensors)
    if has_head and is_plain:
        raise ValueError(
            f"{source} holds the tensors of a Domino head, but its config.json describes a DFlash draft without one: "
            "add `projector_type: domino` and the alignment that it was trained with. As plain DFlash it would "
            "decode at about one token a round, without any error."
        )
    if not has_head and not is_plain and layout != "domino":
        raise ValueError(
            f"{source}: config.json describes a Domino head, but {', '.join(sorted(HEAD_TENSORS))} are missing: export "
            "the draft again with its head. (If the backbone is all there is, set `projector_type: dflash`.)"
        )
    if has_head:
        _fill_head_sizes(fields, tensors)
    try:
        config = DominoConfig.from_dict(fields)
    except StrictDataclassError as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from None
    draft = DraftFiles(layout, config, tensors, notes)
    _check_names_and_shapes(source, draft)
    _settle_dtype(source, draft, dtype)
    draft.config.dtype = draft.dtype
    return draft


def expected_shapes(config: DominoConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a draft of this configuration has, by our names."""
    with torch.device("meta"):
        draft = DominoForSpeculativeDraft(config)
    return {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}


def _our_tensors(
    source: str, stored: dict[str, StoredTensor], layout: str, notes: list[str]
) -> dict[str, StoredTensor]:
    if mapped := [name for name in stored if name in ("t2d", "d2t")]:
        raise ValueError(
            f"{source} maps a reduced vocabulary ({', '.join(mapped)}): a Domino head corrects every token of the target. "
            "Train the draft on the full one."
        )
    tensors, dropped = {}, []
    for name, tensor in stored.items():
        ours = our_name(name, layout)
        if ours is None:
            dropped.append(name)
        elif ours in tensors:
            raise ValueError(f"{source} holds `{ours}` twice, with a prefix and without: delete one of them.")
        else:
            tensors[ours] = tensor
    if buffers := [name for name in dropped if "rotary_emb." in name]:
        notes.append(f"Dropped {', '.join(buffers)}: computed anew from the configuration, in float32.")
    if layout in HEAD_PREFIXES and len(buffers) < len(dropped):
        copies = [name for name in dropped if name not in buffers]
        notes.append(f"Dropped {', '.join(copies)}: copies of the target's, which lends them.")
    return tensors


def _fill_head_sizes(fields: dict, tensors: dict[str, StoredTensor]) -> None:
    """Widths that old configurations leave out; the tensors tell."""
    for key, name, axis in (("gru_hidden_dim", "prefix_gru.weight_hh_l0", 1), ("emb_dim", "embed_proj.0.weight", 0)):
        if fields.get(key) is None and name in tensors:
            fields[key] = tensors[name].shape[axis]


def _check_names_and_shapes(source: str, draft: DraftFiles) -> None:
    expected = expected_shapes(draft.config)
    if HEAD_TENSORS.isdisjoint(draft.tensors):
        expected = {name: shape for name, shape in expected.items() if name not in HEAD_TENSORS}
    problems = [f"`{name}` is missing" for name in sorted(expected.keys() - draft.tensors.keys())]
    for name in sorted(draft.tensors.keys() - expected.keys()):
        problems.append(f"`{name}` is unknown{_explain(name)}")
    for name in sorted(expected.keys() & draft.tensors.keys()):
        if draft.tensors[name].shape != expected[name]:
            problems.append(
                f"`{name}` is {list(draft.tensors[name].shape)}, expected {list(expected[name])} by config.json"
                f"{_explain(name)}"
            )
    if problems:
        raise ValueError(f"{source} does not hold the draft that its config.json describes: {'; '.join(problems)}.")


def _explain(name: str) -> str:
    if "bias" in name:
        return " (Domino drafts have no biases)"
    if name.startswith(FOREIGN_HEADS):
        return " (a correction head of another kind)"
    if name == "embed_proj.2.weight":
        return " (one row for each token of the target: a reduced vocabulary cannot be read)"
    return ""


def _settle_dtype(source: str, draft: DraftFiles, dtype: torch.dtype | None) -> None:
    held: dict[torch.dtype, list[str]] = {}
    for name in sorted(draft.tensors):
        held.setdefault(draft.tensors[name].dtype, []).append(name)
    found = " and ".join(sorted(map(dtype_name, held)))
    if not all(map(is_float, held)):
        raise ValueError(f"{source} holds weights in {found}: convert the draft that was quantised to them.")
    if len(held) > 1 and dtype is None:
        rarest = min(held, key=lambda dtype: len(held[dtype]))
        raise ValueError(
            f"{source} mixes {found} ({dtype_name(rarest)}: {', '.join(held[rarest][:4])}): say which type all of it "
            "shall have with `--dtype`."
        )
    if dtype is not None and list(held) != [dtype]:
        draft.cast(dtype)


__all__ = ["DraftFiles", "dtype_name", "expected_shapes", "read_config", "read_draft"]
