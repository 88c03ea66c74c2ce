"""`sectorch shapley`, data and training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sectorch.data.partition import dirichlet
from sectorch.errors import DataError, DatasetMissingError
from sectorch.federated import FederationError
from sectorch.protocols.secsv import build, federation
from sectorch.protocols.secsv.experiment import COMMAND, for_model
from sectorch.protocols.secsv.program import MODELS

SMALL = ["--rounds", "1", "--samples", "100", "--tests", "30", "--clients", "4"]


def test_a_run_writes_table_plot_and_json(tmp_path, capsys):
    assert COMMAND.main([*SMALL, "--out", str(tmp_path), "--skip", "--protocol", "secsv"]) == 0
    shown = capsys.readouterr().out
    assert "error against plain" in shown and "SampleSkip left out" in shown
    (learned,) = [line for line in shown.splitlines() if "A client received" in line]
    for what in (
        "a layer's outputs (secsv_",
        "which is the next global model (shapley_open_sum)",
        "coalition is tested",
    ):
        assert what in learned
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["error"] <= 1e-2 and found["wrongly_skipped"] == 0 and found["routing"] == "multi-layer"
    (only,) = found["rounds"]
    assert sum(found["values"].values()) == pytest.approx(only["coalitions"][-1]["utility"] - only["nobody"])
    assert (tmp_path / "values.png").stat().st_size > 1000
    assert COMMAND.main([*SMALL, "--out", str(tmp_path), "--skip", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["values"] == found["values"] and again["products"] == found["products"], "nothing was tested again"


def test_errors_are_one_line(tmp_path, capsys):
    assert COMMAND.main([*SMALL, "--out", str(tmp_path), "--model", "cnn", "--clients", "2"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "need 3 clients" in err
    assert COMMAND.main([*SMALL, "--out", str(tmp_path), "--data", "bank", "--data-root", str(tmp_path)]) == 1
    assert "bank is not on disk" in capsys.readouterr().err
    assert COMMAND.main([*SMALL, "--out", str(tmp_path), "--leave", "c9:1-1"]) == 1
    assert "clients are c1" in capsys.readouterr().err


def test_another_run_in_the_folder_is_refused(tmp_path, capsys):
    run = [*SMALL, "--out", str(tmp_path), "--protocol", "plain", "--no-plots"]
    assert COMMAND.main(run) == 0
    assert COMMAND.main([*run, "--rounds", "2"]) == 1
    assert "holds another run, which differs in rounds (1 there, 2 now)" in capsys.readouterr().err


@pytest.mark.parametrize("width, shown", [(60, False), (80, False), (200, True)])
def test_the_table_has_each_round_where_all_of_it_fits(width, shown, tmp_path, capsys, monkeypatch):
    """No cell is cut: the help's first example has ten rounds, which 80 columns do not hold."""
    monkeypatch.setenv("COLUMNS", str(width))
    assert COMMAND.main([*SMALL, "--rounds", "10", "--out", str(tmp_path), "--protocol", "plain", "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and "client" in out and "value" in out
    assert ("round 10" in out) == shown != ("of each round are in results.json" in " ".join(out.split()))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_the_bundled_digits(model):
    found = for_model(federation("digits", 3, tests=20), model)
    net = build(model, found.shape, found.classes, hidden=7)
    assert net(found.test["c1"][0]).shape == (len(found.test["c1"][1]), 10)


def test_the_papers_shapes():
    shapes = lambda net: [tuple(p.shape) for n, p in net.named_parameters() if "weight" in n]
    assert shapes(build("logistic", (48,), 2)) == [(2, 48)]
    assert shapes(build("logistic", (300,), 4)) == [(4, 300)]
    assert shapes(build("cnn", (1, 28, 28), 10)) == [(4, 1, 7, 7), (64, 256), (10, 64)]
    assert shapes(build("rnn", (640,), 2)) == [(96, 64), (96, 32), (2, 32)]
    assert len(shapes(build("dnn", (48,), 2, hidden=7))) == 8
    with pytest.raises(FederationError, match="0 to 7"):
        build("dnn", (48,), 2, hidden=8)


def test_labels_are_divided_by_dirichlet_and_nobody_is_left_without():
    assert torch.allclose(dirichlet(10, 5, 0.5, 0).sum(1), torch.ones(10).double())
    found = federation("digits", 6, alpha=0.05, seed=3)
    assert all(len(y) >= 1 for _, y in found.test.values()) and all(len(y) >= 2 for _, y in found.train.values())
    assert sum(len(y) for part in (found.train, found.test) for _, y in part.values()) == 1797
    bank = federation("breast-cancer", 5)
    assert bank.shape == (48,) and bank.classes == 2


def test_tables_from_a_folder(tmp_path):
    (tmp_path / "agnews").mkdir()
    for part in ("train", "test"):
        np.savez(tmp_path / "agnews" / f"{part}.npz", x=np.ones((40, 300)), y=np.arange(40) % 4)
    found = federation("agnews", 4, root=tmp_path)
    assert found.shape == (300,) and found.classes == 4
    np.savez(tmp_path / "agnews" / "test.npz", x=np.ones((40, 3)), y=np.arange(40))
    with pytest.raises(DataError, match=r"x must be \[n, 300\]"):
        federation("agnews", 4, root=tmp_path)
    for name in ("mirna", "mnist"):
        with pytest.raises(DatasetMissingError, match="is not on disk"):
            federation(name, 4, root=tmp_path)
    with pytest.raises(DataError, match="there is no data set"):
        federation("x", 4)
