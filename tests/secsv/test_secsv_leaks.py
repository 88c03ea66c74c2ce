"""What each party of SecSV and HESV holds and receives, from recorded runs; and attacks that must fail."""

from __future__ import annotations

import gc
import math
import types
from collections.abc import Iterator

import pytest
import torch

from sectorch import ckks
from sectorch.errors import UndeclaredMessageError
from sectorch.protocols.secsv import hesv as hesv_module
from sectorch.protocols.secsv.channel import CLIENT, MESSAGES, PRINCIPAL, Address, Channel
from sectorch.protocols.secsv.clock import Clock
from sectorch.protocols.secsv.hesv import HESVTester
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.reducing import Reducing
from sectorch.protocols.secsv.routing import Route
from sectorch.protocols.secsv.secsv import SecSVTester
from sectorch.protocols.secsv.testing import TestSet

WEIGHTS = {0: 3, 1: 5, 2: 1, 3: 2, 4: 4}


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))


def federation(each: int = 12, value: float | None = None):
    """Five clients with a network 6 -> 20 -> 3."""
    draw = torch.Generator().manual_seed(5)
    models = {i: network(i).state_dict() for i in range(5)}
    x = tuple(torch.rand(each, 6, generator=draw) if value is None else torch.full((each, 6), value) for _ in range(5))
    labels = tuple(torch.randint(0, 3, (each,), generator=draw) for _ in range(5))
    return Program(network(0), (6,)), TestSet(x, labels), models


@pytest.fixture(scope="module")
def recorded(keys, form):
    program, tests, models = federation()
    tester = SecSVTester(program, tests, Channel(record=True), keys, form, "single-layer")
    tester.begin(models, WEIGHTS)
    for coalition in (0b00001, 0b11111):
        tester.correct(coalition, tests.all)
    return tester, models


@pytest.fixture(scope="module")
def recorded_hesv():
    program, tests, models = federation(each=3)
    tester = HESVTester(program, tests, Channel(record=True), hesv_module.joint_keys(program), "single-layer")
    tester.begin(models, WEIGHTS)
    tester.hits(0b00001)
    tester.hits(0b11111)
    return tester, models


def reachable(start: object) -> Iterator[object]:
    """Everything that an object holds, directly or not; not what code holds."""
    seen, left = set(), [start]
    while left:
        one = left.pop()
        code = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
        if id(one) in seen or isinstance(one, code):
            continue
        seen.add(id(one))
        yield one
        left.extend(gc.get_referents(one))
        if hasattr(one, "__dict__"):
            left.extend(vars(one).values())


def tensors(value: object) -> Iterator[torch.Tensor]:
    return (v for v in reachable(value) if isinstance(v, torch.Tensor))


def test_no_server_reaches_a_secret_key_a_client_or_the_other_server(recorded, recorded_hesv):
    tester, _ = recorded
    for server, other in ((tester.P, tester.H), (tester.H, tester.P), (recorded_hesv[0].S, object())):
        held = list(reachable(server))
        assert len(held) > 100, "the walk goes into the server's material"
        assert not [v for v in held if isinstance(v, ckks.SecretKey | ckks.Keys) or v is other]
        assert not [v for v in held if type(v).__name__ == "Client"]


def test_no_party_reaches_the_plain_material_of_another(recorded, recorded_hesv):
    for tester, models in (recorded, recorded_hesv):
        secrets = {i: {v.data_ptr() for v in (tester.tests.x[i], tester.tests.labels[i])} for i in range(5)}
        secrets = {i: found | {v.data_ptr() for v in models[i].values()} for i, found in secrets.items()}
        servers = (tester.P, tester.H) if hasattr(tester, "P") else (tester.S,)
        for who, party in [*((None, s) for s in servers), *enumerate(tester.clients)]:
            held = {v.data_ptr() for v in tensors(party) if not isinstance(v, ckks.CKKSTensor)}
            assert who is None or held & secrets[who], "the walk finds a client's own samples"
            for other, found in secrets.items():
                assert other == who or not held & found


