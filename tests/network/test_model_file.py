"""Model files: what is saved is read back the same, and no file runs code or takes more memory than its size."""

from __future__ import annotations

import json
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cases import long
from commands import run_command
from hypothesis import given
from hypothesis import strategies as st
from network_world import in_one_process
from safetensors.torch import save_file
from torch import nn

import sectorch
from sectorch import Inputs
from sectorch.cli.main import run
from sectorch.errors import ArgumentError, ProgramError, TrainingModeError
from sectorch.network import save_model
from sectorch.nn.models import ZOO
from sectorch.serving.description import MAX_JSON, describe, to_json
from sectorch.serving.model_file import KEY, MAX_HEADER, read_model, write_model

MODEL = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval().requires_grad_(False)
PARTY = ["--name", "b", "--cert", "none.pem", "--key", "none.pem", "--ca", "none.pem"]


@pytest.fixture(scope="module")
def described() -> tuple[dict, dict]:
    return describe(MODEL, torch.randn(2, 3))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_model(MODEL, torch.randn(2, 3), path)
    return path.read_bytes()


def one_line(text: str) -> bool:
    return text.startswith("error: ") and text.count("\n") == 1


@pytest.mark.parametrize("name", ["lenet", *long("resnet8")])
def test_what_is_saved_is_read_back(name, tmp_path):
    construct, shape = ZOO[name]
    model, x = construct().eval().requires_grad_(False), torch.randn(2, *shape)
    save_model(model, x, tmp_path / "m.safetensors")
    description, weights = read_model(tmp_path / "m.safetensors")
    expected, own = describe(model, x)
    assert description == json.loads(to_json(expected))
    assert weights.keys() == own.keys() and all(torch.equal(weights[n], own[n]) for n in own)
    assert (in_one_process((description, weights), Inputs(x)) - model(x)).abs().max() < 1e-4


