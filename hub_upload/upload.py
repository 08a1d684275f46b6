"""A folder to a repository on the Hub: one commit, which a second run with nothing changed does not make again."""

import time
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import logging, sha

from .assemble import files_of


logger = logging.get_logger(__name__)

TRIES, PAUSE = 3, 3.0  # seconds before the second try; twice as many before the third
# What an upload replaces as a whole, so that nothing of an earlier draft stays behind.
OURS = ["*_domino.py", "model*.safetensors", "model.safetensors.index.json", "custom_generate/*", "evaluation/*"]
OTHER_WEIGHTS = ["*.bin", "*.gguf", "*.h5", "*.onnx", "*.pt", "*.pth", "*.safetensors"]


@dataclass(frozen=True)
class Uploaded:
    """
    Args:
        commit: That holds the folder.
        url: Of the commit.
        changed: Whether this upload made it.
        pull_request: URL, where one was opened.
    """

    commit: str
    url: str
    changed: bool
    pull_request: str | None = None


@contextmanager
def hub_errors(api: HfApi, repo_id: str):
    """
    The Hub's answers in words for the one who uploads.

    Raises:
        ValueError: In place of what huggingface_hub raises.
    """
    try:
        yield
    except LocalTokenNotFoundError:
        raise ValueError(
            "No token was found: run `hf auth login`, or set HF_TOKEN to one with write access "
            f"({api.endpoint}/settings/tokens)."
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"{repo_id} has no such revision.") from None
    except RepositoryNotFoundError:
        raise ValueError(f"{repo_id} does not exist, or your token may not see it.") from None
    except HfHubHTTPError as error:
        raise ValueError(_explain(error, repo_id)) from None
    except HTTPError as error:
        raise ValueError(f"{api.endpoint} cannot be reached: {error}.") from None


def _explain(error: HfHubHTTPError, repo_id: str) -> str:
    status = error.response.status_code
    said = error.server_message or error.response.reason_phrase
    return {
        401: "The Hub does not know your token: make a new one and run `hf auth login`, or correct HF_TOKEN.",
        403: f"Your token may not write to {repo_id}: use one with write access to `{repo_id.partition('/')[0]}` ({said}).",
        409: f"The Hub refuses a conflict in {repo_id}: {said}.",
        412: f"Somebody else committed to {repo_id} meanwhile: run the same command again.",
    }.get(status, f"The Hub answered {status} for {repo_id}: {said}.")


def upload(
    api: HfApi,
    folder: str | Path,
    repo_id: str,
    *,
    message: str,
    private: bool = False,
    revision: str | None = None,
    tag: str | None = None,
    pull_request: bool = False,
) -> Uploaded:
    """
    Makes the repository if need be, and commits what of the folder is not there yet.

    Args:
        api: Knows the Hub and the token.
        folder: Of the repository's files.
        repo_id: Of the repository.
        message: Of the commit.
        private: Whether a new repository is private; one that is there must be so.
        revision: Branch, made if need be; the main one when None.
        tag: Name for the commit.
        pull_request: Whether to open a pull request instead of committing to the branch.

    Raises:
        ValueError: The Hub refuses; the message says what is there now.
    """
    with hub_errors(api, repo_id):
        api.whoami()
        _check_card(folder)
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        there = api.model_info(repo_id)
        if private and not there.private:
            raise ValueError(f"{repo_id} exists and is public: make it private in its settings, or drop `--private`.")
        _refuse_other_models(api, repo_id, folder, [sibling.rfilename for sibling in there.siblings or []])
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        before = api.model_info(repo_id, revision=revision).sha
    options = {"revision": revision, "pull_request": pull_request, "tag": tag}
    return commit(api, folder, repo_id, message=message, before=before, replaces=OURS, **options)


