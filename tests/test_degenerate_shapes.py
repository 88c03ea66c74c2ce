"""Tensors of no dimensions, without entries, and reductions over no dimensions: torch's result, or a typed refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import some
from op_rows.base import Data, OpRow
from op_stage import reference_stage, reveal_leaf
from op_table import ROWS
from test_ops import TORCH_SAYS
from torch import nn
from torch.utils import _pytree as pytree

import sectorch
from sectorch.errors import ArgumentError, SectorchError
from sectorch.tensor.table import TABLE

pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}:UserWarning") for text in TORCH_SAYS]

NO_NUMBER = "is not a number|is infinite|mean of no elements"
"""What no secret tensor holds."""
LEFT_OUT = {
    "unbind": "one of its forms gives an iterator",
    "multi_margin_loss": "torch gives what stood in memory",
    "pixel_unshuffle": "torch's own shapes without entries are not those that it documents",
    "interpolate": "torch refuses shapes without entries in a recording",
    "multi_head_attention": "queries and no keys",
    "lstm": "torch ends the process",
    "gru": "torch ends the process",
    "rnn_tanh": "torch ends the process",
    "rnn_relu": "torch ends the process",
}
"""Rows of which the calls without entries are not compared, and why."""
KEPT = ("softmax", "norm", "cross_entropy", "scatter_reduce", "cosine_similarity", "topk", "matmul", "prod", "einsum")
"""Rows that every run tries."""


def is_data(leaf: Any) -> bool:
    return isinstance(leaf, Data)


def of(tree: Any, change: Any) -> Any:
    return pytree.tree_map(lambda leaf: change(leaf) if is_data(leaf) else leaf, tree, is_leaf=is_data)


def compare(row: OpRow, key: Any, args: tuple, kwargs: dict) -> bool:
    """Whether torch takes the call; then the secret result is torch's, or is refused where it is no number."""
    try:
        wanted = key(*of(args, lambda d: d.make(row.name, True)), **of(kwargs, lambda d: d.make(row.name, True)))
    except Exception:
        return False
    leaves = [leaf for leaf in pytree.tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
    place = lambda d: reference_stage().place(d.role, d.make(row.name, True))
    try:
        found = key(*of(args, place), **of(kwargs, place))
    except SectorchError as error:
        assert not all(bool(leaf.isfinite().all()) for leaf in leaves), f"{row.name} {args} {kwargs}: {error}"
        return True
    for x, y in zip(map(reveal_leaf, pytree.tree_leaves(found)), leaves, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), f"{row.name} {args}"
        wide = torch.complex128 if y.is_complex() else torch.float64
        assert torch.allclose(x.to(wide), y.to(wide), atol=1e-2, rtol=1e-2), f"{row.name} {args}: {x}, {y}"
    return True


def real_rows() -> list[str]:
    kinds = lambda row: {
        d.kind for s in row.samples for d in pytree.tree_leaves((s.args, dict(s.kwargs))) if is_data(d)
    }
    return [name for name, row in ROWS.items() if "complex" not in kinds(row) and not row.plain and name != "setitem"]


@pytest.mark.parametrize("name", some(real_rows(), KEPT))
def test_operations_on_tensors_without_entries(name: str):
    if name in LEFT_OUT:
        return
    row = ROWS[name]
    for sample in row.samples:
        args, kwargs = sample.args, dict(sample.kwargs)
        for size in {n for d in pytree.tree_leaves((args, kwargs)) if is_data(d) for n in d.shape}:
            cut = lambda d, n=size: dataclasses.replace(d, shape=tuple(0 if k == n else k for k in d.shape))
            compare(row, (sample.keys or TABLE[name].keys or TABLE[name].in_place)[0], of(args, cut), of(kwargs, cut))


NUMBERS = {
    "softmax": lambda x: x.softmax(0), "log_softmax": lambda x: x.log_softmax(-1), "softmin": lambda x: F.softmin(x, 0),
    "logsumexp": lambda x: x.logsumexp(0), "max": lambda x: x.max(0), "min": lambda x: x.min(-1, keepdim=True),
    "argmax": lambda x: x.argmax(0), "argmin": lambda x: x.argmin(-1), "topk": lambda x: x.topk(1),
    "sort": lambda x: x.sort(), "argsort": lambda x: x.argsort(), "stable sort": lambda x: x.sort(stable=True),
    "norm": lambda x: x.norm(dim=-1), "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=0, keepdim=True),
    "std": lambda x: x.std(-1, correction=0), "var_mean": lambda x: torch.var_mean(x, -1, correction=0),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x, -1), "normalize": lambda x: F.normalize(x, dim=0),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x + 1), "gather": lambda x: x.gather(-1, torch.tensor(0)),
    "kl_div": lambda x: F.kl_div(x, x + 1, reduction="batchmean"), "cumsum": lambda x: x.cumsum(0),
    "triplet": lambda x: F.triplet_margin_loss(x, x + 1, x - 1), "masked_fill": lambda x: x.masked_fill(x_is, 0.5),
}  # fmt: skip
x_is = torch.tensor(True)


