"""States of training that are kept sealed, a half at each party, and taken up again to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sectorch
from sectorch import Checkpoints, Session
from sectorch.errors import ArgumentError, CheckpointError, RangeExceededError

NAMES = ("model", "optimiser", "schedule")


def training(folder: Path, steps: int, reference: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Steps of Adam with a schedule on a net with batch statistics, from the newest state on; where it began."""
    session = Session(reference=reference)
    torch.manual_seed(0)
    model = sectorch.shared(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), session=session
    )
    x, y = torch.rand(8, 3), torch.rand(8, 1)
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.5)
    parts: tuple[Any, ...] = (model, optimiser, schedule)
    checkpoints, begun = Checkpoints(folder, session=session), 0
    if (found := checkpoints.newest()) is not None:
        begun = found.step
        for name, part in zip(NAMES, parts, strict=True):
            part.load_state_dict(found.state[name])
        assert found.state["note"] == ["a", (1, None, True), float("inf")]
    rows = sectorch.share(x, owner="S", session=session)
    for step in range(begun, steps):
        optimiser.zero_grad()
        F.mse_loss(model(rows), y).backward()
        optimiser.step(), schedule.step()
        states = {name: part.state_dict() for name, part in zip(NAMES, parts, strict=True)}
        checkpoints.save(step + 1, {**states, "note": ["a", (1, None, True), float("inf")]})
    state = model.state_dict()
    return {k: v.reveal() if isinstance(v, sectorch.DifferentiableTensor) else v for k, v in state.items()}, begun


@pytest.mark.parametrize("reference", [True, False])
def test_what_is_taken_up_again_has_the_bits_of_what_went_on(tmp_path, reference):
    steps = 3 if reference else 2
    whole, _ = training(tmp_path / "whole", steps, reference)
    training(tmp_path / "parts", 1, reference)
    found, begun = training(tmp_path / "parts", steps, reference)
    assert begun == 1 and found.keys() == whole.keys()
    assert all(torch.equal(found[key], whole[key]) for key in whole)
    kept = sorted(path.name for path in (tmp_path / "parts").glob("*/*.state"))
    assert kept == sorted(f"{step:012d}.state" for step in (steps - 1, steps) for _ in "QAS")


def test_a_flag_is_kept_with_what_depends_on_it(tmp_path):
    session = Session(reference=True)
    p = sectorch.DifferentiableTensor(sectorch.share(torch.ones(3), session=session), requires_grad=True)
    (p * 30).sum().backward()
    torch.optim.SGD([p], 3.0).step()
    Checkpoints(tmp_path, session=session).save(0, {"p": p.detach()})
    later = Checkpoints(tmp_path, session=Session(reference=True)).newest()
    assert later is not None
    with pytest.raises(RangeExceededError):
        later.state["p"].reveal()


def saved(folder: Path, *steps: int) -> None:
    session = Session()
    x = sectorch.share(torch.arange(6).view(2, 3) / 4, session=session)
    checkpoints = Checkpoints(folder, session=session)
    checkpoints.newest()
    for step in steps:
        checkpoints.save(step, {"x": x + step, "public": torch.arange(step)})


def newest(folder: Path) -> int | None:
    found = Checkpoints(folder, session=Session()).newest()
    if found is None:
        return None
    assert torch.equal(found.state["x"].reveal(), torch.arange(6).view(2, 3) / 4 + found.step)
    assert torch.equal(found.state["public"], torch.arange(found.step))
    return found.step


def test_parties_go_on_from_the_newest_state_that_all_have(tmp_path):
    """One that was killed has one state less, one that is not whole, or the state of another training."""
    assert newest(tmp_path / "none") is None
    saved(tmp_path / "one", 1)
    (tmp_path / "one" / "A" / f"{1:012d}.state").unlink()
    assert newest(tmp_path / "one") is None, "killed in the first save: it begins anew"
    folder = tmp_path / "two"
    saved(folder, 1, 2, 5)
    assert newest(folder) == 5
    latest = folder / "S" / f"{5:012d}.state"
    content = bytearray(latest.read_bytes())
    content[-1] ^= 1
    latest.write_bytes(content)
    assert newest(folder) == 2
    latest.unlink()
    assert newest(folder) == 2
    saved(folder, 5)
    assert newest(folder) == 5
    saved(tmp_path / "other", 1, 2, 5)
    shutil.rmtree(folder / "A")
    shutil.copytree(tmp_path / "other" / "A", folder / "A")
    with pytest.raises(CheckpointError, match="look for the folder that is missing"):
        newest(folder)
    shutil.rmtree(folder / "A")
    with pytest.raises(CheckpointError, match="look for the folder that is missing"):
        newest(folder)


def test_a_file_tells_nothing_without_its_key_and_is_nobody_elses(tmp_path):
    saved(tmp_path, 1, 2)
    whole = {path: path.read_bytes() for path in tmp_path.glob("*/*.state")}
    assert all(b"scale_bits" not in content and b"public" not in content for content in whole.values())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("*/*"))
    places = [tmp_path / name / f"{2:012d}.state" for name in "AS"]
    for path, other in zip(places, places[::-1], strict=True):  # under its own name, and yet the other's
        path.write_bytes(whole[other])
    assert newest(tmp_path) == 1


def test_what_is_no_state_is_refused_and_nothing_is_written(tmp_path):
    session, other = Session(reference=True), Session(reference=True)
    x = sectorch.share(torch.ones(2), session=session)
    checkpoints = Checkpoints(tmp_path, session=session)
    for wrong, said in (
        ({"x": object()}, "got a object"), ({"x": {1.5: x}}, "whole numbers as keys"), ({"x": {1, 2}}, "got a set"),
        ({"x": sectorch.share(torch.ones(2), session=other)}, "another session"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=said):
            checkpoints.save(1, wrong)
    for step in (-1, 1.0, True):
        with pytest.raises(ArgumentError, match="a step is a whole number"):
            checkpoints.save(step, {"x": x})
    assert not list(tmp_path.glob("*/*.state"))
    checkpoints.save(1, {"x": x})
    with pytest.raises(ArgumentError, match=r"above that of the last save \(1\)"):
        checkpoints.save(1, {"x": x})
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot keep a state"):
        Checkpoints(tmp_path / "file", session=session)
    assert "Checkpoints(A, Q, S)" in repr(checkpoints)
