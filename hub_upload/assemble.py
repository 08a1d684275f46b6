"""Writes the folder of a repository: only files that belong there, each made anew or copied by name."""

import json
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

import modeling_domino
from modeling_domino import DominoForSpeculativeDraft

from .card import adapter_card, draft_card
from .facts import Facts
from .results import write_evaluation


HERE = Path(__file__).parent
GENERATE = ("custom_generate/generate.py", "custom_generate/requirements.txt")
# Everything that a repository may hold.
ALLOWED = re.compile(
    r"README\.md|LICENSE|config\.json|adapter_config\.json|adapter_model\.safetensors"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|[a-z_]+_domino\.py|custom_generate/(generate\.py|requirements\.txt)"
    r"|evaluation/(results\.json|[a-z_]+\.png)"
)


def make_empty(folder: str | Path) -> Path:
    """
    A folder to write.

    Raises:
        ValueError: There is something in it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name another folder.")
    return folder


def load_draft(checkpoint: str | Path) -> DominoForSpeculativeDraft:
    """
    The draft in a folder, in the type it was saved in.

    Raises:
        ValueError: No folder with a whole draft.
    """
    if not (Path(checkpoint) / "config.json").is_file():
        raise ValueError(f"{checkpoint} is no folder with a draft: it holds no config.json.")
    draft, loaded = DominoForSpeculativeDraft.from_pretrained(checkpoint, output_loading_info=True)
    if loaded["missing_keys"]:
        raise ValueError(f"{checkpoint} holds no correction head: train it before others use it.")
    return draft.eval()


def write_draft(draft: DominoForSpeculativeDraft, folder: Path) -> None:
    """Weights, configuration, the code that loads them, and that of `custom_generate`."""
    draft.save_pretrained(folder)  # in shards where large; with the code that the model's file reaches
    for name in GENERATE:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(HERE / name, folder / name)


def assemble_draft(
    draft: DominoForSpeculativeDraft,
    folder: str | Path,
    facts: Facts,
    results: dict | None = None,
    formats: Collection[str] = (),
) -> None:
    """
    A draft's repository.

    Args:
        draft: From `load_draft`.
        folder: To write, empty.
        facts: For the card.
        results: From `read_evaluation`.
        formats: Layouts of engines that the card says are on branches.
    """
    folder = Path(folder)
    write_draft(draft, folder)
    shutil.copyfile(HERE / "LICENSE", folder / "LICENSE")
    figures = write_evaluation(results, folder) if results is not None else []
    draft_card(draft, facts, results, figures, formats).save(folder / "README.md")
    refuse_others(folder)


def load_adapter(draft: DominoForSpeculativeDraft, checkpoint: str | Path):
    """
    A draft under the adapter of a folder.

    Raises:
        ValueError: The folder holds none, or peft is missing.
    """
    if not (Path(checkpoint) / "adapter_config.json").is_file():
        raise ValueError(f"{checkpoint} is no folder with an adapter: it holds no adapter_config.json.")
    try:
        from peft import PeftModel
    except ImportError:
        raise ValueError("An adapter needs peft: pip install 'modeling-domino[peft]'.") from None
    return PeftModel.from_pretrained(draft, str(checkpoint)).eval()


def assemble_adapter(adapted, folder: str | Path, facts: Facts, draft_id: str) -> None:
    """
    An adapter's repository: what peft saves, with the draft's repository as base model.

    Args:
        adapted: From `load_adapter`.
        folder: To write, empty.
        facts: For the card.
        draft_id: Hub id of the draft that the adapter is for.
    """
    folder = Path(folder)
    adapted.save_pretrained(folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = draft_id
    if config.get("auto_mapping"):  # for AutoPeftModel; peft writes the class as it was imported here
        config["auto_mapping"] = {"base_model_class": "AutoModel", "parent_library": "transformers"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(HERE / "LICENSE", folder / "LICENSE")
    adapter_card(adapted, facts, draft_id).save(folder / "README.md")
    refuse_others(folder)


def refuse_others(folder: Path) -> None:
    """
    Raises:
        ValueError: A file that no repository should hold.
    """
    for path in files_of(folder):
        if not ALLOWED.fullmatch(path):
            raise ValueError(f"{path} is no file of a draft's repository; nothing was uploaded.")


def files_of(folder: str | Path) -> dict[str, int]:
    """Sizes of a folder's files, by their path in it."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def shipped_code() -> dict[str, bytes]:
    """The code of a draft's repository as it is today, by path: what transformers' loader reaches from the model's file."""
    root = Path(modeling_domino.__file__).parent / "modeling_domino.py"
    code = {Path(file).name: Path(file).read_bytes() for file in (root, *get_relative_import_files(root))}
    return code | {name: (HERE / name).read_bytes() for name in GENERATE}


__all__ = [
    "assemble_adapter",
    "assemble_draft",
    "files_of",
    "load_adapter",
    "load_draft",
    "make_empty",
    "refuse_others",
    "shipped_code",
]
