"""What a power cut may not undo: contents reach the disk before a rename, and the folder's names after it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sectorch import files
from sectorch.choreography.program.projection import Material
from sectorch.federated import RunFolder
from sectorch.network import Pins, Store
from sectorch.network.identity.identity import fingerprint
from sectorch.network.store import MaterialBinding

PRINT = fingerprint(bytes(32))


@pytest.fixture
def disk(monkeypatch):
    """What is done to the disk from here on: ("fsync", path), ("replace", from, to), ("unlink", path)."""
    done = []
    fsync, replace, unlink, link = os.fsync, os.replace, os.unlink, os.link

    def synchronised(handle):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def replaced(source, target):
        done.append(("replace", str(source), str(target)))
        replace(source, target)

    def linked(source, target):
        done.append(("replace", str(source), str(target)))
        link(source, target)

    def unlinked(path, **options):
        done.append(("unlink", str(path)))
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", synchronised)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "rename", replaced)
    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "unlink", unlinked)
    yield done


def settled(done: list, path: Path) -> bool:
    """Whether the file came to its place by a rename of synchronised content, and the folder was synchronised then."""
    (at,) = [i for i, step in enumerate(done) if step[0] == "replace" and step[2] == str(path)]
    return ("fsync", done[at][1]) in done[:at] and ("fsync", str(path.parent)) in done[at:]


def material(call: int = 0) -> Material:
    return Material(call, bytes(16), "a digest", 1, [torch.arange(8)])


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("pins", lambda path: Pins(path).pin("alice", PRINT)),
        ("run.json", lambda path: RunFolder(path.parent).keep("run", record={"a": 1})),
        ("run.pt", lambda path: RunFolder(path.parent).keep("run", torch.zeros(2))),
        ("any", lambda path: files.write(path, b"x")),
    ],
)
def test_contents_are_on_disk_before_a_rename_and_names_after_it(tmp_path, disk, name, save):
    save(tmp_path / name)
    assert settled(disk, tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} <= {name, "pins.lock"}


def test_prepared_material_is_on_disk_before_it_counts_as_kept(tmp_path, disk):
    """Piece, binding and the store's key; and the folder's own name in the store."""
    store = Store(tmp_path / "store")
    shelf = store.shelf(bytes(16), MaterialBinding(client="alice"))
    shelf.put(material(), (2, 3))
    piece = next(shelf.folder.glob("*.piece"))
    for path in (tmp_path / "store" / "store.key", shelf.folder / "binding.sealed", piece):
        assert settled(disk, path), path
    assert ("fsync", str(store.folder)) in disk[disk.index(("fsync", str(shelf.folder))) :]
    store.close()


def test_a_piece_is_gone_from_the_disk_before_it_is_used(tmp_path, disk):
    store = Store(tmp_path / "store")
    shelf = store.shelf(bytes(16), MaterialBinding(client="alice"))
    shelf.put(material(), (2, 3))
    del disk[:]
    shelf.take(0, (2, 3))
    (gone,) = [i for i, step in enumerate(disk) if step[0] == "unlink"]
    assert ("fsync", str(tmp_path / "store.used")) in disk[gone:]
    store.close()


def test_material_that_ends_with_its_process_does_not_wait_for_the_disk(disk):
    store = Store()
    store.shelf(bytes(16), MaterialBinding(client="alice")).put(material(), (2, 3))
    store.close()
    assert not [step for step in disk if step[0] == "fsync"]


def test_a_secret_is_readable_by_its_user_only_from_the_first_byte_on(tmp_path):
    """Also where a left-over of an interrupted write is open to all."""
    (tmp_path / "key.part").write_bytes(b"left over")
    (tmp_path / "key.part").chmod(0o666)
    files.write(tmp_path / "key", b"secret", 0o600)
    assert (tmp_path / "key").read_bytes() == b"secret" and (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


def test_a_link_in_the_way_is_not_written_through(tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / "key.part").symlink_to(tmp_path / "other")
    with pytest.raises(OSError):
        files.write(tmp_path / "key", b"secret", 0o600)
    assert (tmp_path / "other").read_text() == "kept"