class Of(nn.Module):
    """A forward of a function."""

    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def agree(run: Any, *given: torch.Tensor) -> None:
    wanted = [leaf for leaf in pytree.tree_leaves(run(*given)) if isinstance(leaf, torch.Tensor)]
    found = pytree.tree_leaves(run(*map(reference_stage().share, given)))
    for x, y in zip(map(reveal_leaf, found), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert torch.allclose(x.double(), y.double(), atol=1e-4)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_for_a_line_of_one(name: str):
    agree(NUMBERS[name], torch.tensor(3.25))


def test_writes_into_a_number():
    def write(x: torch.Tensor) -> torch.Tensor:
        y, made = x * 1, torch.zeros(())
        y.copy_(x * 2)
        y[()] = y + 1
        y[...] = y * 2
        made.copy_(y)
        return made.fill_(made + x)

    model = Of(write).eval()
    assert torch.allclose(sectorch.secure(model)(torch.tensor(1.5)), torch.tensor(9.5), atol=1e-4)


@pytest.mark.parametrize("dim", [[], (), [1, 0]])
def test_reductions_over_no_dimensions(dim: Any):
    """Over all of them, as torch has it, but for `any` and `all`, which then look at each entry."""
    x = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.0, -0.25]])
    for run in (
        lambda x: x.sum(dim), lambda x: x.mean(dim), lambda x: x.amax(dim), lambda x: x.amin(dim, keepdim=True),
        lambda x: torch.linalg.vector_norm(x, dim=dim), lambda x: x.norm(dim=dim), lambda x: x.std(dim),
        lambda x: torch.linalg.vector_norm(x, 1, dim=dim), lambda x: x.any(dim), lambda x: (x > 0).all(dim),
        lambda x: (x > 0).logsumexp((0, 1)), lambda x: torch.count_nonzero(x, dim),
    ):  # fmt: skip
        agree(run, x)


def test_reductions_of_nothing():
    for run, shape in (
        (lambda x: x.softmax(0), (0,)), (lambda x: x.log_softmax(-1), (2, 0)), (lambda x: x.prod(), (0,)),
        (lambda x: x.norm(), (2, 0)), (lambda x: F.normalize(x, dim=-1), (4, 0)),
        (lambda x: F.layer_norm(x, (0,)), (4, 0)), (lambda x: F.cosine_similarity(x, x, -1), (4, 0)),
        (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 1, 0, 4)), (lambda x: x @ x.mT, (3, 0)),
        (lambda x: F.cross_entropy(x, torch.zeros(0).long(), reduction="sum"), (0, 3)),
        (lambda x: torch.linalg.det(x), (2, 0, 0)), (lambda x: torch.cdist(x, x), (3, 0)),
    ):  # fmt: skip
        agree(run, torch.zeros(shape))
    for run in (lambda x: x.logsumexp(0), lambda x: x.mean(), lambda x: F.kl_div(x, x, reduction="batchmean")):
        with pytest.raises(ArgumentError, match=NO_NUMBER):
            run(sectorch.share(torch.zeros(0)))


class Rows(nn.Module):
    def forward(self, x):
        return [2 * row for row in x]


def test_the_rows_of_an_empty_batch():
    assert sectorch.secure(Rows().eval())(torch.zeros(0, 4)) == []
