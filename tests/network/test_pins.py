"""The file of pins: what is written into it, what a broken line costs, and many that write at once."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from sectorch import errors
from sectorch.network import Pins
from sectorch.network.identity.authority import keys
from sectorch.network.identity.identity import fingerprint, new_identity, read_identity

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32).public_key().public_bytes_raw() for i in range(4)]
"""The same in every process: the names of tests below are made of them."""
PRINTS = [fingerprint(key) for key in KEYS]
EXPECTED = "expected `NAME SHA256:...`, each name once"


def test_a_name_with_a_space_at_its_end_locks_nobody_out(tmp_path):
    """Such a name in a certificate made a second line for the name without it, and the file unreadable for all."""
    pins = Pins(tmp_path / "pins", first_use=True)
    pins.check("hospital-a", KEYS[0])
    with pytest.raises(errors.IdentityError, match="the other party's name is 1 to 64"):
        pins.check("hospital-a ", KEYS[1])
    pins.check("hospital-a", KEYS[0])
    pins.check("hospital-c", KEYS[2])
    assert pins.fingerprints() == {"hospital-a": PRINTS[0], "hospital-c": PRINTS[2]}


def test_a_name_with_a_line_break_pins_nobody_else(tmp_path):
    """A server that relays such a name had a line of its own choice written."""
    pins = Pins(tmp_path / "pins", first_use=True)
    with pytest.raises(errors.IdentityError, match="the other party's name is 1 to 64"):
        pins.check(f"x {PRINTS[3]}\nvictim", KEYS[1])
    assert pins.fingerprints() == {}


TEXT = st.text(max_size=80) | st.text("ab1 _.-@#\n\r\t\x0b\x85\u2028\x00\u0430\uff41:", max_size=70)


@given(TEXT, st.booleans())
def test_whatever_the_name_the_file_stays_whole(tmp_path_factory, name, by_hand):
    """Either it is refused and nothing is written, or it is known from then on, beside what was known."""
    pins = Pins(tmp_path_factory.mktemp("pins") / "pins", first_use=True)
    pins.check("hospital-a", KEYS[0])
    before = pins.path.read_bytes()
    try:
        pins.pin(name, PRINTS[1]) if by_hand else pins.check(name, KEYS[1])
    except (errors.ArgumentError, errors.IdentityError) as error:
        assert pins.path.read_bytes() == before
        assert str(error).isprintable()
        return
    assert name.isascii() and name == name.strip() and len(name.split()) == 1 and name[0].isalnum()
    assert pins.fingerprints() == {"hospital-a": PRINTS[0], name: PRINTS[1]}


@given(TEXT)
def test_a_fingerprint_is_one_or_is_not_written(tmp_path_factory, text):
    pins = Pins(tmp_path_factory.mktemp("pins") / "pins")
    for print_ in (text, f"SHA256:{text}", f"{PRINTS[0]}{text}" if text else "", f"{PRINTS[0][:-1]}\n"):
        if print_ == PRINTS[0]:
            continue
        with pytest.raises(errors.ArgumentError):
            pins.pin("alice", print_)
    assert not pins.path.exists()


BROKEN = [
    "alice",
    "alice md5:abc",
    f"alice SHA256:a\nalice SHA256:b\nalice {PRINTS[0]}",
    f"alice {PRINTS[0]}\nalice {PRINTS[1]}",
    f"alice {PRINTS[0]} {PRINTS[0]}",
    f"alice {PRINTS[0][:-1]}",
    f"alice {PRINTS[0]}x",
    f"\talice\t{PRINTS[0]} x",
    f"alice\u2003{PRINTS[0]}",
    f"alice\x0b{PRINTS[0]}",
]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("first_use", [False, True])
def test_a_broken_line_is_the_loss_of_its_name_alone(tmp_path, text, first_use):
    path = tmp_path / "pins"
    path.write_text(f"# those whom I called\nbob {PRINTS[1]}\n{text}\ncarol {PRINTS[2]}\r\n")
    pins = Pins(path, first_use=first_use)
    for key in KEYS:
        with pytest.raises(errors.IdentityError) as refused:
            pins.check("alice", key)
    pins.check("bob", KEYS[1])
    pins.check("carol", KEYS[2])
    with pytest.raises(errors.IdentityError, match="has changed"):
        pins.check("bob", KEYS[0])
    assert pins.fingerprints() == {"bob": PRINTS[1], "carol": PRINTS[2]}
    command = str(refused.value)[str(refused.value).index("sectorch keys pin") :]
    assert keys(shlex.split(command)[2:]) == 0, "the way out"
    pins.check("alice", KEYS[3])
    kept = path.read_text()
    assert kept.startswith("# those whom I called\n"), "comments of its owner stay"


@pytest.mark.parametrize("line", ["\xff\xfe", f"al\u0131ce {PRINTS[0]}", f"-x {PRINTS[0]}", f" # {PRINTS[0]}", "bob"])
def test_nobody_new_is_trusted_on_first_use_while_a_line_is_broken(tmp_path, line):
    """It may have been the new one's."""
    (tmp_path / "pins").write_text(f"carol {PRINTS[2]}\n{line}\n", encoding="utf-8")
    pins = Pins(tmp_path / "pins", first_use=True)
    with pytest.raises(errors.IdentityError, match=rf"pins, line 2: {EXPECTED}; nobody new is trusted"):
        pins.check("alice", KEYS[0])
    pins.check("carol", KEYS[2])
    pins.pin("alice", PRINTS[0])
    pins.check("alice", KEYS[0])
    assert (tmp_path / "pins").read_text().splitlines()[1] == line, "what is broken waits for whoever wrote it"