def commit(
    api: HfApi,
    folder: str | Path,
    repo_id: str,
    *,
    message: str,
    before: str,
    replaces: list[str],
    only: list[str] | None = None,
    revision: str | None = None,
    pull_request: bool = False,
    tag: str | None = None,
) -> Uploaded:
    """
    Commits what of a folder is not there yet, tries again where the Hub fails for a moment, and reads back.

    Args:
        api, folder, repo_id, message, revision, pull_request, tag: See `upload`.
        before: Commit that the branch is at; the Hub refuses where somebody else committed since.
        replaces: Patterns of files that go unless the folder holds them.
        only: Patterns of the files to send; all when None.

    Raises:
        ValueError: The Hub refuses; the message says what is there now.
    """
    branch = None if pull_request else revision
    for attempt in range(1, TRIES + 1):
        try:
            made = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=message,
                revision=branch,
                create_pr=pull_request,
                parent_commit=before,
                allow_patterns=only,
                delete_patterns=replaces,
            )
            break
        except (HTTPError, RuntimeError) as error:  # RuntimeError: what huggingface_hub makes of one file's failure
            cause = error if isinstance(error, HTTPError) else error.__cause__
            passing = not isinstance(cause, HfHubHTTPError) or cause.response.status_code >= 500
            if not passing or attempt == TRIES:
                reason = _explain(cause, repo_id) if isinstance(cause, HfHubHTTPError) else f"{cause or error}."
                raise ValueError(f"{reason} {_state(api, folder, repo_id, branch)}") from None
            logger.warning(f"{cause}: the upload to {repo_id} is tried again.")
            time.sleep(PAUSE * attempt)
    with hub_errors(api, repo_id):
        if tag is not None and _tagged(api, repo_id, tag) != made.oid:
            api.create_tag(repo_id, tag=tag, revision=made.oid)
        missing = missing_files(api, folder, repo_id, made.oid)
    if missing:
        raise ValueError(f"{repo_id} at {made.oid} lacks {', '.join(missing)}: run the same command again.")
    return Uploaded(made.oid, made.commit_url, made.oid != before, made.pr_url)


def _check_card(folder: str | Path) -> None:
    """By the Hub's own rules, before anything is made there."""
    try:
        ModelCard.load(Path(folder) / "README.md").validate()
    except ValueError as error:
        raise ValueError(f"The Hub refuses the card's metadata, and nothing was uploaded: {error}") from None


def _refuse_other_models(api: HfApi, repo_id: str, folder: str | Path, there: list[str]) -> None:
    """A name that is taken: the repository of another model is nothing to write over."""
    weights = [name for name in there if any(fnmatch(name, pattern) for pattern in OTHER_WEIGHTS) and "/" not in name]
    kind = "adapter_config.json" if "adapter_config.json" in files_of(folder) else "modeling_domino.py"
    if weights and kind not in there:
        raise ValueError(f"The name {repo_id} is taken: it holds another model ({weights[0]}). Choose another name.")


def _state(api: HfApi, folder, repo_id: str, revision: str | None) -> str:
    """What is there after an upload that failed."""
    branch = revision or "main"
    try:
        missing = missing_files(api, folder, repo_id, branch)
    except HTTPError:
        return f"The Hub does not say what `{branch}` holds now; the same command again goes on."
    total = len(files_of(folder))
    if not missing:
        return f"All {total} files are on `{branch}` all the same."
    return (
        f"Of the {total} files, `{branch}` of {repo_id} holds {total - len(missing)} as they are here. The same command "
        "again goes on; what has arrived is not sent twice."
    )


def missing_files(api: HfApi, folder: str | Path, repo_id: str, revision: str) -> list[str]:
    """Files of a folder that a revision does not hold, bit for bit."""
    entries = api.list_repo_tree(repo_id, recursive=True, revision=revision)
    there = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    return [name for name in files_of(folder) if not _same(Path(folder) / name, there.get(name))]


def _same(path: Path, entry: RepoFile | None) -> bool:
    if entry is None or entry.size != path.stat().st_size:
        return False
    if entry.lfs is None:
        return sha.git_hash(path.read_bytes()) == entry.blob_id
    with path.open("rb") as file:
        return sha.sha_fileobj(file).hex() == entry.lfs.sha256


def _tagged(api: HfApi, repo_id: str, tag: str) -> str | None:
    try:
        return api.model_info(repo_id, revision=tag).sha
    except RevisionNotFoundError:
        return None


__all__ = ["Uploaded", "commit", "hub_errors", "missing_files", "upload"]
