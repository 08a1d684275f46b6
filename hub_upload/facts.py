"""What a card says of a draft that its weights do not: where each fact comes from, and which ones must be there."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.utils import HFValidationError, validate_repo_id

from .scan import without_paths


# Lines of a recipe that say nothing of the draft.
HOUSEKEEPING = ("dataloader_", "eval_", "hub_", "logging_", "push_", "report_", "save_")


@dataclass
class Facts:
    """
    Args:
        repo_id: Of the repository on the Hub.
        target: Hub id of the model that the draft is for.
        license: Of the weights, as the Hub spells it.
        target_revision: Of the target, that the draft was trained for; None when it was not recorded.
        datasets: Hub ids of what the training texts come from.
        language: Codes.
        recipe: What the training was asked for, by name.
    """

    repo_id: str
    target: str
    license: str
    target_revision: str | None = None
    datasets: list[str] = field(default_factory=list)
    language: list[str] = field(default_factory=list)
    recipe: dict = field(default_factory=dict)


def read_facts(
    checkpoint: str | Path,
    repo_id: str,
    *,
    target: str | None = None,
    target_revision: str | None = None,
    license: str | None = None,
    datasets: list[str] = (),
    language: list[str] = (),
    recipe: str | Path | None = None,
) -> Facts:
    """
    Takes each fact from the arguments, else from the metadata of the checkpoint's README.md, else from the
    `training_recipe.json` that training left there.

    Args:
        checkpoint: Folder of a draft.
        repo_id, target, target_revision, license, datasets, language: See `Facts`.
        recipe: YAML file that the draft was trained with; `training_recipe.json` when None.

    Raises:
        ValueError: `repo_id` is none, the target or the licence is nowhere, or the target is no id on the Hub.
    """
    if not is_hub_id(repo_id):
        raise ValueError(f"`{repo_id}` is no repository on the Hub: write NAMESPACE/NAME, such as someone/my-draft.")
    checkpoint = Path(checkpoint)
    written = _recipe(checkpoint, recipe)
    said = _card_data(checkpoint / "README.md")
    target = target or _one(said.get("base_model")) or written.get("target")
    license = license or said.get("license")
    if not target or not is_hub_id(target):
        what = f"`{target}` is no id on the Hub" if target else "it is recorded nowhere"
        raise ValueError(f"The card must name the target, and {what}: add `--target NAMESPACE/NAME`.")
    if not license:
        raise ValueError("The card must name the licence of the weights: add `--license`, such as apache-2.0.")
    return Facts(
        repo_id=repo_id,
        target=target,
        license=license,
        target_revision=target_revision or written.get("target_revision"),
        datasets=list(datasets) or _many(said.get("datasets")),
        language=list(language) or _many(said.get("language")),
        recipe={name: value for name, value in written.items() if name not in ("target", "target_revision")},
    )


def known_target(checkpoint: str | Path) -> str | None:
    """The target that a draft's folder names, in its card or in what training left."""
    checkpoint = Path(checkpoint)
    said = _card_data(checkpoint / "README.md")
    return _one(said.get("base_model")) or _recipe(checkpoint, None).get("target")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form NAMESPACE/NAME and is no file or folder here."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1 and not Path(name).exists() and not name.endswith(".gguf")


def _recipe(checkpoint: Path, recipe: str | Path | None) -> dict:
    path = Path(recipe) if recipe is not None else checkpoint / "training_recipe.json"
    if recipe is None and not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    written = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(written, dict):
        raise ValueError(f"{path} is no recipe, expected `name: value` lines.")
    return {
        name: without_paths(value) if isinstance(value, str) and name != "target" else value
        for name, value in written.items()
        if name != "output_dir" and not name.startswith(HOUSEKEEPING)
    }


def _card_data(path: Path) -> dict:
    return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path.is_file() else {}


def _many(value) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _one(value) -> str | None:
    return next(iter(_many(value)), None)


__all__ = ["Facts", "is_hub_id", "known_target", "read_facts"]
