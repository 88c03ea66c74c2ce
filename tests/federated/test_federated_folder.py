"""What run folders have in common: who can read them, failures of the disk, and what is said of another run's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sectorch.errors import CheckpointError
from sectorch.federated.folder import RunFolder

KEY, OTHER = "0" * 32, "1" * 32


@pytest.mark.parametrize(
    "there, now, words",
    [
        ({"rounds": 5}, {"rounds": 4}, "rounds (5 there, 4 now)"),
        ({}, {"rounds": 4}, "rounds (null there, 4 now)"),
        ({"clients": dict.fromkeys("abcde", KEY)}, {"clients": dict.fromkeys("abcd", KEY)}, "clients (5 there, 4 now)"),
        ({"rounds": [KEY] * 5}, {"rounds": [KEY] * 4}, "rounds (5 there, 4 now)"),
        ({"clients": {"a": KEY, "b": KEY}}, {"clients": {"a": KEY, "b": OTHER}}, "clients.b (other content)"),
        ({"local": {"epochs": 3, "x": KEY}}, {"local": {"epochs": 4, "x": KEY}}, "local.epochs (3 there, 4 now)"),
        ({"text": "a" * 50}, {"text": "b"}, 'text (other content there, "b" now)'),
        ({"x": [1, 2]}, {"x": [1, 3]}, "x ([1, 2] there, [1, 3] now)"),
        (
            dict(a=1, b=1, c=1, d=1),
            dict(a=2, b=2, c=2, d=2),
            "a (1 there, 2 now), b (1 there, 2 now), c (1 there, 2 now)",
        ),
    ],
)
def test_what_differs_is_said_in_short(tmp_path, there, now, words):
    folder = RunFolder(tmp_path)
    folder.claim(there)
    with pytest.raises(CheckpointError) as refused:
        folder.claim(now)
    assert str(refused.value) == (
        f"{tmp_path} holds another run, which differs in {words}; name another folder or remove that one"
    )
    folder.claim(there)


def test_a_run_folder_is_its_owners_alone(tmp_path):
    """Found by attack: models and inputs were readable by every account of the machine."""
    folder = RunFolder(tmp_path / "run")
    folder.claim({"run": "example"})
    folder.keep("part", [torch.ones(2)], {"stage": "part"})
    folder.append("lines", {"a": 1})
    folder.append("lines", {"a": 2})
    assert {path.stat().st_mode & 0o777 for path in folder.path.iterdir()} == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700 and len(folder.lines("lines")) == 2


def test_a_record_goes_before_what_it_says_is_there(tmp_path, monkeypatch):
    """Killed in the middle of `drop`: a record without its tensors would count as finished."""
    folder, real = RunFolder(tmp_path), Path.unlink
    for name in ("a", "b"):
        folder.keep(name, [torch.ones(2)], {"stage": name})
    gone = []

    def unlink(path: Path) -> None:
        if gone:
            raise OSError(5, "Input/output error")
        gone.append(path.name)
        real(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(CheckpointError, match=r"a.pt cannot be removed \(Input/output error\)"):
        folder.drop("a.*")
    assert gone == ["a.json"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CheckpointError, match=r"taken/part\.pt cannot be written"):
        folder.keep("taken/part", [torch.ones(2)])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
