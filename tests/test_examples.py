"""Every example runs, and shows what it says that it shows."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import long
from commands import PIPE, Command, run_command

from sectorch.choreography import PROTOCOLS
from sectorch.dp import BudgetFile

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def example(monkeypatch, tmp_path, capsys):
    """Runs an example in this process and a folder of its own."""
    before = dict(PROTOCOLS)  # an example may declare protocols of its own; other tests read the registry

    programs = SimpleNamespace(Popen=Command, PIPE=PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("sectorch.testing.local_network.subprocess", programs)

    def run(name: str, *arguments, **constants) -> tuple[Any, str]:
        """What its `main` returns, with these constants, or None for one that is a script, and its words in a line."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name])
        path = EXAMPLES / f"{name}.py"
        script = "\ndef main(" not in path.read_text(encoding="utf-8")
        found = runpy.run_path(str(path), run_name="__main__" if script else "example")
        if not script:
            found["main"].__globals__.update(constants)
        result = None if script else found["main"](*arguments)
        return result, " ".join(capsys.readouterr().out.split())

    yield run
    PROTOCOLS.clear()
    PROTOCOLS.update(before)


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in {text}"
    return float(found[1])


def test_every_example_is_tested_here():
    tested = set(re.findall(r'example\("(\w+)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.stem for path in EXAMPLES.glob("*.py")}


def test_wrap_your_model(example):
    _, text = example("digits", 12)
    assert number(text, r"accuracy │ ([\d.]+)") > 0.95
    assert "same label as plain 450 450" in " ".join(text.replace("│", "").split())
    assert number(text, r"largest logit error │ │ ([\d.e-]+)") < 1e-3
    assert "protects nothing" in text


@pytest.mark.parametrize(("rows", "least"), [(448, 0.5), *long((1400, 0.88))])
def test_two_owners_train_on_digits(example, rows: int, least: float):
    """The same batches give the same accuracy, to one picture in a hundred; a step shows nothing."""
    found, text = example("digits_training", TRAIN=rows)
    assert found["on shares"] > least and abs(found["on shares"] - found["in the clear"]) < 0.01
    assert found["messages that show something"] == 0 and "protects nothing" in text


def test_averaging_learns_and_is_taken_up(example):
    first, second = (number(example("averaging")[1], r"accuracy ([\d.]+)") for _ in range(2))
    assert first == second > 0.85


def test_top_k_is_that_of_the_sums_and_is_taken_up(example):
    for _ in range(2):
        found = re.search(r"top 3: (.*), in the clear (.*); one", example("top_k")[1])
        assert found and found[1] == found[2]


def test_trees_answer_on_rows_with_missing_numbers(example):
    _, text = example("trees")
    assert text.startswith("100 of 100 answers are the plain model's")


def test_public_queries_are_answered_within_budgets_and_taken_up(example, tmp_path):
    texts = [example("public_queries")[1] for _ in range(2)]
    assert texts[0] == texts[1] and number(texts[0], r"after 30 labels ([\d.]+)") > 0.6
    for file in (files := sorted((tmp_path / "public-queries-run").glob("budget-V*.json"))):
        with BudgetFile(file) as book:
            assert 19 < book.budget.spent <= 20  # once for both
    assert len(files) == 15


def test_five_hospitals_train_on_shares(example):
    found, text = example("hospitals")
    for way in ("horizontal", "vertical"):
        assert abs(found[way] - found["in the clear"]) < 0.01
    assert "whether a value left its range (guard)" in text and "protects nothing" in text


@pytest.mark.sectorch_long
def test_a_hospital_fine_tunes_a_vendors_model(example):
    found, text = example("finetuning")
    assert found["adapted"] > found["before"] + 0.2 and found["adapted with noise"] > found["before"] + 0.2
    assert "protects nothing" in text


def test_two_hospitals_and_a_registry(example):
    found, text = example("registry")
    assert "young and worse: withheld withheld" in text and "protects nothing" in text
    assert found["worse by hospital"].sum() == 330  # those of 350 patients whom the registry knows
    for name in ("trees", "logistic regression", "vendor"):
        assert 0.7 < found[f"{name}: auroc"] < 0.85
        assert found[f"{name}: auroc by sex"].shape == (2,) and found[f"{name}: gaps"].shape == (2, 2)


def test_secure_sum(example):
    _, text = example("secure_sum")
    assert "secure_sum/masked_H3, 32 bytes" in text and "io.receive('H1'" in text and "the collector's sum" in text


def test_new_protocol(example):
    _, text = example("new_protocol")
    secure, clear = (number(text, pattern) for pattern in (r"distance: ([\d.]+)", r"in the clear ([\d.]+)"))
    assert abs(secure - clear) < 1e-4
    assert "refused: " in text and "squared_distances" in text


def test_integrity(example):
    """The result of both layers is compared with the plain one's in it."""
    figures, text = example("integrity", 6, 4, 1)
    assert figures["checked online bytes"] < 2 * figures["plain online bytes"] and "with checks" in text


def test_shared_image(example, tmp_path):
    _, text = example("shared_image", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 100_000
    # 196,608 independent pixels: a correlation of uniform noise has a standard deviation of 0.0023.
    for party in ("A's share", "S's share"):
        assert abs(number(text, rf"{party} +correlation with the mixup ([+-][\d.]+)")) < 0.015
    assert number(text, r"reconstruction +correlation with the mixup ([+-][\d.]+)") > 0.999


def test_privhfl(example):
    means, text = example("privhfl", 100)
    assert means["asked"] > means["alone"] + 0.02 and means["asked"] > means["control"] + 0.02
    assert "no summand" in text and "this is a simulation" in text


def test_capc(example):
    found, text = example("capc")
    # Labels of ten classes that are right by chance are a tenth.
    assert found["queries"] == 40 and found["epsilon"] <= 20 and found["right"] > 0.6
    assert found["after"] > found["before"] and "no vote" in text


def test_capride(example):
    found, text = example("capride", 6)
    assert found["apart"] < 1e-2, "the encrypted round is the one in the clear, but for CKKS's error"
    assert found["learned"] > found["alone"] + 0.02 and found["learned"] > found["before"]
    assert "all of them aggregates" in text


def test_perturbed(example):
    found, text = example("perturbed")
    assert found["gap"] < 1e-6 and found["perturbed"] == found["plain"] > 0.85
    assert found["moved"] > 0.2 and "less is hidden than the paper says" in text


def test_shapley(example):
    found, text = example("shapley")
    assert found["error"] < 1e-2
    assert found["careless"] < min(found[name] for name in ("north", "east", "south")) - 0.05
    assert "saw no model and no record" in text


def test_attacks(example, tmp_path):
    """Each works against the paper's letter and fails against the default."""
    found, text = example("attacks", tmp_path)
    signs = found["signs_from_paper_mode"]
    assert signs["signs"] == 1 and signs["weights"] == 1 and signs["other messages"] == 0
    logits = found["logits_from_released_numbers"]
    assert logits["free"] < 1e-4 and logits["metered"] > 0.5
    ratios = found["ratios_in_perturbed_weights"]
    # The mean of 16 cosines of random directions in 64 dimensions is 0.10, with a standard deviation of 0.02.
    assert ratios["perturbed"] > 1 - 1e-9 and ratios["masked"] < 0.25
    for plot in ("signs", "logits", "ratios"):
        assert (tmp_path / f"attack_{plot}.png").read_bytes().startswith(b"\x89PNG")
    assert "the meter: P1 could explain" in text


def test_attacks_is_a_notebook_of_cells():
    text = (EXAMPLES / "attacks.py").read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n") and text.count("\n# %%\n") == 5


@pytest.mark.sectorch_long
def test_three_processes():
    """A server, an answering and a querying process over TLS; tests/network/test_network_processes.py has such too."""
    done = run_command(
        [sys.executable, "examples/three_hosts/run.py", "--rows", "8", "--batch", "8"],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same labels as plain: 8 of 8" in done.stdout
    assert number(done.stdout, r"largest error ([\d.e-]+)") < 1e-3
    there, here = (number(done.stdout, pattern) for pattern in (r"s, (\d+) bytes; all", r"here: (\d+) bytes"))
    assert there == here


def test_chat(example):
    pytest.importorskip("transformers")
    same, text = example("chat", 20, 2, PROMPT=8)
    assert same == 1.0
    assert "100% of the letters" in text


def test_graph(example):
    found, text = example("graph")
    assert found["accuracy"] > 0.9
    assert max(found["public error"], found["secret error"]) < 1e-3
    assert found["public MB"] < found["secret MB"]
    assert "secret" in text
