"""Papers among parties that are up: what a party accepts, what it alone says, and what a proposal cannot say for it."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from sectorch.cli.main import run
from sectorch.errors import ArgumentError, RefusedError
from sectorch.network.federation.config import read_federation, read_party_config
from sectorch.network.federation.policy import AcceptancePolicy
from sectorch.network.federation.programs import PAPERS, settings_digest, settings_of
from sectorch.network.federation.service import describe_proposal

OPTIONS = ["--parties", "3", "--queries", "4"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers") / "trial"
    assert run(["federation", "try", str(folder), "north=p1", "south=p2", "west=p3", "hub=S", "--json"]) == 0
    return folder / "federation.toml"


@pytest.fixture
def accepted(file, capsys):
    """Accept a paper as north, and what it accepts then."""

    def accept(*more: str) -> AcceptancePolicy:
        said = run(["federation", "accept", str(file), "capc", "--as", "north", *more, "--json", "--", *OPTIONS])
        assert said == 0, capsys.readouterr().err
        capsys.readouterr()
        return AcceptancePolicy(read_party_config(file, "north"), read_federation(file), "north")

    yield accept
    (file.parent / "north.toml").unlink(missing_ok=True)


def test_all_papers_have_settings():
    for paper in PAPERS:
        assert len(settings_digest(paper, settings_of(paper, []))) == 64


def test_a_budget_is_the_party_s_own(file, accepted):
    """It is in its own file, with a path from there; with or without one the digest that all agree on is the same."""
    policy = accepted("--own", f"budgets={file.parent}/mine", "--own", "budget_epsilon=30")
    (entry,) = policy.accepted
    assert entry.own == ("--budgets", str(file.parent / "mine"), "--budget-epsilon", "30")
    assert 'own = { "budgets" = "mine", "budget_epsilon" = "30" }' in (file.parent / "north.toml").read_text()
    assert entry.digest == settings_digest("capc", settings_of("capc", OPTIONS))
    agreed = policy.agree(describe_proposal(read_federation(file), "south", "capc", OPTIONS))
    assert agreed.accepted is entry


@pytest.mark.parametrize("wire", [["--budgets", "theirs"], ["--budgets=theirs"], ["--budget-epsilon", "1e9"]])
def test_nobody_says_it_for_another(file, accepted, wire):
    """Neither the starter's command nor a proposal that was made without it."""
    policy = accepted()
    with pytest.raises(ArgumentError, match=r"each party's own.*--own"):
        describe_proposal(read_federation(file), "south", "capc", [*OPTIONS, *wire])
    proposal = describe_proposal(read_federation(file), "south", "capc", OPTIONS)
    forged = replace(proposal, arguments=(*OPTIONS, *wire))
    with pytest.raises(RefusedError, match="each party's own"):
        policy.agree(forged)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"queries": "100"}, "no setting 'queries' of a party's own; it has budgets, budget_epsilon"),
        ({"budget_epsilon": "-3", "budgets": "b"}, "--budget-epsilon must be above 0"),
        ({"budget_epsilon": "3"}, "name the folder they lie in"),
        ({"budgets": "b", "budget_epsilon": "much"}, "invalid float value: 'much'"),
    ],
)
def test_own_settings_that_are_not_right_are_a_line(file, own, why, capsys):
    words = [word for name, value in own.items() for word in ("--own", f"{name}={value}")]
    assert run(["federation", "accept", str(file), "capc", "--as", "north", *words, "--", *OPTIONS]) == 1
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1
    table = '[[accept]]\npaper = "capc"\nsettings = "' + "0" * 64 + '"\nparties = ["north"]\nfrom = ["north"]\n'
    path = file.parent / "north.toml"
    path.write_text(table + "own = { " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in own.items()) + " }\n")
    try:
        with pytest.raises(ArgumentError, match=r"north\.toml"):
            AcceptancePolicy(read_party_config(file, "north"), read_federation(file), "north")
    finally:
        path.unlink()


def test_what_stands_after_the_dashes_is_for_a_paper(file, capsys):
    assert run(["federation", "check", str(file), "--", "--rounds", "2"]) == 1
    assert "a paper's options" in capsys.readouterr().err
