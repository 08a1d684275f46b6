"""`--update-code`: the code of a repository that is there already, replaced by this version's when that works with its
weights.
"""

import difflib
import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi

from .assemble import files_of, load_draft, make_empty, shipped_code
from .card import CODE, code_line
from .check import check, visit
from .publish import read_back
from .scan import scan
from .upload import commit, hub_errors


CODE_FILES = ["*_domino.py", "custom_generate/*"]


def update(
    repo_id: str,
    folder: str | Path,
    *,
    message: str | None = None,
    dry_run: bool = False,
    check_with: str | None = None,
    api: HfApi | None = None,
    revision: str | None = None,
    **options,
) -> list[str]:
    """
    Replaces the code of a draft's repository; its weights stay as they are.

    Args:
        repo_id: On the Hub.
        folder: To work in, empty.
        message: Of the commit.
        dry_run: Whether to say only what would change.
        check_with: Target to decode with in the check; a tiny random one when None.
        api: The Hub and its token; those of the environment when None.
        revision: Branch; the main one when None.
        options: Of `commit`: `tag`, `pull_request`.

    Returns:
        What changed, line by line.

    Raises:
        ValueError: The repository holds no draft, or the new code does not work with its weights; nothing was changed.
    """
    api = api or HfApi()
    folder = make_empty(folder)
    before, after = folder / "before", folder / "after"
    with hub_errors(api, repo_id):
        head = api.model_info(repo_id, revision=revision).sha
        api.snapshot_download(repo_id, revision=head, local_dir=before)
    shutil.rmtree(before / ".cache", ignore_errors=True)  # huggingface_hub's notes on the download
    old = {name: (before / name).read_bytes() for name in files_of(before) if _is_code(name)}
    if "modeling_domino.py" not in old:
        raise ValueError(f"{repo_id} is no draft's repository: it holds no modeling_domino.py.")
    _write(before, after)
    new = {name: (after / name).read_bytes() for name in files_of(after) if _is_code(name)}
    if old == new:
        return [f"{repo_id} holds this version's code already: {code_line()}."]
    draft = load_draft(after)
    scan(after, repo_id, list(new))
    decoded = check(visit(after, target=check_with), f"{repo_id} with the new code", draft)
    lines = [*_differences(old, new), _compared(before, decoded, check_with)]
    if dry_run:
        return [*lines, "Dry run: nothing was uploaded."]
    with hub_errors(api, repo_id):
        api.whoami()
    message = message or f"Update code: {code_line()}"
    only = [*CODE_FILES, "README.md", "config.json"]
    made = commit(
        api, after, repo_id, message=message, before=head, replaces=CODE_FILES, only=only, revision=revision, **options
    )
    read_back(api, draft, repository=repo_id, revision=made.commit)
    return [*lines, f"{made.pull_request or made.url}", "Loaded from there at that commit: the same weights."]


def _is_code(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in CODE_FILES)


def _write(before: Path, after: Path) -> None:
    """The repository as it will be: all that is no code as it was, but for where the code is named."""

    def code(place: str, names: list[str]) -> list[str]:
        return [name for name in names if _is_code((Path(place) / name).relative_to(before).as_posix())]

    shutil.copytree(before, after, ignore=code)
    for name, content in shipped_code().items():
        (after / name).parent.mkdir(exist_ok=True)
        (after / name).write_bytes(content)
    config = json.loads((before / "config.json").read_text(encoding="utf-8"))
    auto_map = {
        "AutoConfig": "configuration_domino.DominoConfig",
        "AutoModel": "modeling_domino.DominoForSpeculativeDraft",
    }
    if config.get("auto_map") != auto_map:
        text = json.dumps({**config, "auto_map": auto_map}, indent=2, sort_keys=True)
        (after / "config.json").write_text(text + "\n", encoding="utf-8")
    card = after / "README.md"
    if card.is_file():
        text = card.read_text(encoding="utf-8")
        card.write_text(CODE.sub(lambda _: code_line(), text), encoding="utf-8")


def _differences(old: dict[str, bytes], new: dict[str, bytes]) -> list[str]:
    lines = []
    for name in sorted(old | new):
        if old.get(name) == new.get(name):
            continue
        texts = [files.get(name, b"").decode("utf-8").splitlines() for files in (old, new)]
        changes = [
            line[0] for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[:3] not in ("---", "+++")
        ]
        kind = "added" if name not in old else "removed" if name not in new else "changed"
        lines.append(f"{kind:<8} {name} (+{changes.count('+')} -{changes.count('-')} lines)")
    return lines


def _compared(before: Path, decoded: dict, check_with: str | None) -> str:
    try:
        was = visit(before, target=check_with)["decoded"]
    except ValueError:
        return (
            f"The old code does not work with today's transformers; the new one decodes in {decoded['rounds']} rounds."
        )
    same = "the same text" if was["tokens"] == decoded["tokens"] else "another text of equal logits"
    return f"In the check the new code decodes {same} in {decoded['rounds']} rounds, the old one in {was['rounds']}."


__all__ = ["update"]
