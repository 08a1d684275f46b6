"""Looks through everything written of a folder for what must not leave the machine: tokens, paths of this machine, the
user's name. What was found is said by file and line, never shown.
"""

import getpass
import re
from pathlib import Path

from huggingface_hub import get_token


SECRETS = {
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}",
    "an API key": r"\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bglpat-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}",
    "a GitHub token": r"\bgh[opsur]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in a URL": r"://[^/\s:@]+:[^/\s@]+@",
    # Special tokens of a vocabulary are written <so>.
    "a secret": r"""(?i)(?:\btoken|_token|secret|passw(?:or)?d|api_?key)["']?\s*[:=]\s*["'][^"'\s<>]{8,}["']""",
}
PATH = r"(?:(?<![\w./:<>~-])|file://)(?:/(?:[\w.@+-]+/)+[\w.@+-]+|~/[\w./-]+|[A-Za-z]:\\[\w.\\-]+)"
# Accounts that say nothing of a person.
NOBODY = frozenset({"root", "user", "admin", "ubuntu", "debian", "runner", "jovyan", "nobody", "ec2-user"})
WEIGHTS, PICTURES = ".safetensors", ".png"


def scan(folder: str | Path, repo_id: str, names: list[str] | None = None) -> None:
    """
    Args:
        folder: Everything in it is read; of weights the header, where names and notes stand.
        repo_id: Its namespace is public, also where it is the user's name.
        names: Files to read instead of all.

    Raises:
        ValueError: Something was found.
    """
    found = []
    paths = sorted(Path(folder).rglob("*")) if names is None else [Path(folder) / name for name in names]
    for path in paths:
        if path.is_dir() or path.suffix == PICTURES:
            continue
        for number, line in enumerate(_text(path).splitlines(), start=1):
            found += [(path.relative_to(folder), number, what) for what in _findings(path, line, repo_id)]
    if found:
        listed = "; ".join(f"{path}, line {number}: {what}" for path, number, what in found[:10])
        more = f" (and {len(found) - 10} more)" if len(found) > 10 else ""
        raise ValueError(f"Nothing was uploaded, since the files hold what should stay here: {listed}{more}.")


def _text(path: Path) -> str:
    if path.suffix != WEIGHTS:
        return path.read_text(encoding="utf-8")
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little")).decode("utf-8")


def _findings(path: Path, line: str, repo_id: str) -> list[str]:
    found = [what for what, pattern in SECRETS.items() if re.search(pattern, line)]
    own = get_token()
    if own and own in line and not found:
        found.append("your token")
    if re.search(PATH, line):
        found.append("a path of this machine")
    # In code a name such as `max` is a word like any other.
    if path.suffix != ".py" and path.name != "LICENSE":
        for name in {getpass.getuser(), Path.home().name} - NOBODY - {repo_id.partition("/")[0]}:
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", line):
                found.append("your user name")
    return found


def without_paths(text: str) -> str:
    """A text with the last part in place of every path of this machine."""
    return re.sub(PATH, lambda match: re.split(r"[/\\]", match[0])[-1], text)


__all__ = ["scan", "without_paths"]
