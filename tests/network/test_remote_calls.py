"""A model at another party, called as the plain one is: several inputs, containers, errors before anything is sent."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from network_world import Trio
from torch import nn

import sectorch
from sectorch import Inputs
from sectorch.errors import ArgumentError, DtypeError, ShapeError
from sectorch.network.commands.array_files import batches, by_name, join_batches, read_arrays, write_arrays
from sectorch.serving.description import describe


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids, mask, weights=None, loud=False):
        x = self.layer(self.table(ids) * mask[..., None])
        return {"tags": x, "parts": (x[:, 0], [x.shape[1]])} if weights is None else x * weights


def given(rows: int) -> dict:
    return {"ids": torch.randint(0, 9, (rows, 5)), "mask": torch.arange(5)[None].expand(rows, -1) < 3}


@pytest.fixture(scope="module")
def tagger(pki, tmp_path_factory):
    torch.manual_seed(0)
    model = Tagger().eval().requires_grad_(False)
    public = sectorch.public(torch.tensor([1.0, 0.0, 2.0]))
    first, other = Inputs(**given(2)), Inputs(**given(2), weights=public)
    trio = Trio(pki[1], nn.Linear(2, 2).eval(), torch.zeros(2, 2), tmp_path_factory.mktemp("tagger"))
    trio.party.close()
    trio.start_answering(described=describe(model, [first, other]))
    yield trio, model, public
    trio.close()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_call_by_name_gives_what_one_process_gives(tagger, rows):
    trio, model, public = tagger
    remote, secure = trio.connection.model("hospital-b"), sectorch.secure(model, session=sectorch.Session())
    x, two = given(rows), given(2)
    got, expected = remote(**x), secure(**x)
    assert torch.equal(got["tags"], expected["tags"]) and torch.equal(got["parts"][0], expected["parts"][0])
    assert got["parts"][1] == [5] and isinstance(got["parts"], tuple)
    assert torch.equal(remote(**two, weights=public), secure(**two, weights=public)), "for its own rows only"
    remote.prepare(Inputs(**x))
    assert remote.prepared() == {(("ids", (rows, 5)), ("mask", (rows, 5))): 1}
    with sectorch.profile() as spent:
        assert torch.equal(remote(**x)["tags"], expected["tags"])
    assert spent.offline_bytes == 0 and remote.prepared() == {}


def test_what_the_model_does_not_take_is_refused_before_anything_is_sent(tagger):
    trio, _, _ = tagger
    remote, x = trio.connection.model("hospital-b"), given(2)
    other = sectorch.public(torch.ones(3))
    with sectorch.profile() as spent:
        for kind, said, call in [
            (ArgumentError, "missing argument 'mask'", {"ids": x["ids"]}),
            (ArgumentError, "unexpected argument 'labels'", {**x, "labels": x["ids"]}),
            (ArgumentError, "is public in this model", {**x, "weights": other}),
            (ArgumentError, "was marked public", {**x, "mask": sectorch.public(x["mask"])}),
            (ArgumentError, "'loud'", {**x, "loud": True}),
            (DtypeError, "expected a torch tensor", {**x, "mask": [[True]]}),
            (DtypeError, "use x.to", {**x, "ids": x["ids"].float()}),
            (ShapeError, "rows, 5", {**x, "ids": x["ids"][:, :4]}),
            (ShapeError, "one number of rows", {**x, "ids": x["ids"][:1]}),
        ]:
            with pytest.raises(kind, match=said) as raised:
                remote(**call)
            assert "\n" not in str(raised.value) and "save_model" in str(raised.value)
    assert spent.bytes == 0


def test_arrays_by_name_from_files(tagger, tmp_path):
    trio, model, _ = tagger
    remote, x = trio.connection.model("hospital-b"), given(3)
    np.savez(tmp_path / "x.npz", **{name: value.numpy() for name, value in x.items()})
    pieces = batches(remote.served, read_arrays(tmp_path / "x.npz"), 2)
    assert [piece.rows for piece in pieces] == [2, 1]
    result = join_batches([remote.ask(remote.check(piece)) for piece in pieces], [2, 1])
    expected = sectorch.secure(model, session=sectorch.Session())(**x)
    for name in ("y.npz", "y.safetensors"):
        write_arrays(result, tmp_path / name)
        written = read_arrays(tmp_path / name)
        assert written.keys() == by_name(result).keys() == {"tags", "parts.0"}
        assert torch.equal(written["tags"], expected["tags"])
    with pytest.raises(ArgumentError, match="as --out"):
        write_arrays(result, tmp_path / "y.npy")
    write_arrays(x["ids"], tmp_path / "ids")  # no suffix: the file is of that name and no other
    assert (np.load(tmp_path / "ids") == x["ids"].numpy()).all() and not (tmp_path / "ids.npy").exists()
    with pytest.raises(ArgumentError, match="got inputs named ids"):
        batches(remote.served, {"ids": x["ids"]}, 2)
    said: list[str] = []
    wider = {"ids": x["ids"].to(torch.int32), "mask": x["mask"]}
    assert batches(remote.served, wider, 2, said.append)[0].dtypes == pieces[0].dtypes and not said
    with pytest.raises(DtypeError, match=r"'ids' holds float32 and the model takes int64: .* x.astype\('int64'\)"):
        batches(remote.served, {**wider, "ids": x["ids"].float()}, 2)
    assert json.dumps(sorted(written)) == '["parts.0", "tags"]'


def test_no_array_of_a_result_is_lost_in_a_file(tmp_path):
    x, narrow = torch.randn(3, 2), torch.randn(3, 2).bfloat16()
    for name in ("y.npz", "y.safetensors"):
        for result in ({"a": {"b": x}, "a.b": x + 1}, {"": x, "result": x + 1}, (x, [narrow])):
            write_arrays(result, tmp_path / name)
            written = [value.float() for value in read_arrays(tmp_path / name).values()]
            assert len(written) == 2 and not torch.equal(*written)
    write_arrays(narrow, tmp_path / "y.npy")
    assert torch.equal(read_arrays(tmp_path / "y.npy"), narrow.float())
