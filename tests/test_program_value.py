"""A program as a value: each party's generated code, alone with its keys and channels, gives the reference's bits."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import long
from torch import nn

import sectorch
from sectorch import Scheme, errors
from sectorch.choreography.net import Draw
from sectorch.choreography.program import trace
from sectorch.choreography.program.trace import Program, spell_constant
from sectorch.choreography.roles import Phase
from sectorch.choreography.streams import PairKey
from sectorch.nn.models import lenet, vgg7


def secret(p: str, q: str) -> bytes:
    return hashlib.sha256("".join(sorted((p, q))).encode()).digest()


class IO:
    """One party's side: its inputs, the keys of its pairs, and nothing else of the others than what they send."""

    def __init__(self, me: str, inputs: dict, queues: dict, call: int):
        self.me, self.inputs, self.queues, self.call, self.results = me, inputs, queues, call, []

    def input(self, name):
        return self.inputs[name]

    def draw(self, peer, name, number, shape, dtype):
        key = PairKey(secret(self.me, peer), bytes(16))
        count = torch.Size(shape).numel()
        return key.words(name, self.call, number, -(-count * dtype.itemsize // 8)).view(dtype)[:count].view(shape)

    def send(self, peer, label, value):
        self.queues[self.me, peer].put((label, value))

    def receive(self, peer, label, shape, dtype):
        came, value = self.queues[peer, self.me].get(timeout=60)
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


def weights(model: nn.Module, x: torch.Tensor) -> dict:
    """What A brings, by name: parameters, and what passes made of them, rounded as a model file holds them."""
    values = sectorch.secure(model).program(x.to("meta")).values
    return {f"weight '{name}'": value.detach().float().double() for name, value in values.items()}


def played(model: nn.Module, x: torch.Tensor, program: Program) -> dict[str, list]:
    """The three parties' generated code, each in a thread, with queues between them."""
    queues = defaultdict(queue.Queue)
    own = {"Q": {"x": x}, "A": weights(model, x), "S": {}}
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
    (result,) = (v for v in learned["Q"] if v.dtype != torch.bool)
    in_range = [v for v in learned["Q"] if v.dtype == torch.bool]
    assert bool(in_range) == (name != "smooth"), "where bounds prove every range there is no flag"
    assert all(bool(v.all()) for v in in_range), "no value left its range"
    assert torch.equal(result, sectorch.reference(model)(x))


def relayed(connection, queues: dict) -> None:
    """Pass on what S sends and asks for, until it is done."""
    while (said := connection.recv_bytes().decode()) != "done":
        peer, label = said.split(" ", 1)
        if peer.endswith("?"):
            came, value = queues[peer[:-1], "S"].get(timeout=60)
            assert came == label
            connection.send_bytes(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            queues["S", peer].put((label, connection.recv_bytes()))


class FromAlone(IO):
    """Reads what came as bytes."""

    def receive(self, peer, label, shape, dtype):
        came, value = self.queues[peer, self.me].get(timeout=60)
        assert came == label
        return torch.frombuffer(bytearray(value), dtype=dtype).view(shape)


@pytest.mark.parametrize(("net", "shape"), [(lenet, (1, 1, 28, 28)), *long((vgg7, (1, 3, 32, 32)))])
def test_S_runs_its_code_in_a_process_of_its_own_with_nothing_else_of_the_program(net, shape, monkeypatch):
    """S is given text and its two keys. Its code names no weight, no query and no stream of Q and A."""
    torch.manual_seed(0)
    model, x = net().eval(), torch.randn(shape)
    program = sectorch.program(model, x)
    code = program.party("S").code
    assert program.party("S").constants == {}, "it is all spelled"
    assert "io.input" not in code and "io.result" not in code and "weight" not in code.replace("mask_weight", "")
    drawn = set(re.findall(r"io\.draw\('(\w+)', '([\w/]+)'", code))
    between = {(m.label, m.protocol) for m in program.messages}
    assert {peer for peer, _ in drawn} == {"A", "Q"} and between
    of_QA = {
        n.step.name for n in program.nodes if isinstance(n.step, Draw) and {p.name for p in n.step.owners} == {"Q", "A"}
    }
    assert of_QA and not {name for _, name in drawn} & of_QA
    assert len(code) < 400_000 and all(f"'{m.protocol}/{m.label}'" in code for m in program.messages)

    monkeypatch.setattr(sys.modules[__name__], "IO", FromAlone)
    queues, token = defaultdict(queue.Queue), os.urandom(16)
    given = {"code": code, "keys": {peer: secret("S", peer).hex() for peer in "QA"}, "token": token.hex()}
    with Listener(("localhost", 0), authkey=token) as listener, ThreadPoolExecutor(3) as pool:
        alone = [sys.executable, str(Path(__file__).with_name("party_process.py")), str(listener.address[1])]
        process = subprocess.Popen(alone, stdin=subprocess.PIPE, text=True)
        try:
            process.stdin.write(json.dumps(given))
            process.stdin.close()
            with listener.accept() as connection:
                others = {
                    "Q": pool.submit(part, program, queues, {"x": x}, "Q"),
                    "A": pool.submit(part, program, queues, weights(model, x), "A"),
                }
                relayed(connection, queues)
                learned = {who: result.result() for who, result in others.items()}
            assert process.wait(60) == 0
        finally:
            process.kill()
    result = next(v for v in learned["Q"] if v.dtype == torch.float32)
    assert torch.equal(result, sectorch.reference(model)(x)) and learned["A"] == []


def test_two_programs_are_equal_if_everybody_does_the_same():
    """Weights and queries are names; shapes, the number format, the limit and public constants count."""
    x, models = torch.randn(3, 4), [nn.Sequential(nn.Linear(4, 5), nn.ReLU()).eval() for _ in range(2)]
    first, second = (sectorch.program(model, x + i) for i, model in enumerate(models))
    assert first == second and hash(first) == hash(second) and first.digest == second.digest
    others = [
        sectorch.program(models[0], torch.randn(2, 4)),
        sectorch.program(sectorch.secure(models[0], Scheme(frac_bits=16)), x),
        sectorch.program(sectorch.secure(models[0], Scheme(network="wan")), x),
        sectorch.program(sectorch.secure(models[0], Scheme(limit_bits=8)), x),
        sectorch.program(sectorch.secure(models[0], Scheme(range_check=False)), x),
        sectorch.program(nn.Sequential(models[0][0], nn.LeakyReLU(0.1)).eval(), x),
        sectorch.program(nn.Sequential(models[0][0], nn.LeakyReLU(0.2)).eval(), x),
    ]
    assert len({p.digest for p in (first, *others)}) == len(others) + 1


ELSEWHERE = """
import torch, sectorch
from torch import nn
layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.Linear(18, 8), nn.LayerNorm(8)
print(sectorch.program(nn.Sequential(*layers).eval(), torch.randn(2, 1, 5, 5)).digest)
"""


def test_a_digest_is_the_same_in_every_process(capsys):
    """In this one, and in one in which hashes, and so the orders of sets, are others."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    elsewhere = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE], env={**os.environ, "PYTHONHASHSEED": seed},
        stdout=subprocess.PIPE, text=True, timeout=300,
    )  # fmt: skip
    exec(ELSEWHERE, {})
    said = capsys.readouterr().out
    assert said == elsewhere.stdout and len(said.strip()) == 64


class Shifted(nn.Module):
    def __init__(self, shift: float):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.at = torch.arange(4) if shift else torch.tensor([1, 0, 2, 3])

    def forward(self, x):
        return self.linear(x)[:, self.at]


def test_public_constants_count():
    x = torch.randn(2, 4)
    assert sectorch.program(Shifted(0.0).eval(), x) != sectorch.program(Shifted(1.0).eval(), x)


def test_messages_and_cost_are_those_of_a_first_call():
    torch.manual_seed(1)
    model, x = lenet().eval(), torch.randn(1, 1, 28, 28)
    secured = sectorch.secure(model, session=sectorch.Session())
    with sectorch.profile() as profile:
        secured(x)
    program = sectorch.program(secured, x)
    said = lambda m: (m.path, m.label, m.src, m.dst, m.phase, m.round, m.shape, m.dtype, m.mask, m.shows)
    assert sorted(map(repr, map(said, program.messages))) == sorted(map(repr, map(said, profile.ledger)))
    for name, phase in zip(("setup", "offline", "online"), Phase, strict=True):
        assert program.cost[name]["bytes"] == sum(m.bytes for m in profile.ledger if m.phase == phase)
    assert program.cost["online"]["rounds"] == max(m.round for m in profile.ledger if m.phase == Phase.ONLINE)
    drawn = program.draw().splitlines()
    assert len(drawn) == 1 + len(profile.ledger) and all("bytes" in line for line in drawn[1:])


def test_what_has_no_program_says_so():
    x = torch.randn(2, 4)
    program = sectorch.program(nn.Linear(4, 2).eval(), x)
    with pytest.raises(errors.MisplacedValueError, match="'B' names 0 parties of this program; it has A, Q, S"):
        program.party("B")
    with pytest.raises(errors.DtypeError, match="takes a torch tensor, got list"):
        sectorch.program(nn.Linear(4, 2).eval(), [1.0])
    with pytest.raises(errors.ArgumentError, match="operation by operation"):
        sectorch.program(nn.Sequential(nn.Linear(4, 2), Noisy()).eval(), x)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn(2)


def test_a_check_is_never_left_out():
    """What nobody needs is left out of a program, but for what may end it."""
    program = sectorch.program(nn.Linear(4, 2).eval(), torch.randn(2, 4))
    assert "_check_sums_at_owner" in program.party("A").code
    model = nn.Linear(4, 2).eval()
    with torch.no_grad():
        model.weight[0] = 4000.0
    with pytest.raises(errors.FixedPointRangeError, match="sum to magnitude"):
        part(program, defaultdict(queue.Queue), {f"weight '{n}'": v.detach() for n, v in model.named_parameters()}, "A")


def lambdas(f):
    return type("Of", (nn.Module,), {"forward": lambda self, x: f(x)})().eval()


PUBLIC = {
    "cat": lambda c: lambda x: torch.cat([x, torch.full((1, 6), c)]),
    "stack": lambda c: lambda x: torch.stack([x, torch.full((3, 6), c)]),
    "maximum": lambda c: lambda x: torch.maximum(x, torch.arange(6.0) + c),
    "divide": lambda c: lambda x: (torch.arange(6.0) + c) / (x.abs() + 1),
    "empty": lambda c: lambda x: x[:0, :3] + torch.full((0, 3), c) if c else x[torch.zeros(0, 2, dtype=torch.int64)],
    "output": lambda c: lambda x: (x * 2, torch.tensor(c)),
    "names": lambda c: lambda x: {f"a{c}": x * 2},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_values_are_in_the_program(name: str):
    """They are spelled where they are used: nobody brings them, and programs with other ones are others."""
    x, (one, two) = torch.randn(3, 6), (lambdas(PUBLIC[name](c)) for c in (0.0, 1.0))
    first, second = sectorch.program(one, x), sectorch.program(two, x)
    assert first != second
    assert "io.input" not in first.party("S").code + first.party("A").code
    learned = played(two, x, second)["Q"]
    wanted = [y for y in torch.utils._pytree.tree_leaves(sectorch.reference(two)(x)) if name != "output" or y.dim()]
    assert all(torch.equal(y, w) for y, w in zip([y for y in learned if y.dtype == torch.float32], wanted, strict=True))


def test_a_layers_name_is_no_code():
    """Names come from whoever wrote the model: in a comment they stay in it, and lines and files are not told."""
    x, texts = torch.randn(2, 6), []
    for name in (
        "plain",
        "a\n    raise SystemExit  #",
        "b\r    raise SystemExit  #",
        "c\u2028    raise SystemExit",
        "\xb2",
    ):
        model = nn.Sequential()
        model.add_module(name, nn.Linear(6, 3))
        model.add_module("relu", nn.ReLU())
        program = sectorch.program(model.eval(), x)
        texts.append(program.party("S").code)
        assert torch.equal(played(model, x, program)["Q"][0], sectorch.reference(model)(x))
        assert ".py" not in texts[-1] and texts[-1].isascii()
    assert len({re.sub("# .*", "", text) for text in texts}) == 1


def test_Q_checks_its_input_in_the_program_as_well():
    model, x = nn.Linear(4, 1, bias=False).eval(), torch.full((1, 4), 4194303.5)
    with pytest.raises(errors.FixedPointRangeError, match="the input reaches"):
        part(sectorch.program(model, x), defaultdict(queue.Queue), {"x": x}, "Q")
    with pytest.raises(errors.NonFiniteError):
        part(sectorch.program(model, x), defaultdict(queue.Queue), {"x": x * float("nan")}, "Q")


def test_constants_are_spelled_in_full():
    big = [torch.zeros(5000), torch.zeros(5000)]
    big[1][2500] = 1.0
    pairs = [
        big, [nn.Parameter(v) for v in big], [{"a": v} for v in big], [slice(v, None) for v in big],
        [partial(torch.add, v) for v in big], [v.add for v in big], [lambda v, k=k: v + k for k in (1, 2)],
        [eval(f"lambda v, *, k={k}: v + k") for k in (1, 2)], [{"a"}, {"b"}],
    ]  # fmt: skip
    assert all(spell_constant(one) != spell_constant(other) for one, other in pairs)
    assert spell_constant(frozenset("abcdef")) == spell_constant(frozenset("fedcba"))


def test_a_program_does_not_depend_on_what_was_traced_before_it():
    """Weights that are derived, copied, folded and summed in several ways, in any order of shapes."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, x):
            x = self.norm(nn.functional.linear(x, self.first.weight * self.last.weight.sum(0), self.first.bias))
            bias = self.last.bias.clone()
            bias += self.first.bias[:2]
            return x @ self.last.weight.t() + (bias if len(x) > 2 else 2 * bias)

    model = Model().eval()
    shapes = [torch.empty(rows, 6, device="meta") for rows in (1, 3, 2)]
    digests = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2, 0, 1)):
        secured = sectorch.secure(model, session=sectorch.Session())
        digests.append({i: secured.choreography(shapes[i]).digest for i in order})
    assert digests[0] == digests[1] == digests[2] and len(set(digests[0].values())) == 3


@pytest.mark.parametrize(("made", "frozen", "spared"), [(200_000, 0, True), (10, 0, False), (200_000, 7, False)])
def test_a_program_is_old_at_once(made: int, frozen: int, spared: bool, monkeypatch: pytest.MonkeyPatch):
    """No collection passes over it, unless the application has frozen objects, which stay frozen."""
    asked: list[str] = []
    verbs = {name: (lambda name=name: asked.append(name)) for name in ("disable", "enable", "freeze", "unfreeze")}
    collector = SimpleNamespace(
        isenabled=lambda: True, get_count=lambda: (made, 0, 0), get_freeze_count=lambda: frozen, **verbs
    )
    monkeypatch.setattr(trace, "gc", collector)
    with trace.garbage_collection_paused(), trace.garbage_collection_paused():
        pass
    assert asked == ["disable", "disable", *(["freeze", "unfreeze"] if spared else []), "enable"]


def test_tensors_with_the_same_flags_have_them_once():
    """A program of a thousand range checks would else copy a thousand flags for each of its tensors."""
    x, y = (torch.nn.functional.silu(sectorch.share(torch.rand(3) * 8) * 90) for _ in range(2))
    both = x + y
    assert x.flags and y.flags and both.flags == (*x.flags, *y.flags)
    assert (both + 1).flags is both.flags and (both + both).flags is both.flags