def test_the_messages_are_the_declared_ones(recorded, recorded_hesv):
    tester, _ = recorded
    assert {label for i in range(5) for _, label, _ in tester.channel.view(f"client {i}")} == {"layer output"}
    at_P = {label for _, label, _ in tester.channel.view("principal")}
    assert at_P == {
        "model", "test share", "partial output", "feature share", "product material", "masked state", "correct share",
    }  # fmt: skip
    assert {label for _, label, _ in tester.channel.view("auxiliary")} == at_P - {"partial output"}
    shown = {label for label in at_P if MESSAGES[label].shows}
    assert shown == {"correct share"}
    tester, _ = recorded_hesv
    received = {label for i in range(5) for _, label, _ in tester.channel.view(f"client {i}")}
    assert received == {"layer output", "matches"}
    assert {label for _, label, _ in tester.channel.view("principal")} == {
        "model", "test data", "features", "prediction", "count",
    }  # fmt: skip


def test_an_undeclared_message_is_refused():
    channel = Channel()
    with pytest.raises(UndeclaredMessageError):
        channel.send(Address("principal", PRINCIPAL), Address("client 0", CLIENT), "model", torch.zeros(1))
    with pytest.raises(UndeclaredMessageError):
        channel.send(Address("client 0", CLIENT), Address("client 1", CLIENT), "layer output", torch.zeros(1))


@pytest.mark.parametrize("value", [0.0, 1.0, None])
def test_what_a_server_receives_is_uniform_whatever_the_inputs(keys, form, field, value):
    """Shares, masked values and ciphertexts: the mean of residues / q within eight standard deviations of a half."""
    program, tests, models = federation(value=value)
    tester = SecSVTester(program, tests, Channel(record=True), keys, form, "single-layer")
    tester.begin(models, WEIGHTS)
    tester.correct(0b00111, tests.all)
    found: dict[tuple, list] = {}
    for name in ("principal", "auxiliary"):
        for _, label, message in tester.channel.view(name):
            if label == "correct share":
                continue
            ciphertext = label in ("model", "partial output")
            for v in tensors(message):
                if v.dim() >= 2:
                    primes = v.unbind(-2) if ciphertext else v.unbind(0)
                    assert len(primes) in (1, len(field.primes))  # labels are shared modulo the first prime
                    for q, words in zip(field.primes, primes, strict=False):
                        assert int(words.min()) >= 0 and int(words.max()) < q
                        found.setdefault((name, label, q), []).append(words.flatten().double() / q)
    assert {label for _, label, _ in found} >= {"test share", "feature share", "product material", "masked state"}
    for (name, label, _), words in found.items():
        words = torch.cat(words)
        assert len(words) >= 100
        for moment, mean, deviation in ((words, 0.5, 12**-0.5), (words**2, 1 / 3, math.sqrt(4 / 45))):
            assert abs(float(moment.mean()) - mean) < 8 * deviation / math.sqrt(len(words)), (name, label)


def test_no_server_can_add_up_features_outputs_or_labels(recorded, field):
    """Sums and differences of any two same-shaped tensors that a server holds or received: none is a true value."""
    tester, _ = recorded
    truths = [field.encode(x.t()) for x in tester.tests.x]
    truths += [field.first.reduce(torch.nn.functional.one_hot(y, 3).t()) for y in tester.tests.labels]
    both = {}
    for server in (tester.P, tester.H):
        held = [server._samples[i] for i in range(5)]
        both[server] = [v for _, label, m in tester.channel.view(server.address.name) if label != "model"
                        for v in tensors(m)] + [v for pair in held for v in pair]  # fmt: skip
        for truth in truths:
            same = [v for v in both[server] if v.shape == truth.shape]
            assert same
            for a in same:
                assert not torch.equal(a, truth)
                for b in same:
                    ring = field if len(truth) > 1 else field.first
                    assert not torch.equal(ring.add(a, b), truth) and not torch.equal(ring.subtract(a, b), truth)
    first, second = (tester.P._samples[0][0], tester.H._samples[0][0])
    assert torch.equal(field.add(first, second), truths[0]), "both servers together could: they must not collude"


