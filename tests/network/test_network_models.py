"""Which models an answering party can answer with, beside those that went through the graph passes."""

from __future__ import annotations

import pytest
import torch
from network_world import Trio
from torch import nn

import sectorch
from sectorch.nn import graph_cache
from sectorch.nn.module import module_of
from sectorch.serving.description import describe


class Indexed(nn.Module):
    """A public buffer of whole numbers beside the weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("order", torch.tensor([1, 0, 3, 2]))

    def forward(self, x):
        return self.linear(x)[:, self.order]


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), Indexed()], ids=["BatchNorm", "index"]
)
def test_a_model_that_torch_exported(pki, model, tmp_path):
    """Buffers of whole numbers are public constants."""
    model, x = model.eval().requires_grad_(False), torch.randn(3, 6)
    exported = module_of(torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim.AUTO},)))
    trio = Trio(pki[1], model, x, tmp_path)
    try:
        trio.party.close()
        trio.start_answering(described=describe(exported, x[:2]))
        assert (trio.connection.model("hospital-b")(x) - model(x)).abs().max() < 1e-4
    finally:
        trio.close()


def test_many_shapes_fill_no_memory(pki, small_model, tmp_path, monkeypatch):
    """Each new batch size is worked out anew, and the oldest is forgotten; the results stay right."""
    monkeypatch.setattr(graph_cache, "KEPT_SHAPES", 4)
    x = torch.randn(8, 1, 8, 8)
    trio = Trio(pki[1], small_model, x, tmp_path)
    try:
        remote, ideal = trio.connection.model("hospital-b"), sectorch.reference(small_model)
        for rows in [*range(1, len(x) + 1), 1, len(x)]:
            assert torch.equal(remote(x[:rows]), ideal(x[:rows]))
        (opened,) = remote._sessions.values()
        (module,) = opened.party._modules
        assert len(module._checked) == 4
    finally:
        trio.close()


def test_a_result_may_be_used_in_training(pki, small_model, tmp_path):
    """Of the first call, of a later one, and of one that was prepared."""
    x = torch.randn(2, 1, 8, 8)
    trio = Trio(pki[1], small_model, x, tmp_path)
    try:
        remote = trio.connection.model("hospital-b")
        results = [remote(x), remote(x)]
        remote.prepare(2)
        for y in [*results, remote(x)]:
            weight = torch.ones(4, requires_grad=True)
            (y * weight).sum().backward()
            assert torch.equal(weight.grad, y.sum(0)) and not y.is_inference()
    finally:
        trio.close()
