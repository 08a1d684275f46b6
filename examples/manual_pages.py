"""Chats about manual pages, from two Debian packages: German ones, far from what SmolLM2 writes, and English ones.

    python examples/manual_pages.py far chats.jsonl     # German: manpages-de, GPL-3+ and the licences of each page
    python examples/manual_pages.py close chats.jsonl   # English: manpages-dev, the licences of each page

Each row asks for a section of a page and answers with its text. Data of a fine-tuning, not of a draft.
"""

import argparse
import gzip
import hashlib
import io
import json
import random
import re
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path


DEBIAN = "http://deb.debian.org/debian/pool/main/m/"
PACKAGES = {
    "far": (
        "manpages-l10n/manpages-de_4.18.1-1_all.deb",
        "37d2e7ee51f22952aecec3af93647ff59194a3c74bb7a694560f49c7f7ab3978",
        "./usr/share/man/de/",
        "Was steht im Abschnitt {section} der Handbuchseite {name}({number})?",
    ),
    "close": (
        "manpages/manpages-dev_6.03-2_all.deb",
        "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
        "./usr/share/man/",
        "What does the section {section} of the manual page {name}({number}) say?",
    ),
}
SHORTEST, LONGEST = 120, 600  # characters of an answer
WORDS = ("B", "I", "BR", "RB", "BI", "IB", "IR", "RI", "SM", "SB")  # macros whose arguments are text
JOINED = ("BR", "RB", "BI", "IB", "IR", "RI")
GLYPHS = {
    "aq": "'",
    "dq": '"',
    "bu": "*",
    "em": "-",
    "en": "-",
    "lq": '"',
    "rq": '"',
    "oq": "'",
    "cq": "'",
    "rs": "\\",
}


def download(kind: str) -> bytes:
    """A package, its checksum seen to."""
    path, expected, _, _ = PACKAGES[kind]
    with urllib.request.urlopen(DEBIAN + path) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != expected:
        raise SystemExit(f"{DEBIAN + path} is not the file of the recorded checksum.")
    return content


def data_of(package: bytes) -> tarfile.TarFile:
    """The files of a Debian package, which is an `ar` archive of three members."""
    place = 8
    while place < len(package):
        name, size = package[place : place + 16].decode().strip(), int(package[place + 48 : place + 58])
        if name.startswith("data.tar"):
            return tarfile.open(fileobj=io.BytesIO(package[place + 60 : place + 60 + size]))
        place += 60 + size + size % 2
    raise ValueError("The package holds no data.")


def plain(text: str) -> str:
    """A line of roff without its escapes."""
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[,/&|^:%c]|\\s[+-]?\d", "", text)
    text = re.sub(r"\\\((..)", lambda match: GLYPHS.get(match[1], ""), text)
    text = re.sub(r"\\\[(\w+)\]", lambda match: GLYPHS.get(match[1], ""), text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\~", " ").replace("\\(", "")


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Headings of a page and the text below each, in paragraphs."""
    heading, paragraphs = None, [[]]
    for line in page.splitlines():
        macro, _, rest = line[1:].strip().partition(" ") if line[:1] in (".", "'") else ("", "", "")
        if macro == "SH":
            if heading:
                yield heading, _joined(paragraphs)
            heading, paragraphs = plain(rest.strip('" ')), [[]]
        elif macro in ("PP", "P", "LP", "TP", "IP", "HP", "SS", "RS", "RE", "nf", "fi"):
            paragraphs.append([])
        elif macro in WORDS:
            words = re.findall(r'"[^"]*"|\S+', rest)
            paragraphs[-1].append(plain(("" if macro in JOINED else " ").join(word.strip('"') for word in words)))
        elif line[:1] not in (".", "'") and line.strip():
            paragraphs[-1].append(plain(line.strip()))
    if heading:
        yield heading, _joined(paragraphs)


def _joined(paragraphs: list[list[str]]) -> str:
    return "\n\n".join(" ".join(" ".join(lines).split()) for lines in paragraphs if lines)


def chats(kind: str, package: bytes | None = None, *, seed: int = 0) -> list[dict]:
    """
    Rows of `id` and `messages`, in an order drawn once, so that neighbours are of different pages.

    Args:
        kind: "far" or "close".
        package: The Debian package; downloaded when None.
        seed: Of the order.
    """
    _, _, root, question = PACKAGES[kind]
    rows, seen = [], set()
    with data_of(download(kind) if package is None else package) as files:
        for file in sorted(files.getnames()):
            match = re.fullmatch(re.escape(root) + r"man\d/([^/]+)\.(\d)\w*\.gz", file)
            if not match or not files.getmember(file).isreg():
                continue
            page = gzip.decompress(files.extractfile(file).read()).decode("utf-8", errors="replace")
            for section, text in sections(page):
                text = text[:LONGEST].rpartition(" ")[0] if len(text) > LONGEST else text
                if len(text) < SHORTEST or text in seen:  # what many pages repeat
                    continue
                seen.add(text)
                asked = question.format(section=section, name=match[1], number=match[2])
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]
                rows.append({"id": f"{match[1]}.{match[2]}-{len(rows)}", "messages": messages})
    random.Random(seed).shuffle(rows)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(PACKAGES))
    parser.add_argument("output", help=".jsonl file to write")
    arguments = parser.parse_args()
    rows = chats(arguments.kind)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(arguments.output).write_text(text, encoding="utf-8")
    print(f"{len(rows)} chats in {arguments.output}")


if __name__ == "__main__":
    main()