def test_no_client_holds_both_input_and_output_of_a_layer(recorded, recorded_hesv):
    """What each client decrypts of a batch, with what it knows already, leaves every layer's matrix unknown to it."""
    for tester, _ in (recorded, recorded_hesv):
        outputs = [(r, label) for _, r, label, _ in tester.channel.log if label == "layer output"]
        place = 0
        for coalition in (0b00001, 0b11111):
            for route in tester.routes(coalition):
                route.check("single-layer", 0 if coalition == 1 else None)
                knows = {f"client {i}": {0} for i in route.owners}  # inputs of layer 0
                for k in range(len(tester.program.layers)):
                    receiver = outputs[place][0]
                    place += 1
                    assert k not in knows.get(receiver, set()), f"{receiver} holds input and output of layer {k}"
                    knows.setdefault(receiver, set()).add(k + 1)  # it computed the next layer's input
        assert place == len(outputs)


class _Careless(SecSVTester):
    """Routes everything to client 1, against the rules."""

    def routes(self, coalition):
        return [Route((0, 1, 2, 3, 4), (1, 1))]


def steal(tester, client: int, x: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """A client's equation-solving attack on the first layer (Definition 6.5): least squares, if it got the outputs."""
    party = tester.clients[client]
    got = [v for s, label, v in tester.channel.view(f"client {client}") if label == "layer output"]
    layer = tester.program.layers[0]
    for message in got:
        try:
            y = party._decrypt(layer, message, 15, 60)
        except Exception:  # the output of another layer
            continue
        design = torch.cat([x.double(), torch.ones(len(x), 1)], dim=1)
        return torch.linalg.lstsq(design, y[:, rows].t()).solution.t()[:, :6]
    return None


def test_the_attack_works_where_the_routing_is_broken(keys, form):
    """The control of the test above: with input and output of a layer, a client computes the others' weights."""
    program, tests, models = federation()
    tester = _Careless(program, tests, Channel(record=True), keys, form, "single-layer")
    tester.begin(models, WEIGHTS)
    tester.correct(0b11111, tests.all)
    stolen = steal(tester, 1, tests.x[1], slice(12, 24))
    name = program.layers[0].weight
    truth = sum(WEIGHTS[i] * models[i][f"{name}.weight"] for i in range(5)).double() / sum(WEIGHTS.values())
    assert float((stolen - truth).abs().max()) < 0.05


def solve(equations: list[tuple[list[int], int]], unknowns: int, q: int) -> list[int] | None:
    """The solution mod q of linear equations, None if there is none."""
    rows = [[*(c % q for c in left), right % q] for left, right in equations]
    for k in range(unknowns):
        pivot = next((i for i in range(k, len(rows)) if rows[i][k]), None)
        if pivot is None:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        scale = pow(rows[k][k], -1, q)
        rows[k] = [v * scale % q for v in rows[k]]
        for i in range(len(rows)):
            if i != k and rows[i][k]:
                factor = rows[i][k]
                rows[i] = [(a - factor * b) % q for a, b in zip(rows[i], rows[k], strict=True)]
    if any(row[-1] for row in rows[unknowns:]):
        return None
    return [row[-1] for row in rows[:unknowns]]


def test_the_principal_cannot_solve_for_the_auxiliary_share(recorded):
    """The partial output is linear in the share with ciphertexts that both servers have. Without the fresh encryption
    of zero the principal finds the share exactly; with it the equations have no solution.
    """
    tester, _ = recorded
    H, layer, q = tester.H, tester.program.layers[0], tester.H._primes[1]
    layout = Reducing(layer.rows, layer.inner, 4096)
    H.aggregate(0b11111, Clock())
    H.load((0,), None)
    share = layout.encode(layer.features(H._batch["features"]), H._primes)[1]  # [2 W, tiles, d_in]
    known = H._model[layer.weight][0][1]  # [2 W, d_in, N / W], at the principal too
    for fresh in (False, True):
        H.load((0,), None)
        out = H.linear(layer, Clock(), fresh=fresh)[:, :, 1]
        if not fresh:  # the auxiliary server never adds the bias; take off what this call added
            bias = H._model[layer.weight][1][1].to(torch.int64)
            out = (out - bias.view(1, 2, -1)).remainder(q)
        received = out.view(1, 2, layout.columns, -1).permute(2, 0, 1, 3).reshape(layout.columns, -1)
        equations = [(known[0, :, e].long().tolist(), int(received[0, e])) for e in range(layer.inner + 4)]
        found = solve(equations, layer.inner, q)
        assert (found is None) if fresh else (found == share[0, 0].long().remainder(q).tolist())
