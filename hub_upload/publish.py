"""The steps in order: assemble, scan, check, upload, read back. The command line and the Trainer both come here."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, get_token, snapshot_download

from modeling_domino import DominoForSpeculativeDraft

from .assemble import assemble_adapter, assemble_draft, load_adapter, load_draft, make_empty
from .check import check, check_card, visit
from .facts import Facts, is_hub_id, known_target, read_facts
from .formats import upload_copies, write_copies
from .results import read_evaluation
from .scan import scan
from .upload import Uploaded, hub_errors, upload


@dataclass(frozen=True)
class Assembled:
    """
    A folder that is fit for the Hub.

    Args:
        folder: Of the files.
        facts: That the card states.
        draft: The draft in it, or the one that the adapter in it is for.
        draft_id: Hub id of the latter, else None.
        adapted: The draft under the adapter, else None.
        decoded: What a stranger decoded with it: `tau`, `rounds`.
        copies: Folders of the draft in the layouts of serving engines, by layout.
        target: Where the target was opened to check those; its Hub id when None.
    """

    folder: Path
    facts: Facts
    draft: DominoForSpeculativeDraft
    draft_id: str | None
    adapted: object | None
    decoded: dict
    copies: dict[str, Path] = field(default_factory=dict)
    target: str | None = None


def assemble(
    checkpoint: str | Path,
    repo_id: str,
    folder: str | Path,
    *,
    evaluation: str | Path | None = None,
    check_with: str | None = None,
    formats: Collection[str] = (),
    **facts,
) -> Assembled:
    """
    Writes a draft's repository into a folder, and tries it as a stranger would. Nothing leaves this machine.

    Args:
        checkpoint: Folder of the draft, as training or `save_pretrained` left it; the public layout too.
        repo_id: Of the repository.
        folder: To write; empty or new.
        evaluation: Folder of `domino evaluate run`, of this very draft.
        check_with: Target to decode with in the check; a tiny random one when None.
        formats: Layouts of serving engines to write as well, beside the folder (see `write_copies`).
        facts: Of `read_facts`.

    Raises:
        ValueError: Something is missing or wrong, or must not leave this machine.
    """
    known = read_facts(checkpoint, repo_id, **facts)
    folder = make_empty(folder)
    draft = load_draft(checkpoint)
    results = read_evaluation(evaluation, checkpoint, known) if evaluation is not None else None
    assemble_draft(draft, folder, known, results, formats)
    scan(folder, repo_id)
    check_card(folder / "README.md")
    copies = write_copies(checkpoint, folder, known, formats, check_with)
    seen = visit(folder, target=check_with)
    return Assembled(folder, known, draft, None, None, check(seen, str(folder), draft), copies, check_with)


def assemble_adapted(
    checkpoint: str | Path,
    repo_id: str,
    folder: str | Path,
    *,
    draft: str | Path | None = None,
    draft_id: str | None = None,
    target: str | None = None,
    check_with: str | None = None,
    **facts,
) -> Assembled:
    """
    As `assemble`, for a peft adapter on a draft.

    Args:
        checkpoint: Folder of the adapter.
        repo_id, folder, check_with, facts: See there.
        draft: Folder or Hub id of the draft; what the adapter's configuration names when None.
        draft_id: Hub id of the draft, needed where `draft` is a folder.
        target: Hub id of the target; what the draft's card names when None.
    """
    draft = draft or _base_of(checkpoint)
    draft_id = draft_id or (str(draft) if is_hub_id(str(draft)) else None)
    if draft_id is None:
        raise ValueError(
            f"The adapter is for the draft in {draft}, a folder here: upload that first and name it with `--draft-id "
            "NAMESPACE/NAME`."
        )
    place = Path(draft)
    if not place.is_dir():
        api = HfApi()
        with hub_errors(api, str(draft)):
            place = Path(snapshot_download(str(draft)))
    target = target or known_target(place)
    if target is None:
        raise ValueError(f"The card must name the target, and {place} does not: add `--target NAMESPACE/NAME`.")
    known = read_facts(checkpoint, repo_id, target=target, **facts)
    folder = make_empty(folder)
    base = load_draft(place)
    adapted = load_adapter(load_draft(place), checkpoint)
    assemble_adapter(adapted, folder, known, draft_id)
    scan(folder, repo_id)
    check_card(folder / "README.md")
    seen = visit(place, adapter=folder, target=check_with)
    return Assembled(folder, known, base, draft_id, adapted, check(seen, str(folder), base, adapted))


def publish(assembled: Assembled, api: HfApi | None = None, *, private: bool = False, **options) -> Uploaded:
    """
    Uploads an assembled folder, then loads it from the Hub at the new commit. Copies for engines go first, so that the
    card never names a branch that is not there.

    Args:
        assembled: From `assemble` or `assemble_adapted`.
        api: The Hub and its token; those of the environment when None.
        private: See `upload`.
        options: Others of `upload`, of the main commit.

    Raises:
        ValueError: The Hub refuses, or gives back something else than was sent.
    """
    api = api or HfApi()
    repo_id = assembled.facts.repo_id
    upload_copies(api, assembled.copies, assembled.facts, assembled.target, private=private)
    uploaded = upload(api, assembled.folder, repo_id, private=private, **options)
    if assembled.adapted is None:
        where = {"repository": repo_id, "revision": uploaded.commit}
    else:
        where = {"repository": assembled.draft_id, "adapter": repo_id, "adapter_revision": uploaded.commit}
    read_back(api, assembled.draft, assembled.adapted, **where)
    return uploaded


def read_back(api: HfApi, draft: DominoForSpeculativeDraft, adapted=None, **where) -> None:
    """
    Loads a repository from the Hub as a stranger would, and checks it.

    Args:
        api: The Hub and its token.
        draft, adapted: What it must be.
        where: Of `visit`: `repository` and `revision`, or `adapter` and `adapter_revision`.
    """
    token = api.token if isinstance(api.token, str) else get_token()
    seen = visit(**where, endpoint=api.endpoint, token=token)
    check(seen, f"{where.get('adapter') or where['repository']} on the Hub", draft, adapted)


def _base_of(checkpoint: str | Path) -> str:
    path = Path(checkpoint) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{checkpoint} is no folder with an adapter: it holds no adapter_config.json.")
    return json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""


__all__ = ["Assembled", "assemble", "assemble_adapted", "publish", "read_back"]
