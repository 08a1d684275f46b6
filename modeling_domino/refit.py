"""Warm starts: a new head on a DFlash backbone, and a draft whose shapes are re-fitted to another target."""

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .configuration_domino import DominoConfig, pick_mask_token, rope_theta, spread_layer_ids
from .draft_files import DraftFiles, expected_shapes
from .modeling_domino import HEAD_TENSORS, DominoForSpeculativeDraft
from .stored_tensors import StoredTensor
from .target_files import TargetFiles


W2 = "embed_proj.2.weight"


def add_fresh_head(
    draft: DraftFiles, *, seed: int = 0, gru_hidden_dim: int | None = None, emb_dim: int | None = None
) -> None:
    """
    Gives a draft without a correction head a new, neutral one: the start of a Domino training.

    Args:
        draft: Changed in place.
        seed: Of the GRU's and W1's initial values; W2 starts at zero, so nothing is corrected yet.
        gru_hidden_dim, emb_dim: Sizes G and R; the configuration's (the paper's by default) when None.

    Raises:
        ValueError: The draft has a head already.
    """
    if draft.has_head:
        raise ValueError("The draft has a correction head already: leave `--fresh-head` out, or it would be lost.")
    sizes = {"gru_hidden_dim": gru_hidden_dim, "emb_dim": emb_dim}
    draft.config = _changed(draft.config, **{key: value for key, value in sizes.items() if value is not None})
    draft.tensors |= _fresh(draft, HEAD_TENSORS, seed)
    draft.notes.append(
        f"Initialised a neutral head (G {draft.config.gru_hidden_dim}, R {draft.config.emb_dim}): "
        f"{', '.join(sorted(HEAD_TENSORS))}."
    )


