"""`domino convert` and `domino validate`: drafts in and out of the layouts of other trainers and serving engines.

Files are checked before anything is written, and written tensor by tensor, so that a draft of any size needs little
memory. Merging an adapter is the exception: it holds the whole draft.
"""

import json
import warnings
from collections.abc import Collection
from pathlib import Path

import torch
from transformers.dynamic_module_utils import custom_object_save

from .draft_files import DraftFiles, dtype_name, read_config, read_draft
from .layouts import WRITTEN, public_config, speculators_config, written_name
from .modeling_domino import DominoForSpeculativeDraft
from .refit import add_fresh_head, refit
from .stored_tensors import StoredTensor, new_folder, open_tensors, refuse_existing, write_safetensors
from .target_files import TargetFiles, local_folder
from .validators import Checkpoint, Violation, violations


# Who reads what is written.
ENGINE_OF = {
    "domino": "transformers",
    "sglang": "sglang",
    "speculators-dflash": "speculators",
    "speculators-domino": "speculators",
}
AUTO_MAP = {
    "AutoConfig": "configuration_domino.DominoConfig",
    "AutoModel": "modeling_domino.DominoForSpeculativeDraft",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(
    source: str,
    destination: str | Path,
    *,
    to: str,
    target: str | None = None,
    old_target: str | None = None,
    adapter: str | None = None,
    dtype: str | None = None,
    assume_public: bool = False,
    ignore_keys: Collection[str] = (),
    fresh_head: bool = False,
    gru_hidden_dim: int | None = None,
    emb_dim: int | None = None,
    seed: int = 0,
    force: bool = False,
) -> list[str]:
    """
    Reads a draft in any layout that is published and writes it in another.

    Args:
        source: Folder or Hub id.
        destination: New folder; complete or not there at all.
        to: `domino` (ours), `sglang` (the public one), `speculators-dflash` or `speculators-domino`.
        target: The model that the draft is for: Hub id, folder or `.gguf` file. The speculators layouts take embeddings
            and head from it; with `to="domino"` the draft is re-fitted to it where shapes differ (see `refit`).
        old_target: The model that it was trained for, where `target` is another one.
        adapter: Folder or Hub id of a peft adapter of the draft, to be merged.
        dtype: float32, bfloat16 or float16. None keeps the files', except that `sglang` is always bfloat16.
        assume_public: Where the files leave out alignment or P, take the public drafts' values.
        ignore_keys: Unknown keys of config.json to drop.
        fresh_head: Give a draft without a head a new one, of widths `gru_hidden_dim` and `emb_dim`.
        seed: Of what is initialised.
        force: Replace `destination`.

    Returns:
        What was dropped, assumed, changed or initialised, a sentence each.

    Raises:
        ValueError: The source cannot be decoded as it is described, or the reader of the destination would refuse it
            or decode it wrongly; all reasons are listed.
        OSError: A file is missing, or the destination exists.
    """
    if to not in WRITTEN:
        raise ValueError(f"`{to}` cannot be written: expected one of {', '.join(WRITTEN)}.")
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"`dtype` is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if not fresh_head and (gru_hidden_dim or emb_dim):
        raise ValueError("Widths of the head are those of the draft; `--fresh-head` alone may choose them.")
    if to.startswith("speculators") and target is None:
        raise ValueError(f"The layout {to} brings the target's embeddings and head along: name it with `--target`.")
    refuse_existing(destination, force=force)  # before any work
    new_target = TargetFiles(target) if target else None
    draft = read_draft(
        source,
        target=_trained_for(source, new_target, old_target, to),
        assume_public=assume_public,
        ignore_keys=ignore_keys,
        dtype=DTYPES.get(dtype),
    )
    if adapter:
        merge_adapter(draft, adapter)
    if fresh_head:
        add_fresh_head(draft, seed=seed, gru_hidden_dim=gru_hidden_dim, emb_dim=emb_dim)
    if to == "domino" and new_target is not None:
        refit(draft, new_target, old_target=TargetFiles(old_target) if old_target else None, seed=seed)
    if to == "sglang" and dtype is None and draft.dtype != torch.bfloat16:
        draft.cast(torch.bfloat16)
    config, tensors = lay_out(draft, to, new_target)
    _refuse(to, violations(ENGINE_OF[to], Checkpoint(config, tensors, new_target)))
    with new_folder(destination, force=force) as folder:
        if to == "domino":
            _write_code_and_config(draft, folder)
        else:
            text = json.dumps(config, indent=2) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
        write_safetensors(folder / "model.safetensors", tensors)
    return draft.notes


def validate(path: str, engine: str, *, target: str | None = None) -> list[Violation]:
    """
    What keeps an engine from decoding with a draft as it was trained.

    Args:
        path: Folder or Hub id of the draft, as the engine shall load it.
        engine: transformers, sglang, speculators, vllm or tensorrt-llm.
        target: The model that it shall draft for; sizes and tokens are compared.

    Returns:
        Every rule that is broken, each with its remedy; empty if the draft can be served.

    Raises:
        ValueError: No such engine, or a damaged file.
        OSError: A file is missing.
    """
    folder = local_folder(path)
    config = read_config(folder)
    files = TargetFiles(target) if target else None
    if files is None and "speculators_model_type" in config:
        files = _verifier(config)
    code = frozenset(file.name for file in folder.glob("*.py"))
    return violations(engine, Checkpoint(config, open_tensors(folder), files, code if Path(path).is_dir() else None))


def lay_out(draft: DraftFiles, to: str, target: TargetFiles | None) -> tuple[dict, dict[str, StoredTensor]]:
    """
    A draft's config.json and tensors as another layout spells them.

    Raises:
        ValueError: The layout cannot say what the draft is.
    """
    if not draft.has_head and to == "speculators-domino":
        raise ValueError("The draft has no correction head: write it `--to speculators-dflash`.")
    if not draft.has_head and to != "domino" and draft.config.shift_label:
        raise ValueError(
            "The draft has no correction head and shifted labels: engines would read it as DFlash, every prediction one "
            "position late, without an error. Train a head for it, or decode it with transformers."
        )
    tensors = {written_name(name, to): tensor for name, tensor in draft.tensors.items()}
    dtype = dtype_name(draft.dtype)
    if to == "domino":
        draft.config.auto_map = dict(AUTO_MAP)
        return draft.config.to_dict(), tensors
    if to == "sglang":
        return public_config(draft.config, dtype, has_head=draft.has_head), tensors
    tensors |= {name: matrix.to(draft.dtype) for name, matrix in target.matrices.items()}
    return speculators_config(draft.config, dtype, to, target, has_head=draft.has_head), tensors


def merge_adapter(draft: DraftFiles, adapter: str) -> None:
    """
    Folds a peft adapter into the weights of a draft, in place.

    Raises:
        ValueError: peft is not installed, or the adapter is not one of this draft.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise ValueError("Merging an adapter needs peft: pip install 'modeling-domino[peft]'.") from None
    model = DominoForSpeculativeDraft(draft.config).to(draft.dtype)
    weights = {name: tensor.read().clone() for name, tensor in draft.tensors.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*missing adapter keys")
            adapted = PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
        merged = adapted.merge_and_unload(safe_merge=True).state_dict()
    except (RuntimeError, ValueError, UserWarning) as error:
        reason = " ".join(str(error).split())[:400]
        raise ValueError(f"{adapter} is no adapter of this draft: {reason}") from None
    if merged.keys() != model_names(draft):
        raise ValueError(
            f"{adapter} changes what the draft consists of: {sorted(merged.keys() ^ model_names(draft))}; only adapters "
            "that merge into its weights can be converted."
        )
    draft.tensors = {name: StoredTensor.of(merged[name].detach().to(draft.dtype)) for name in draft.tensors}
    draft.notes.append(f"Merged the adapter {adapter}.")


def model_names(draft: DraftFiles) -> set[str]:
    """Names of all tensors of a draft with a head."""
    with torch.device("meta"):
        return set(DominoForSpeculativeDraft(draft.config).state_dict())


def _trained_for(source: str, target: TargetFiles | None, old_target: str | None, to: str) -> TargetFiles | None:
    """The target that the source's own layout leaves things to."""
    if old_target:
        return TargetFiles(old_target)
    config = read_config(local_folder(source))
    named = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if "speculators_model_type" in config and (
        target is None or (to == "domino" and named not in (None, target.name))
    ):
        return _verifier(config)
    return target


def _verifier(config: dict) -> TargetFiles:
    name = ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    try:
        return TargetFiles(name or "")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The file was made for the target {name!r}, which cannot be opened ({str(error).splitlines()[0]}): name it with "
            "`--target`, or with `--old-target` if the draft shall be re-fitted to another one."
        ) from None


def _refuse(to: str, found: list[Violation]) -> None:
    if found:
        reasons = "\n".join(f"- {violation}." for violation in found)
        raise ValueError(f"The draft cannot be written for {to}; nothing was written:\n{reasons}")


def _write_code_and_config(draft: DraftFiles, folder: Path) -> None:
    """As `save_pretrained`, but for the weights."""
    with torch.device("meta"):
        model = DominoForSpeculativeDraft(draft.config)
    draft.config.architectures = [type(model).__name__]
    custom_object_save(model, folder, config=draft.config)
    draft.config.save_pretrained(folder)


__all__ = ["convert", "lay_out", "merge_adapter", "validate"]