def test_shared_weights_and_float64_are_kept_to_the_bit(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(3, 3, bias=False, dtype=torch.float64)
            self.two = nn.Linear(3, 3, bias=False, dtype=torch.float64)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    model, x = Tied().eval().requires_grad_(False), torch.randn(2, 3, dtype=torch.float64)
    save_model(model, x, tmp_path / "m.safetensors")
    description, weights = read_model(tmp_path / "m.safetensors")
    assert all(torch.equal(w, model.one.weight) for w in weights.values())
    expected = sectorch.secure(model, session=sectorch.Session())(x)
    assert torch.equal(in_one_process((description, weights), Inputs(x)), expected)


def test_the_file_is_its_owners_and_there_whole_or_not_at_all(described, tmp_path):
    path, (description, weights) = tmp_path / "m.safetensors", described
    write_model(description, weights, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [path]
    before = path.read_bytes()
    with pytest.raises(ProgramError):
        write_model(description, {n: w[:1] for n, w in weights.items()}, path)
    with pytest.raises(ArgumentError, match="cannot write"):
        write_model(description, weights, tmp_path / "none" / "m.safetensors")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_is_read_does_not_change_with_the_file(saved, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(saved)
    _, weights = read_model(path)
    kept = {name: value.clone() for name, value in weights.items()}
    with path.open("r+b") as file:
        file.truncate(0)
    assert all(torch.equal(weights[n], kept[n]) for n in kept)


@pytest.mark.parametrize("length", [0x280, 0x4B50])
def test_a_header_whose_length_looks_like_a_pickle_or_a_zip_is_read(described, saved, length, tmp_path):
    """safetensors begins with the header's length: 0x80 begins a pickle, PK a zip."""
    header = int.from_bytes(saved[:8], "little")
    padded = saved[8 : 8 + header].rstrip() + b" " * max(0, length - len(saved[8 : 8 + header].rstrip()))
    while len(padded) % 256 != length % 256 or (length == 0x4B50 and len(padded) != length):
        padded += b" "
    (tmp_path / "m.safetensors").write_bytes(len(padded).to_bytes(8, "little") + padded + saved[8 + header :])
    assert read_model(tmp_path / "m.safetensors")[1].keys() == described[1].keys()


# A .pt2 is not read.


def exported(path: Path) -> None:
    torch.export.save(torch.export.export(MODEL, (torch.randn(2, 3),)), path)


def poisoned(path: Path, marker: Path) -> None:
    """A .pt2 whose pickled sample inputs make a file where they are unpickled."""

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    clean = path.with_name("clean.pt2")
    exported(clean)
    torch.save(Bomb(), path.with_suffix(".pkl"))
    with zipfile.ZipFile(clean) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, path.with_suffix(".pkl").read_bytes() if "sample_inputs" in name else data)


@pytest.mark.parametrize("name", ["model.pt2", "model.safetensors"])
def test_answer_does_not_unpickle(name, tmp_path, capsys):
    """Whatever it is called: the bomb is one (`torch.export.load` sets it off), and `answer` says how to convert."""
    marker, path = tmp_path / "marker", tmp_path / name
    poisoned(path, marker)
    capsys.readouterr()
    assert run(["answer", str(path), *PARTY]) == 1
    shown = capsys.readouterr().err
    assert one_line(shown) and f"sectorch convert {path}" in shown and "--trust" in shown
    assert run(["convert", str(path), str(tmp_path / "new.bin")]) == 1
    shown = capsys.readouterr().err
    assert one_line(shown) and "add --trust" in shown
    assert not marker.exists()
    run(["convert", str(path), str(tmp_path / "new.bin"), "--trust"])
    assert marker.exists()


def test_a_converted_file_answers_the_same(tmp_path, capsys):
    torch.manual_seed(0)
    model, x = ZOO["lenet"][0]().eval().requires_grad_(False), torch.randn(2, *ZOO["lenet"][1])
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "m.pt2")
    assert run(["convert", str(tmp_path / "m.pt2"), str(tmp_path / "m.safetensors"), "--trust", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bytes"] == (tmp_path / "m.safetensors").stat().st_size
    description, weights = read_model(tmp_path / "m.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float32}
    expected = sectorch.secure(model, session=sectorch.Session())(x)
    assert torch.equal(in_one_process((description, weights), Inputs(x)), expected)


def test_a_pt2_of_several_inputs_is_converted(tmp_path, capsys):
    class Two(nn.Module):
        def forward(self, x, y):
            return {"sum": x + y, "kept": x[:, 1:]}

    given = (torch.randn(2, 3), torch.randn(2, 3))
    torch.export.save(torch.export.export(Two(), given), tmp_path / "m.pt2")
    assert run(["convert", str(tmp_path / "m.pt2"), str(tmp_path / "m.safetensors"), "--trust"]) == 0
    got = in_one_process(read_model(tmp_path / "m.safetensors"), Inputs(*given))
    assert (got["sum"] - sum(given)).abs().max() < 1e-5 and (got["kept"] - given[0][:, 1:]).abs().max() < 1e-5


def test_a_function_of_ones_own_becomes_a_model_file(tmp_path, monkeypatch, capsys):
    """It is called with --trust only, and what it does not give is said in a line."""
    (tmp_path / "own_models.py").write_text(
        "import torch\n"
        "def lenet():\n"
        "    from sectorch.nn.models import ZOO\n"
        "    torch.manual_seed(0)\n"
        "    return ZOO['lenet'][0]().eval(), torch.zeros(1, *ZOO['lenet'][1])\n"
        "def alone():\n"
        "    return torch.nn.Linear(2, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "own_models:lenet", "m.safetensors"]) == 1
    assert "add --trust" in capsys.readouterr().err and "own_models" not in sys.modules
    for name, said in (("own_models:none", "no attribute 'none'"), ("own_models:alone", "expected (model, example"),
                       ("no_such_module:f", "No module named 'no_such_module'")):  # fmt: skip
        assert run(["convert", name, "m.safetensors", "--trust"]) == 1
        shown = capsys.readouterr().err
        assert one_line(shown) and said in shown
    assert run(["convert", "own_models:lenet", "m.safetensors", "--trust", "--json"]) == 0
    torch.manual_seed(0)
    model, x = ZOO["lenet"][0]().eval().requires_grad_(False), torch.randn(2, *ZOO["lenet"][1])
    expected = sectorch.secure(model, session=sectorch.Session())(x)
    assert torch.equal(in_one_process(read_model(tmp_path / "m.safetensors"), Inputs(x)), expected)


def test_what_torch_exported_is_saved_as_it_is(tmp_path):
    """The program, and its module, which has no evaluation mode and is not changed."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).eval().requires_grad_(False),
        torch.ones(2, 4),
    )
    program = torch.export.export(model, (x,))
    module = program.module()
    before = str(module.graph)
    for made in (program, module):
        save_model(made, x, tmp_path / "m.safetensors")
        got = in_one_process(read_model(tmp_path / "m.safetensors"), Inputs(x))
        assert (got - model(x)).abs().max() < 1e-4
    assert str(module.graph) == before
    trained = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (x,))
    with pytest.raises(TrainingModeError):
        save_model(trained.module(), x, tmp_path / "m.safetensors")
    for made in (program, module):
        assert (sectorch.secure(made, session=sectorch.Session())(x) - model(x)).abs().max() < 1e-4
        assert (sectorch.reference(made)(x) - model(x)).abs().max() < 1e-4


def test_convert_writes_over_no_source(tmp_path, capsys):
    exported(tmp_path / "m.pt2")
    before = (tmp_path / "m.pt2").read_bytes()
    assert run(["convert", str(tmp_path / "m.pt2"), str(tmp_path / "m.pt2"), "--trust"]) == 1
    assert one_line(capsys.readouterr().err) and (tmp_path / "m.pt2").read_bytes() == before


MEASURED = """
import resource, sys
from sectorch.errors import SectorchError
from sectorch.serving.model_file import read_model
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_model(sys.argv[1])
except SectorchError as error:
    print(type(error).__name__, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def measured(path: Path) -> tuple[str, int]:
    """What reading a file raises in a process of its own, and MiB that it took."""
    done = run_command([sys.executable, "-c", MEASURED, str(path)], timeout=120)
    assert done.returncode == 0, done.stderr
    kind, grown = done.stdout.split()
    return kind, int(grown)


def claiming(header: dict, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def large(shape: list[int], offsets: list[int], dtype: str = "F32") -> bytes:
    weight = {"name": "w", "shape": shape, "dtype": "torch.float32", "statistic": False}
    call = {"tuple": [{"tuple": [{"input": 0}]}, {"dict": []}]}
    inputs = [{"name": "x", "shape": [2, 3], "dtype": "torch.float32", "held": None}]
    program = {"inputs": inputs, "call": call, "learned": None, "rows": 1, "nodes": [], "result": {"input": 0}}
    description = {
        "version": 2, "dtype": "torch.float32", "weights": [weight], "constants": [], "programs": [program],
        "texts": None,
    }  # fmt: skip
    metadata = {KEY: json.dumps(description)}
    return claiming({"__metadata__": metadata, "w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


@pytest.mark.parametrize("kind", ["zip", "header", "weights", "text"])
def test_a_small_file_takes_little_memory(kind, tmp_path):
    """A packed .pt2, a header that claims gigabytes, weights that do, and a description that does."""
    path = tmp_path / "m.safetensors"
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file, file.open("weights", "w", force_zip64=True) as w:
            for _ in range(512):
                w.write(bytes(1 << 20))
    elif kind == "header":
        path.write_bytes((1 << 33).to_bytes(8, "little") + b"{}")
    elif kind == "weights":
        path.write_bytes(large([1 << 16, 1 << 16], [0, 1 << 34]))
    else:
        path.write_bytes(claiming({"__metadata__": {KEY: "[{}," * (MAX_JSON // 4 - 1)}}))
    error, grown = measured(path)
    assert error == ("ArgumentError" if kind == "zip" else "ProgramError") and grown < 300


# What the header says has to be so.


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"__metadata__": {KEY: "{}"}},
        {"__metadata__": {KEY: "[]"}},
        {"__metadata__": {"other": "x"}},
        {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    ],
)
def test_a_file_without_a_description_is_refused(header, tmp_path):
    (tmp_path / "m").write_bytes(claiming(header, bytes(4)))
    with pytest.raises(ProgramError):
        read_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("shape", "offsets", "dtype", "data"),
    [
        ([2, 2], [0, 16], "F32", 12), ([2, 2], [0, 12], "F32", 12), ([2, 2], [4, 20], "F32", 20),
        ([2, 2], [16, 0], "F32", 16), ([2, 2], [0, 16], "I32", 16), ([2, 2], [0, 8], "F16", 8),
        ([1 << 33, 1], [0, 1 << 35], "F32", 0), ([1 << 62, 1 << 62], [0, 0], "F32", 0), ([2, 2], [0, 16], "F32", 17),
    ],
)  # fmt: skip
def test_weights_that_are_not_where_they_should_be_are_refused(shape, offsets, dtype, data, tmp_path):
    (tmp_path / "m").write_bytes(large(shape, offsets, dtype) + bytes(data))
    with pytest.raises(ProgramError):
        read_model(tmp_path / "m")


def test_weights_that_overlap_are_refused(tmp_path):
    (tmp_path / "m").write_bytes(large([2, 2], [0, 16]) + bytes(16))
    assert read_model(tmp_path / "m")[1]["w"].shape == (2, 2)
    header = {"__metadata__": {KEY: "{}"}}
    header |= {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in "ab"}
    (tmp_path / "m").write_bytes(claiming(header, bytes(16)))
    with pytest.raises(ProgramError):
        read_model(tmp_path / "m")


@pytest.mark.parametrize("change", ["more", "fewer", "shape", "dtype"])
def test_weights_and_description_have_to_agree(described, change, tmp_path):
    weights = {name: value.clone() for name, value in described[1].items()}
    name = next(iter(weights))
    if change == "more":
        weights["extra"] = torch.zeros(2)
    elif change == "fewer":
        del weights[name]
    else:
        weights[name] = weights[name].T.contiguous() if change == "shape" else weights[name].double()
    save_file(weights, tmp_path / "m", {KEY: to_json(described[0]).decode()})
    with pytest.raises(ProgramError, match=name if change != "more" else "extra"):
        read_model(tmp_path / "m")


def test_a_header_that_is_too_long_is_not_read(tmp_path):
    with (tmp_path / "m").open("wb") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(ProgramError, match="header of at most"):
        read_model(tmp_path / "m")


@given(st.data())
def test_mutated_files_are_refused_or_read(saved, tmp_path_factory, data):
    """Cut, changed anywhere, or longer: a typed error, or a model whose every weight has its shape."""
    changed = bytearray(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 40) | st.integers(0, len(changed) - 1))
        kind = data.draw(st.sampled_from(("byte", "cut", "insert")))
        if kind == "byte":
            changed[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del changed[at : at + data.draw(st.integers(1, 9))]
        else:
            changed[at:at] = data.draw(st.binary(max_size=9))
        changed = changed or bytearray(1)
    path = tmp_path_factory.getbasetemp() / "mutated"
    path.write_bytes(changed)
    try:
        description, weights = read_model(path)
    except (ProgramError, ArgumentError):
        return
    for entry in description["weights"]:
        assert list(weights[entry["name"]].shape) == entry["shape"]


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(ArgumentError, match="cannot load"):
            read_model(path)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ProgramError):
        read_model(tmp_path / "empty")
