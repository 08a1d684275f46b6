"""examples/manual_pages.py: chats from a Debian package, made here as Debian makes them."""

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import manual_pages


PAGE = (
    r""".\" a comment
.TH FROB 1 "2024" "tools"
.SH NAME
frob \- too short to ask for
.SH DESCRIPTION
The program \fBfrob\fP(1) reads \fIfiles\fP and writes what it finds, line by line, \(dqas is\(dq.
.PP
Lines that begin with a dot
.B are kept
by
.BR frob (1),
whatever they hold, unless
.I \-\-drop
is given; see below for that.
.SH COPYRIGHT
"""
    + "What stands at the end of every page of this package, word for word, and teaches nothing about it. " * 2
)


def archive(*members: tuple[str, bytes]) -> bytes:
    """An `ar` archive, as `dpkg-deb` writes them."""
    packed = b"!<arch>\n"
    for name, content in members:
        packed += f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode() + content
        packed += b"\n" * (len(content) % 2)
    return packed


@pytest.fixture
def package() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as files:
        for name, text in (("frob.1.gz", PAGE), ("grob.1.gz", PAGE.replace("DESCRIPTION", "USE")), ("notes.txt", "x")):
            content = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
            info = tarfile.TarInfo(f"./usr/share/man/man1/{name}")
            info.size = len(content)
            files.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("./usr/share/man/man1/other.1.gz")
        link.type, link.linkname = tarfile.SYMTYPE, "frob.1.gz"
        files.addfile(link)
    return archive(("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), ("data.tar.xz", buffer.getvalue()))


def test_sections_become_chats_and_what_repeats_is_asked_for_once(package):
    rows = manual_pages.chats("close", package)
    asked = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}
    assert len(asked) == len({row["id"] for row in rows}) == 2  # one text twice, one too short, links left out
    question = next(iter(name for name in asked if "DESCRIPTION" in name or "USE" in name))
    assert question.endswith("of the manual page frob(1) say?")
    first, second = asked[question].split("\n\n")
    assert first == 'The program frob(1) reads files and writes what it finds, line by line, "as is".'
    assert second.startswith(
        "Lines that begin with a dot are kept by frob(1), whatever they hold, unless --drop is given"
    )
    assert manual_pages.chats("close", package) == rows
    assert manual_pages.chats("far", package) == []  # pages of another language


def test_a_download_is_the_recorded_file(package, monkeypatch):
    monkeypatch.setattr(manual_pages.urllib.request, "urlopen", lambda url: io.BytesIO(package))
    with pytest.raises(SystemExit, match="is not the file of the recorded checksum"):
        manual_pages.download("close")
    path, _, *rest = manual_pages.PACKAGES["close"]
    known = (path, hashlib.sha256(package).hexdigest(), *rest)
    monkeypatch.setitem(manual_pages.PACKAGES, "close", known)
    assert manual_pages.download("close") == package
