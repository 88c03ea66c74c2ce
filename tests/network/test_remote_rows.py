"""Forwards that look at the number of rows: a description gives each number what the module gives it, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import some
from network_world import Trio
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.cli.main import run
from sectorch.errors import SectorchError
from sectorch.network import Pins
from sectorch.network.commands.array_files import read_arrays, write_arrays
from sectorch.nn.module import SecureModule
from sectorch.serving.description import describe, from_json, load_program, match_call, to_json
from sectorch.tensor import Scheme


class Rows(nn.Module):
    def __init__(self, after: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.layer, self.after = nn.Linear(4, 4), after

    def forward(self, x):
        return self.after(self.layer(x))


def _every_second(x):
    while len(x) > 1:
        x = torch.cat((x[: len(x) // 2] + x[-(len(x) // 2) :], x[len(x) // 2 : -(len(x) // 2)]))
    return x


FORWARDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "each": lambda x: x.relu(),
    "mean": lambda x: x - x.mean(0),
    "its sum": lambda x: x.sum(),
    "transposed": lambda x: x.T,
    "sorted": lambda x: x.sort(0).values,
    "products": lambda x: x @ x.T,
    "the first": lambda x: x[:1],
    "the first ten": lambda x: x[:10],
    "the last": lambda x: x[len(x) - 1],
    "half": lambda x: x[: len(x) // 2],
    "turned": lambda x: x.roll(1, 0),
    "over the number": lambda x: x / len(x),
    "many": lambda x: x * 2 if len(x) > 16 else x,
    "very many": lambda x: x * 2 if len(x) > 500 else x,
    "odd": lambda x: x * 2 if len(x) % 2 else x,
    "of four": lambda x: x * 2 if len(x) % 4 == 0 else x,
    "of seven": lambda x: x * 2 if len(x) % 7 == 0 else x,
    "numbered": lambda x: x + torch.arange(len(x))[:, None],
    "in threes": lambda x: x * (torch.arange(len(x))[:, None] % 3),
    "in hundreds": lambda x: x * (torch.arange(len(x))[:, None] // 100),
    "rising": lambda x: x * torch.linspace(0, 1, len(x))[:, None],
    "below": lambda x: torch.ones(len(x), len(x)).tril() @ x,
    "groups": lambda x: torch.stack([part.sum(0) for part in x.split(8)]),
    "chunks": lambda x: x.chunk(3)[0],
    "pairs": lambda x: x.reshape(2, -1) if len(x) % 2 == 0 else x,
    "chosen": lambda x: x[[4, 0]] if len(x) > 4 else x[[0, 0]],
    "folded": _every_second,
    "beside": lambda x: {"x": x, "mean": x.mean(0), "rows": len(x), "more": (x + 1, [x > 0])},
}
NUMBERS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 28, 33, 64, 101, 210, 501, 1000]
FEW_NUMBERS = [1, 3, 4, 17, 101]


@pytest.mark.parametrize("name", some(FORWARDS, ["each", "half", "in threes", "groups", "many", "beside"]))
@pytest.mark.parametrize("shown", some([1, 2, 5, 32], [2]))
def test_every_number_of_rows_gives_what_the_module_gives(name, shown, request):
    torch.manual_seed(0)
    module = Rows(FORWARDS[name]).eval().requires_grad_(False)
    description, weights = describe(module, torch.zeros(shown, 4))
    session = sectorch.Session(reference=True)
    served = load_program(from_json(to_json(description)), weights)
    secure = SecureModule(served, session, session.answering[0], Scheme(), None)
    answered = 0
    for rows in NUMBERS if request.config.getoption("--sectorch-long") else FEW_NUMBERS:
        x = torch.randn(rows, 4)
        try:
            found, shape = pytree.tree_flatten(secure(match_call(served, (x,), {})))
        except SectorchError:
            assert rows != shown
            continue
        answered += 1
        expected, wanted = pytree.tree_flatten(module(x))
        assert shape == wanted, (rows, shape)
        for a, b in zip(found, expected, strict=True):
            if isinstance(b, torch.Tensor):
                assert a.shape == b.shape and a.dtype == b.dtype, (rows, a.shape, b.shape)
                assert torch.allclose(a.double(), b.double(), rtol=1e-3, atol=2e-3), rows
            else:
                assert a == b
    assert answered > 3 or name not in ("each", "mean", "the first", "sorted", "turned")


def test_a_file_is_cut_into_queries_only_where_rows_are_independent(pki, tmp_path, capsys):
    torch.manual_seed(0)
    folder, made = pki
    module = Rows(FORWARDS["mean"]).eval().requires_grad_(False)
    trio, x = Trio(made, module, torch.zeros(2, 4), tmp_path), torch.randn(40, 4)
    write_arrays(x, tmp_path / "x.npy")
    own = [f"--{n}={folder / f}" for n, f in (("cert", "alice.pem"), ("key", "alice-key.pem"), ("ca", "ca.pem"))]
    own += [f"--server={trio.address}", f"--store={tmp_path / 'store'}", f"--pins={Pins().path}"]
    ask = ["query", "hospital-b", str(tmp_path / "x.npy"), f"--out={tmp_path / 'y.npy'}", *own]
    try:
        assert run(ask) == 1 and "rows of this model may depend on each other" in capsys.readouterr().err
        assert not (tmp_path / "y.npy").exists()
        assert run([*ask, "--batch=25"]) == 0
        expected = torch.cat([module(part) for part in x.split(25)])
        found = read_arrays(tmp_path / "y.npy")
        assert isinstance(found, torch.Tensor) and (found - expected).abs().max() < 1e-4
    finally:
        trio.close()
