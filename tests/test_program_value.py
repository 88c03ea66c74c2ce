"""A program as a value: each party's generated code, alone with its keys and channels, gives the reference's bits."""

from __future__ import annotations

import hashlib
import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import sectorch
from sectorch.nn.models import lenet
from sectorch.randomness import PairKey
from sectorch.runtime.program import Program


class IO:
    """One party's side: its inputs, the keys of its pairs, and nothing else of the others than what they send."""

    def __init__(self, me: str, inputs: dict, queues: dict, call: int):
        self.me, self.inputs, self.queues, self.call, self.results = me, inputs, queues, call, []

    def input(self, name):
        return self.inputs[name]

    def draw(self, peer, name, number, shape, dtype):
        key = PairKey(hashlib.sha256("".join(sorted((self.me, peer))).encode()).digest(), bytes(16))
        count = torch.Size(shape).numel()
        return key.words(name, self.call, number, -(-count * dtype.itemsize // 8)).view(dtype)[:count].view(shape)

    def send(self, peer, label, value):
        self.queues[self.me, peer].put((label, value))

    def receive(self, peer, label, shape, dtype):
        came, value = self.queues[peer, self.me].get(timeout=120)
        assert (came, tuple(value.shape), value.dtype) == (label, shape, dtype)
        return value

    def result(self, value):
        self.results.append(value)


def part(program: Program, queues: dict, inputs: dict, me: str) -> list:
    """What one party learns that runs its generated code and nothing else."""
    code, ios = program.party(me).load(), [IO(me, inputs, queues, call) for call in (0, 1)]
    setup = code["setup"](ios[0])
    offline = code["offline"](ios[1], setup)
    code["online"](ios[1], setup, offline)
    return ios[1].results


def weights(model: nn.Module) -> dict:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {f"weight '{name}'": value.detach().double() for name, value in named.items()}


def played(model: nn.Module, x: torch.Tensor, program: Program, inputs: dict | None = None) -> dict[str, list]:
    """The three parties' generated code, each in a thread, with queues between them."""
    queues = defaultdict(queue.Queue)
    own = {"Q": {"x": x}, "A": weights(model) if inputs is None else inputs, "S": {}}
    with ThreadPoolExecutor(3) as pool:
        found = {who: pool.submit(part, program, queues, own[who], who) for who in own}
        return {who: result.result() for who, result in found.items()}


MODELS = {
    "mlp": lambda: (nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(4, 6)),
    "lenet": lambda: (lenet(), torch.randn(2, 1, 28, 28)),
    "smooth": lambda: (nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Softmax(-1)), torch.randn(3, 6)),
    "gated": lambda: (nn.Sequential(nn.Linear(6, 8), nn.GLU(), nn.SiLU(), nn.Linear(4, 2)), torch.randn(2, 6)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_parties_code_gives_the_reference(name: str):
    torch.manual_seed(3)
    model, x = MODELS[name]()
    model.eval()
    program = sectorch.program(model, x)
    learned = played(model, x, program)
    assert learned["A"] == learned["S"] == [], "only Q learns anything"
    *right, result = [v for v in learned["Q"] if v.dtype == torch.bool] + [
        v for v in learned["Q"] if v.dtype != torch.bool
    ]
    assert all(bool(v.all()) for v in right) and right, "no value left its range"
    assert torch.equal(result, sectorch.reference(model)(x))
