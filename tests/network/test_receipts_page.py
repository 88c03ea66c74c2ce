"""`sectorch audit --page`: receipts as one page for whoever answers for the data."""

from __future__ import annotations

import dataclasses
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sectorch.cli.main import run
from sectorch.network.audit import LISTED, Audit, Entry, audit, compare, page
from sectorch.network.identity.identity import new_identity
from sectorch.network.receipts import Receipts

ASKED = {
    "session": "ab" * 16, "client": "alice", "key": "SHA256:x", "model": "hospital-b", "version": "12",
    "asked": "predict", "rows": 32, "learned": "result",
}  # fmt: skip


class Read(HTMLParser):
    """What a browser would show and load."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.words, self._hidden, self.open = [], [], False, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag == "style"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        self._hidden = False
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self._hidden:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def files(pki, tmp_path_factory):
    """Receipts of S and of A, of three queries each: one of S's failed, and A's last is of other rows."""
    folder, credentials = tmp_path_factory.mktemp("receipts"), pki[1]
    credentials = {**credentials, "server": dataclasses.replace(credentials["server"], identity=new_identity())}
    for who, role, last in (("server", "S", 32), ("hospital-b", "A", 31)):
        receipts = Receipts(folder / role, credentials[who], role)
        for call in range(3):
            number = receipts.begin_query(call=call, **{**ASKED, "rows": last if call == 2 else 32})
            receipts.end_query(number, "PeerLostError" if call == 1 else "done")
        receipts.close()
    return {role: folder / role for role in "SA"}


def test_it_says_who_learned_what(files, tmp_path, capsys):
    found = audit(files["S"])
    path = tmp_path / "page.html"
    assert run(["audit", str(files["S"]), "--key", found.key, "--page", str(path)]) == 0
    assert str(path) in " ".join(capsys.readouterr().out.split()) and stat.S_IMODE(path.stat().st_mode) == 0o600
    text = Read(path.read_text()).text
    for words in ("server, as the server (S)", found.key, found.head, "result alice SHA256:x hospital-b 12 3 96"):
        assert words in text, words
    assert "1 of the questions did not end with a result" in text and "This party itself learned nothing" in text
    assert "result at most PeerLostError" in text and "nobody has compared" not in text
    assert f"sectorch audit {files['S'].name} --key {found.key} --head {found.head}" in text


def test_it_says_whether_two_files_agree(files, tmp_path):
    path = tmp_path / "page.html"
    assert run(["audit", str(files["S"]), "--against", str(files["A"]), "--page", str(path)]) == 1
    text = Read(path.read_text()).text
    assert "2 queries agree; 0 are here alone, 0 there alone, and 1 differ." in text and "do not agree" in text
    one = audit(files["A"])
    assert "The two files agree" in Read(page(one, False, one, compare(one, one))).text


def test_a_file_that_is_not_whole_has_no_page(files, tmp_path, capsys):
    changed = tmp_path / "changed"
    changed.write_bytes(files["S"].read_bytes().replace(b"alice", b"malice"))
    assert run(["audit", str(changed), "--page", str(tmp_path / "page.html")]) == 1
    assert not (tmp_path / "page.html").exists()
    assert run(["audit", str(files["S"]), "--page", str(tmp_path / "none" / "page.html")]) == 1
    assert "cannot write the page" in capsys.readouterr().err


def test_receipts_are_never_written_over(files, capsys):
    """A page goes by a page's name, so that it cannot take the place of what it is about, nor of a key."""
    before = files["S"].read_bytes()
    for name in (files["S"], files["A"], files["S"].with_name("june.pdf"), files["S"].with_name("key.pem")):
        there = name.exists()
        assert run(["audit", str(files["S"]), "--page", str(name)]) == 1
        assert "writes HTML" in capsys.readouterr().err and name.exists() == there
    assert files["S"].read_bytes() == before


def test_what_an_auditor_does_first_has_a_way_out(files, tmp_path, capsys):
    folder, crlf, other = tmp_path / "receipts", tmp_path / "crlf", tmp_path / "model.py"
    folder.mkdir()
    (folder / "north-S.receipts").write_bytes(files["S"].read_bytes())
    crlf.write_bytes(files["S"].read_bytes().replace(b"\n", b"\r\n"))
    other.write_text("import torch\n")
    for words, said in (
        ([folder], "an audit is of one file: its files are north-S.receipts"),
        ([tmp_path / "receipts" / ".."], "is a folder"),
        ([crlf], "get the file anew"),
        ([other], "name the file that --receipts wrote"),
        ([files["S"], "--against", files["S"]], "--against takes another party's"),
    ):
        assert run(["audit", *map(str, words)]) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    assert run(["audit", str(files["A"])]) == 0
    assert "the answering party (A)" in " ".join(capsys.readouterr().out.split())


HOSTILE = ["<script>x</script>", "{{ 7 * 7 }}", "\u202e", "'\">"]


@given(words=st.lists(st.text(max_size=40) | st.sampled_from(HOSTILE), min_size=6, max_size=6))
def test_words_of_others_are_words(words):
    client, model, version, learned, outcome, party = words
    entry = Entry(1, "2026-01-31T23:59:59", "s", 0, client, model, version, "predict", learned, 3, outcome=outcome)
    found = Audit(Path("a.jsonl"), party, "S", "k", heads=["h"], queries=[entry])
    plain = Read(
        page(
            dataclasses.replace(
                found,
                party="p",
                queries=[dataclasses.replace(entry, client="c", model="m", version="v", learned="l", outcome="o")],
            ),
            True,
        )
    )
    read = Read(page(found, True))
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in plain.tags], "no element of theirs"
    assert not read.open
    assert "49" not in page(dataclasses.replace(found, party="{{ 7 * 7 }}", queries=[]), True).split("checked")[0]
    assert not any({"src", "href"} & set(attributes) for _, attributes in read.tags), "nothing from outside"
    assert "\u202e" not in read.text


def test_a_long_file_is_listed_from_its_end():
    entries = [Entry(i, f"2026-01-01T00:00:{i % 60:02}", "s", i, "c", "m", "v", "predict", "result", 1, outcome="done")
               for i in range(LISTED + 5)]  # fmt: skip
    text = Read(page(Audit(Path("a"), "p", "S", "k", heads=["h"], queries=entries), True)).text
    assert f"The last {LISTED} of {LISTED + 5}" in text and f" {LISTED + 5} " in text