def refit(draft: DraftFiles, target: TargetFiles, *, old_target: TargetFiles | None = None, seed: int = 0) -> None:
    """
    Re-fits a draft to another target, keeping every weight whose shape and meaning survive.

    Taps move to the same depths of the new target, with the columns of `fc` that read them; rows of the head go to the
    tokens of the same string. What cannot be kept is initialised as in a new draft (rows of new tokens at zero), and
    listed in the draft's notes.

    Args:
        draft: Changed in place.
        target: The target that it shall draft for.
        old_target: The one it was trained for; needed for its tokens where the vocabularies differ in size.
        seed: Of initial values.

    Raises:
        ValueError: The vocabularies differ and the old tokens are not known.
    """
    before, text = draft.config, target.text_config
    if draft.has_head and text.vocab_size != before.vocab_size and old_target is None:
        raise ValueError(
            f"The draft has rows for {before.vocab_size} tokens and {target.name} has {text.vocab_size}: name the "
            "target that it was trained for with `--old-target`, so that rows go to tokens of the same string."
        )
    renamed = {} if old_target is None else _rows_by_string(old_target, target, before.vocab_size)
    same_tokens = text.vocab_size == before.vocab_size and all(old == new for new, old in renamed.items())
    taps, columns = _taps_at_same_depth(before, text.num_hidden_layers)
    changes = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": taps,
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
    }
    taken = [changes[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")]
    if not same_tokens or any(before.mask_token_id in (ids if isinstance(ids, list) else [ids]) for ids in taken):
        changes["mask_token_id"] = _new_mask(draft, target.tokenizer, text.vocab_size)
    theta = rope_theta(vars(text))
    if theta is not None and theta != before.rope_parameters["rope_theta"]:
        changes["rope_parameters"] = {**before.rope_parameters, "rope_theta": theta}
        draft.notes.append(f"Rope base {before.rope_parameters['rope_theta']:g} became {theta:g}, the target's.")
    draft.config = _changed(before, **changes)

    if columns is not None and text.hidden_size == before.hidden_size:
        _move_columns(draft, before.target_layer_ids, columns)
    if not same_tokens and draft.has_head:
        _move_rows(draft, renamed, text.vocab_size)
    shapes = expected_shapes(draft.config)
    lost = {name for name, tensor in draft.tensors.items() if tensor.shape != shapes[name]}
    if lost:
        draft.tensors |= _fresh(draft, lost, seed)
        draft.notes.append(f"Initialised anew, since the shapes differ: {', '.join(sorted(lost))}.")
    if not lost and columns is None and same_tokens:
        draft.notes.append(f"All weights fit {target.name} as they are.")


def _changed(config: DominoConfig, **changes) -> DominoConfig:
    try:
        return DominoConfig.from_dict({**config.to_dict(), **changes})
    except StrictDataclassError as error:
        raise ValueError(f"The draft cannot be re-fitted so: {' '.join(str(error).split())}") from None


def _taps_at_same_depth(config: DominoConfig, layers: int) -> tuple[list[int], list[int] | None]:
    """Taps for a target of another depth, and for each the place of the old tap whose relative depth is nearest."""
    old = config.target_layer_ids
    if layers == config.num_target_layers:
        return old, None
    taps = spread_layer_ids(layers, len(old))
    depths = [layer_id / (config.num_target_layers - 1) for layer_id in old]
    return taps, [min(range(len(old)), key=lambda i, tap=tap: abs(depths[i] - tap / (layers - 1))) for tap in taps]


def _move_columns(draft: DraftFiles, old_taps: list[int], columns: list[int]) -> None:
    stored, hidden = draft.tensors["fc.weight"], draft.config.hidden_size

    def read() -> Tensor:
        parts = stored.read().split(hidden, dim=1)
        return torch.cat([parts[column] for column in columns], dim=1)

    draft.tensors["fc.weight"] = StoredTensor(stored.dtype, (stored.shape[0], len(columns) * hidden), read)
    moves = zip(columns, draft.config.target_layer_ids, strict=True)
    draft.notes.append(
        "Columns of fc.weight moved to the taps of the same depth: "
        + ", ".join(f"layer {old_taps[column]} to {tap}" for column, tap in moves)
        + "."
    )


def _rows_by_string(old: TargetFiles, new: TargetFiles, old_rows: int) -> dict[int, int]:
    """Old row of each new id whose token has the same string in both."""
    old_ids = {token: i for token, i in old.tokenizer.get_vocab().items() if i < old_rows}
    new_ids = new.tokenizer.get_vocab()
    return {
        i: old_ids[token]
        for token, i in sorted(new_ids.items(), key=lambda item: item[1])
        if token in old_ids and i < new.text_config.vocab_size
    }


def _move_rows(draft: DraftFiles, old_row_of: dict[int, int], rows: int) -> None:
    stored = draft.tensors[W2]

    def read() -> Tensor:
        old = stored.read()
        new = old.new_zeros(rows, old.shape[1])  # a zero row leaves the base logit of its token as it is
        new[list(old_row_of)] = old[list(old_row_of.values())]
        return new

    draft.tensors[W2] = StoredTensor(stored.dtype, (rows, stored.shape[1]), read)
    draft.notes.append(
        f"Rows of {W2} moved to tokens of the same string: {len(old_row_of)} of {rows}; the others start at zero."
    )


def _new_mask(draft: DraftFiles, tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    mask_token_id, what = pick_mask_token(tokenizer, rows)
    if mask_token_id != draft.config.mask_token_id:
        draft.notes.append(f"`mask_token_id` {draft.config.mask_token_id} became {mask_token_id}, {what}.")
    return mask_token_id


def _fresh(draft: DraftFiles, names: set[str] | frozenset[str], seed: int) -> dict[str, StoredTensor]:
    """Initial values of a new draft, formed module by module for what is wanted alone."""
    with torch.device("meta"):
        model = DominoForSpeculativeDraft(draft.config)
    dtype = draft.dtype
    fresh = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name in sorted(names):
            module = model.get_submodule(name.rpartition(".")[0])
            if next(module.parameters()).is_meta:
                module.to_empty(device="cpu")
                model._init_weights(module)
            fresh[name] = StoredTensor.of(module.get_parameter(name.rpartition(".")[2]).detach().to(dtype))
    return fresh


__all__ = ["add_fresh_head", "refit"]
