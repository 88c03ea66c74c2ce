"""Settings that are declared once: what the dataclass, the command line and the documents say is the same."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sectorch.federated import FederationError, Options, Training, option
from sectorch.federated.command import add_options, chosen, declared, sweeps


@dataclass(frozen=True)
class Some(Options):
    """Of a test."""

    rounds: int = option(3, "how often", least=1, most=9, several=True)
    rate: float | None = option(None, "how fast (default: the data's)", above=0, below=1)
    kind: str = option("one", "which", among=("one", "two"))
    parts: tuple[float, ...] = option((0.5,), "of a whole", least=0, most=1)
    secure: bool = option(True, "by the protocol", flag="plain", off="in the clear")
    loud: bool = option(False, "more words")
    local: Training = option(Training(epochs=10, milestones=(5,)), "at home")


def parsed(*arguments: str, base: Some = Some()) -> Some:
    parser = argparse.ArgumentParser()
    add_options(parser, Some)
    return chosen(parser.parse_args(arguments), base)


def test_nothing_named_is_the_base():
    base = Some(rounds=7, secure=False, local=Training(epochs=4))
    assert parsed() == Some() and parsed(base=base) == base


@given(st.integers(1, 9), st.floats(0.01, 0.99), st.sampled_from(("one", "two")), st.lists(st.floats(0, 1), min_size=1))
def test_what_is_written_is_what_is_set(rounds, rate, kind, parts):
    words = ["--rounds", rounds, "--rate", rate, "--kind", kind, "--plain", "--loud", "--local-epochs", 4, "--parts"]
    found = parsed(*map(str, words), *map(str, parts))
    wanted = Some(rounds, rate, kind, tuple(parts), False, True, Training(epochs=4, milestones=(5,)))
    assert found == wanted


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(rounds=0), "rounds must be at least 1 and at most 9, got 0"),
        (dict(rounds=True), "rounds must be of type int, got True"),
        (dict(rounds="3"), "rounds must be of type int, got '3'"),
        (dict(rate=0.0), "rate must be above 0 and below 1, got 0.0"),
        (dict(rate=float("nan")), "rate must be above 0 and below 1, got nan"),
        (dict(kind="three"), "there is no kind 'three'; there are one, two"),
        (dict(parts=(0.5, 1.5)), "parts must be at least 0 and at most 1, got 1.5"),
        (dict(local=3), "local must be of type Training, got 3"),
    ],
)
def test_what_is_not_allowed_is_said(changes, text):
    with pytest.raises(FederationError) as refused:
        Some(**changes)
    assert str(refused.value) == text
    with pytest.raises(FederationError):
        Some().but(**changes)


def test_docs_and_help_come_from_the_fields():
    assert all(f"    {name}: {o.about}." in (Some.__doc__ or "") for name, _, _, o in declared(Some))
    parser = argparse.ArgumentParser()
    add_options(parser, Some)
    shown = " ".join(parser.format_help().split())
    for part in (
        "how often (default 3); several make a run of each",
        "--plain in the clear",
        "--local-lr",
        "default: the data's",
    ):
        assert part in shown


def test_several_values_are_a_sweep():
    parser = argparse.ArgumentParser()
    add_options(parser, Some)
    options = parser.parse_args(["--rounds", "1", "2", "--parts", "0.1", "0.2"])
    assert sweeps(options, Some) == {"rounds": [1, 2]}
    assert chosen(options, Some()).rounds == 1 and chosen(options, Some()).parts == (0.1, 0.2)


def test_an_option_by_its_old_name_is_the_new_one_and_says_so(capsys: pytest.CaptureFixture[str]):
    new = ("--local-optimizer", "sgd", "--local-batch-size", "7", "--local-label-smoothing", "0.1")
    expected = parsed(*new)
    assert expected.local.optimizer == "sgd" and capsys.readouterr().err == ""
    assert parsed("--local-optimiser", "sgd", "--local-batch", "7", "--local-smoothing", "0.1") == expected
    assert capsys.readouterr().err.splitlines() == [
        f"--local-{old} is --local-{name} now and will be removed"
        for old, name in (("optimiser", "optimizer"), ("batch", "batch-size"), ("smoothing", "label-smoothing"))
    ]
    for wrong in (("--local-batch", "1"), ("--local-optimiser", "lion")):
        with pytest.raises(SystemExit):
            parsed(*wrong)
    parser = argparse.ArgumentParser()
    add_options(parser, Some)
    assert "optimiser" not in parser.format_help()


def test_training_keeps_its_milestones_in_proportion():
    how = Training("adam", 2e-3, 64, 50, (25, 40))
    assert how.lasting(None) is how and how.lasting(10).milestones == (5, 8) and how.lasting(1).milestones == (1, 1)