def test_a_file_of_bytes_that_are_no_text_is_kept_as_it_is(tmp_path):
    path = tmp_path / "pins"
    path.write_bytes(b"\xff\xfe \x00\n" + f"bob {PRINTS[1]}".encode())
    Pins(path).check("bob", KEYS[1])
    Pins(path).pin("alice", PRINTS[0])
    assert path.read_bytes() == b"\xff\xfe \x00\n" + f"bob {PRINTS[1]}\nalice {PRINTS[0]}\n".encode()


@given(st.binary(max_size=200), st.integers(0, 200))
def test_whatever_is_in_the_file_no_wrong_key_is_trusted(tmp_path_factory, junk, at):
    path = tmp_path_factory.mktemp("pins") / "pins"
    whole = f"alice {PRINTS[0]}\nbob {PRINTS[1]}\n".encode()
    path.write_bytes(whole[:at] + junk + whole[at:])
    for first_use in (False, True):
        for name in ("alice", "bob"):
            before = path.read_bytes()
            if Pins(path).fingerprints().get(name) is None and first_use:
                continue  # a name of which nothing is left is new, and a file that is whole says nothing of it
            with pytest.raises(errors.IdentityError):
                Pins(path, first_use=first_use).check(name, KEYS[2])
            assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_trusts_nobody(tmp_path):
    (tmp_path / "pins").mkdir()
    for pins in (Pins(tmp_path / "pins"), Pins(tmp_path / "pins", first_use=True)):
        with pytest.raises(errors.IdentityError, match="cannot read the pins"):
            pins.check("alice", KEYS[0])


def test_pins_in_a_folder_that_only_others_may_write_are_read(tmp_path, monkeypatch):
    """Nothing is locked or written where nobody is to be trusted on first use."""
    Pins(tmp_path / "pins").pin("alice", PRINTS[0])
    (tmp_path / "pins.lock").unlink()
    written = []
    monkeypatch.setattr(Path, "mkdir", lambda self, *args, **options: written.append(self))
    Pins(tmp_path / "pins").check("alice", KEYS[0])
    assert written == [] and [path.name for path in tmp_path.iterdir()] == ["pins"]


def test_the_pin_file_survives_many_writers(tmp_path):
    made = {f"client-{i}": read_identity(new_identity()).public_key().public_bytes_raw() for i in range(20)}
    pins = Pins(tmp_path / "pins", first_use=True)
    threads = [threading.Thread(target=pins.check, args=item) for item in made.items() for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Pins(tmp_path / "pins").fingerprints() == {name: fingerprint(key) for name, key in made.items()}


@pytest.mark.parametrize("text", ["alice", "alice md5:abc", "alice SHA256:a\nalice SHA256:b", "\xff"])
def test_a_broken_pin_file_does_not_trust_whom_it_does_not_know(tmp_path, text):
    (tmp_path / "pins").write_text(text, encoding="latin-1")
    with pytest.raises(errors.IdentityError):
        Pins(tmp_path / "pins").check("alice", bytes(32))


@pytest.mark.parametrize("print_", ["", "SHA256:", "SHA256:" + "a" * 42, "MD5:" + "a" * 46, "SHA256:a b" + "c" * 40])
def test_what_is_no_fingerprint_is_not_pinned(tmp_path, print_):
    with pytest.raises(errors.ArgumentError):
        Pins(tmp_path / "pins").pin("alice", print_)
