"""A federation file and a party's own, whole and wrong: one line before anything is sent."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from sectorch import errors
from sectorch.cli.main import run
from sectorch.network.federation.config import (
    credentials,
    federation_text,
    parse,
    read_federation,
    read_party_config,
    server_credentials,
)
from sectorch.network.identity.authority import make_authority
from sectorch.network.identity.identity import fingerprint_of
from sectorch.testing.local_network import enrol

A, B = ("SHA256:" + letter * 43 for letter in "AB")


def said(**parties: dict) -> dict:
    both = {"north": {"role": "L", "identity": A}, "south": {"role": "R", "identity": B}}
    return {"federation": {"name": "x", "server": "localhost:7100"}, "parties": {**both, **parties}}


def test_a_file_says_all_and_its_text_says_the_same(tmp_path):
    whole = said(cloud={"address": "cloud.example:7100"}, east={"identity": "SHA256:" + "C" * 43, "server": "cloud"})
    del whole["federation"]["server"]
    whole["federation"] |= {"edges": [["south", "north"]], "largest_message_mb": 7}
    federated = parse(whole)
    written = tmp_path / "x.toml"
    written.write_text(federation_text(federated))

    assert read_federation(written) == federated
    assert federated.servers == {"cloud": "cloud.example:7100"} and federated.home("north") == "cloud"
    federated.check_edge("north", "south")
    with pytest.raises(errors.ArgumentError, match="no edge between 'north' and 'east'"):
        federated.check_edge("north", "east")
    changed = dict(whole, federation={**whole["federation"], "edges": []})
    assert parse(changed).digest != federated.digest


@pytest.mark.parametrize(
    ("parties", "head", "why"),
    [
        ({"North": {"role": "Z", "identity": "SHA256:" + "C" * 43}}, {}, "are one name"),
        ({"R": {"identity": "SHA256:" + "C" * 43}}, {}, "the role that 'south' plays"),
        ({"east": {"identity": A}}, {}, "the same identity key"),
        ({"east": {"identity": "SHA256:" + "C" * 43, "server": "moon"}}, {}, "dials the server 'moon'"),
        ({"east": {"address": "nowhere"}}, {}, "HOST:PORT"),
        ({"east": {"address": "a:1", "role": "Z"}}, {}, "identity in"),
        ({"east": {"role": "not one"}}, {}, "role in"),
        ({}, {"edges": [["north", "nobody"]]}, "has no party 'nobody'"),
        ({}, {"edges": [["north", "north"]]}, "to itself"),
        ({}, {"edges": "north"}, "list of pairs"),
        ({}, {"server": "x"}, "HOST:PORT"),
        ({}, {"models": 1}, "has no 'models'"),
    ],
)
def test_a_file_that_is_not_right(parties, head, why):
    whole = said(**parties)
    whole["federation"] |= head
    with pytest.raises(errors.ArgumentError, match=why) as caught:
        parse(whole)
    assert "\n" not in str(caught.value)


@pytest.fixture
def folder(tmp_path) -> Path:
    make_authority(tmp_path)
    enrol(tmp_path, "server", hosts=("localhost",))
    enrol(tmp_path, "north")
    return tmp_path


def of(folder: Path):
    own = fingerprint_of((folder / "north-identity.pem").read_bytes())
    return parse(said(north={"role": "L", "identity": own}))


def test_certificates_of_the_wrong_purpose_or_time_and_keys_that_others_read(folder):
    federated = of(folder)
    assert credentials(federated, "north", folder).name == "north"
    assert server_credentials("server", folder).called == "server"
    with pytest.raises(errors.IdentityError, match=r"has the fingerprint .* the others would refuse you"):
        credentials(parse(said()), "north", folder)
    with pytest.raises(errors.IdentityError, match=r"good for calling only.*again with --host"):
        server_credentials("north", folder)
    for kind in ("", "-key"):
        shutil.copy(folder / f"server{kind}.pem", folder / f"north{kind}.pem")
    with pytest.raises(errors.IdentityError, match="good for serving only"):
        credentials(federated, "north", folder)
    (folder / "north-key.pem").chmod(0o640)
    with pytest.raises(errors.IdentityError, match=r"others can read .*chmod 600"):
        credentials(federated, "north", folder)


def test_a_clock_that_was_set_back(folder):
    ahead = time.time() + 3600
    os.utime(folder / "north.pem", (ahead, ahead))
    with pytest.raises(errors.IdentityError, match="after what this machine's clock says: set it"):
        credentials(of(folder), "north", folder)


def test_up_refuses_before_a_port_opens(folder, capsys):
    """Whoever accepts nothing and serves nothing, is not there, or has another's key."""
    path = folder / "federation.toml"
    path.write_text(federation_text(of(folder)))
    for name, why in (("north", "accepts nothing yet"), ("nobody", "has no party 'nobody'")):
        assert run(["up", str(path), "--as", name]) == 1
        assert why in capsys.readouterr().err
    assert run(["federation", "check", str(path), "--as", "nobody"]) == 1
    assert "has no party 'nobody'" in capsys.readouterr().err
    path.write_text(federation_text(parse(said())))
    (folder / "north.toml").write_text(
        '[[accept]]\nprogram = "x.py:f"\nsource = "' + "0" * 64 + '"\nparties = ["north"]\nfrom = ["north"]\n'
    )
    assert run(["up", str(path), "--as", "north"]) == 1
    assert "cannot read the program" in capsys.readouterr().err
    assert read_party_config(path, "north").accept[0]["program"] == "x.py:f"
