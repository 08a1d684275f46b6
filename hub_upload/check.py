"""Checks a repository as somebody would find it who has only torch and transformers, in a process of its own."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from huggingface_hub import ModelCard
from packaging.requirements import Requirement

from . import stranger


# By how much a logit may lie below the best one, in standard deviations: ties that rounding decides.
LARGEST_GAP = 1e-3
# What differs between a configuration and itself in another place.
PLACE = ("_name_or_path", "_commit_hash", "auto_map", "transformers_version")


@functools.cache
def packages_of(*distributions: str) -> frozenset[str]:
    """Top-level packages of some distributions and of all that they require, extras left out."""
    found, rest = set(), list(distributions)
    while rest:
        name = re.sub(r"[-_.]+", "-", rest.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or []]
        except metadata.PackageNotFoundError:
            continue  # for another platform, or vendored
        rest += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    tops = metadata.packages_distributions().items()
    return frozenset(top for top, owners in tops if {re.sub(r"[-_.]+", "-", o).lower() for o in owners} & found)


def visit(
    repository: str | Path,
    *,
    revision: str | None = None,
    adapter: str | Path | None = None,
    adapter_revision: str | None = None,
    target: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> dict:
    """
    What a stranger sees: only torch, transformers and what they require can be imported (and peft, for an adapter); every
    cache is empty, and there is no network unless `endpoint` names a Hub.

    Args:
        repository: A draft's folder, or its id on the Hub of `endpoint`.
        revision: Of the repository there.
        adapter: Folder or id of an adapter to put on the draft.
        adapter_revision: Of the adapter.
        target: Model to decode with; a tiny random one when None.
        endpoint: Of a Hub.
        token: For private repositories there.

    Returns:
        See `stranger.look`.

    Raises:
        ValueError: It did not load or decode.
    """
    packages = packages_of("torch", "transformers", *(["peft"] if adapter is not None else []))
    request = {
        "repository": str(repository if endpoint else Path(repository).resolve()),
        "revision": revision,
        "adapter": None if adapter is None else str(adapter if endpoint else Path(adapter).resolve()),
        "adapter_revision": adapter_revision,
        "target": target,
        "custom_generate": adapter is None and endpoint is None,
        "packages": [*packages, "transformers_modules"],
    }
    with tempfile.TemporaryDirectory() as home:
        environment = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        environment |= {"HF_HOME": home, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if endpoint is None:
            environment["HF_HUB_OFFLINE"] = "1"
        else:
            environment |= {"HF_ENDPOINT": endpoint, **({"HF_TOKEN": token} if token else {})}
        process = subprocess.run(
            [sys.executable, "-I", stranger.__file__],
            input=json.dumps(request),
            cwd=home,  # where no folder is called like a repository
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode or stranger.MARK not in process.stdout:
        raise ValueError(
            f"{repository} does not work for somebody who has only torch and transformers: {_reason(process.stderr)}"
        )
    return json.loads(process.stdout.rsplit(stranger.MARK, 1)[1])


def _reason(errors: str) -> str:
    """The last exception of a traceback, without the way to it."""
    raised = re.split(r"^(?=[\w.]+(?:Error|Exception|Exit)\b)", errors, flags=re.MULTILINE)[-1]
    return " ".join(raised.split())[:500] or "the process ended without a word."


def check(seen: dict, name: str, draft, adapted=None) -> dict:
    """
    Whether what a stranger saw is the draft that was meant.

    Args:
        seen: From `visit`.
        name: Of what was visited, for messages.
        draft: The `DominoForSpeculativeDraft` that the repository was made from.
        adapted: The same under the peft adapter that the repository holds.

    Returns:
        What was decoded: `tau`, `rounds`.

    Raises:
        ValueError: Other weights, another configuration, a class that is not the repository's own, or a text that is not
            the target's.
    """
    if not seen["module"].startswith("transformers_modules."):
        raise ValueError(
            f"{name} was loaded by `{seen['module']}`, not by its own code: check `auto_map` in config.json."
        )
    if seen["draft"] != stranger.digest(draft):
        raise ValueError(f"{name} loads with other weights than the draft it was made from.")
    if adapted is not None and seen["adapted"] != stranger.digest(adapted):
        raise ValueError(f"{name} puts another adapter on the draft than the one it was made from.")
    config = json.loads(json.dumps(draft.config.to_dict(), default=str))
    differing = {n for n in config.keys() | seen["config"] if config.get(n) != seen["config"].get(n)} - set(PLACE)
    if differing:
        raise ValueError(f"{name} loads with another configuration than its draft's: {', '.join(sorted(differing))}.")
    for way in ("decoded", "custom_generate"):
        if way in seen and not seen[way]["gap"] <= LARGEST_GAP:
            raise ValueError(
                f"{name} decodes a text that is not the target's ({way}): a token's logit lies {seen[way]['gap']:.2g} "
                "standard deviations below the best one."
            )
    if seen.get("custom_generate", seen["decoded"])["tokens"] != seen["decoded"]["tokens"]:
        raise ValueError(f"{name} decodes another text through its custom_generate/generate.py.")
    return seen["decoded"]


def check_card(path: Path) -> None:
    """
    What of a card's metadata can be checked without a Hub.

    Raises:
        ValueError: A field is missing, or the metadata cannot be read.
    """
    data = ModelCard.load(path).data
    missing = [n for n in ("license", "library_name", "base_model", "pipeline_tag", "tags") if not data.get(n)]
    if missing:
        raise ValueError(f"The card lacks {', '.join(f'`{name}`' for name in missing)} in its metadata.")


__all__ = ["check", "check_card", "packages_of", "visit"]
