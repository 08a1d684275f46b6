"""`--formats`: copies of a draft in the layouts that serving engines read, each on a branch of its own."""

import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import HfApi

from modeling_domino.conversion import ENGINE_OF, convert, validate
from modeling_domino.layouts import WRITTEN

from .assemble import HERE, make_empty, refuse_others
from .card import copy_card
from .check import check_card
from .facts import Facts
from .scan import scan
from .upload import Uploaded, hub_errors, upload


FORMATS = tuple(layout for layout in WRITTEN if layout != "domino")


def read_formats(text: str | None) -> list[str]:
    """
    The layouts of a list such as `sglang,speculators-dflash`.

    Raises:
        ValueError: One of them is none that is written.
    """
    formats = [part.strip() for part in text.split(",")] if text else []
    for layout in formats:
        if layout not in FORMATS:
            raise ValueError(f"`--formats` names {layout!r}, expected some of {','.join(FORMATS)}.")
    return list(dict.fromkeys(formats))


def write_copies(
    checkpoint: str | Path, folder: str | Path, facts: Facts, formats: Collection[str], target: str | None
) -> dict[str, Path]:
    """
    Converts a draft, and checks what was written by the rules of the engine that reads it.

    Args:
        checkpoint: Folder of the draft.
        folder: Of the draft's own repository; the copies lie beside it, in FOLDER-LAYOUT.
        facts: For the cards.
        formats: Layouts to write.
        target: Folder of the target, whose sizes and tokens are compared; its Hub id when None.

    Returns:
        The folder of each layout.

    Raises:
        ValueError: The engine would refuse the draft or decode it wrongly, with all reasons; or the target cannot be
            opened.
    """
    folder = Path(folder)
    copies = {layout: make_empty(folder.with_name(f"{folder.name}-{layout}")) for layout in formats}
    for layout, copy in copies.items():
        try:
            convert(str(checkpoint), copy, to=layout, target=target or facts.target, force=True)
        except OSError as error:
            raise ValueError(
                f"`--formats` compares the draft with its target, and {target or facts.target} cannot be opened "
                f"({str(error).splitlines()[0]}): name a folder that holds it with `--check-with`."
            ) from None
        _name_target(copy / "config.json", facts.target)
        _check(copy, layout, target or facts.target, f"The copy for `{layout}`")
        shutil.copyfile(HERE / "LICENSE", copy / "LICENSE")
        copy_card(facts, layout).save(copy / "README.md")
        refuse_others(copy)
        scan(copy, facts.repo_id)
        check_card(copy / "README.md")
    return copies


def upload_copies(
    api: HfApi, copies: dict[str, Path], facts: Facts, target: str | None = None, **options
) -> dict[str, Uploaded]:
    """
    Commits each copy to the branch of its layout's name, and checks what the Hub then gives back.

    Args:
        api: The Hub and its token.
        copies: From `write_copies`.
        facts: The same.
        target: See `write_copies`.
        options: Of `upload`.

    Raises:
        ValueError: The Hub refuses, or gives back something else than was sent.
    """
    sent = {}
    for layout, copy in copies.items():
        message = f"The draft for {facts.target} in the layout {layout}"
        sent[layout] = upload(api, copy, facts.repo_id, message=message, revision=layout, **options)
        with tempfile.TemporaryDirectory() as place, hub_errors(api, facts.repo_id):
            api.snapshot_download(facts.repo_id, revision=sent[layout].commit, local_dir=place)
            _check(Path(place), layout, target or facts.target, f"{facts.repo_id} on the Hub, branch `{layout}`,")
    return sent


def _check(folder: Path, layout: str, target: str, name: str) -> None:
    found = validate(str(folder), ENGINE_OF[layout], target=target)
    if found:
        raise ValueError(f"{name} is not fit for its engine: {'; '.join(map(str, found))}.")


def _name_target(path: Path, target: str) -> None:
    """The speculators layouts name the target, which may have been opened from a folder of this machine."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "speculators_config" in config:
        config["speculators_config"]["verifier"]["name_or_path"] = target
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


__all__ = ["FORMATS", "read_formats", "upload_copies", "write_copies"]
