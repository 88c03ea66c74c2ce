"""What each party of SecSV and HESV holds and receives, from recorded runs; and attacks that must fail."""

from __future__ import annotations

import gc
import math
import types
from collections.abc import Iterator

import pytest
import torch

from sectorch import ckks
from sectorch.choreography import PROTOCOLS, Net
from sectorch.choreography.ledger import Transcript
from sectorch.choreography.net import Compute
from sectorch.ckks.linalg import ENCODING_BITS, EncryptedColumns, decrypt_columns
from sectorch.ckks.scheme.ciphertext import Cipher
from sectorch.ckks.tensor.ckks_tensor import zeros
from sectorch.errors import TopologyError, UndeclaredMessageError
from sectorch.protocols.secsv import build, fedavg, secsv
from sectorch.protocols.secsv import federation as federated
from sectorch.protocols.secsv import hesv as hesv_module
from sectorch.protocols.secsv.hesv import HESVTester
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.secsv import SecSVTester, evaluate, evaluate_first
from sectorch.protocols.secsv.settings import Route
from sectorch.protocols.secsv.testers import TestSet, averaged

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


class Seen(Transcript):
    """Every message; what each party brought; and of each local computation who made it, on what."""

    def __init__(self):
        super().__init__()
        self.brought: dict[str, list] = {}
        self.steps: list[tuple[str, list]] = []

    def __enter__(self):
        own, run, seen = Net.own, Compute.run, self

        def noted(net, party, value, *args, **kwargs):
            seen.brought.setdefault(party.name, []).append(value)
            return own(net, party, value, *args, **kwargs)

        def watched(step, runtime, call, values):
            for party in step.owners:
                seen.steps.append((party.name, [step.f, *values]))
            return run(step, runtime, call, values)

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Net, "own", noted)
        self._patch.setattr(Compute, "run", watched)
        return super().__enter__()

    def __exit__(self, *exc):
        self._patch.undo()
        super().__exit__(*exc)

    def view(self, name: str) -> list[tuple]:
        """The headers and contents of all that a party received."""
        lines = [(line, value) for line, value in self.lines if line.dst.name == name]
        return [(line, value.long() if value.dtype == torch.int32 else value) for line, value in lines]

    def labels(self, name: str, shown: bool = False) -> set[str]:
        return {line.label for line, _ in self.view(name) if line.shows or not shown}


@pytest.fixture(scope="module")
def recorded(keys, form):
    program, tests, models = federation()
    with Seen() as seen:
        tester = SecSVTester(program, tests, keys, form, "single-layer")
        tester.begin(models, WEIGHTS)
        for coalition in (0b00001, 0b11111):
            tester.correct(coalition, tests.all)
    return tester, seen


@pytest.fixture(scope="module")
def recorded_hesv():
    program, tests, models = federation(each=3)
    with Seen() as seen:
        tester = HESVTester(program, tests, hesv_module.joint_keys(program), "single-layer")
        tester.begin(models, WEIGHTS)
        tester.hits(0b00001)
        tester.hits(0b11111)
    return tester, seen


def reachable(start: object) -> Iterator[object]:
    """Everything that an object holds, directly or not, and what functions close over; not what modules hold."""
    seen, left = set(), [start]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (types.ModuleType, types.BuiltinFunctionType, type)):
            continue
        seen.add(id(one))
        if isinstance(one, types.FunctionType):
            left.extend(cell.cell_contents for cell in one.__closure__ or ())
            continue
        yield one
        left.extend(gc.get_referents(one))
        if hasattr(one, "__dict__"):
            left.extend(vars(one).values())


def tensors(value: object) -> Iterator[torch.Tensor]:
    return (v for v in reachable(value) if isinstance(v, torch.Tensor))


def test_no_server_computes_with_a_secret_key(recorded, recorded_hesv):
    """Nor with anything, or inside of anything, that leads to one; and every client does."""
    for _, seen in (recorded, recorded_hesv):
        found: dict[str, list] = {}
        for name, values in seen.steps:
            found.setdefault(name, []).extend(values)
        assert set(found) - {"X"} == {"P", "C1", "C2", "C3", "C4", "C5"}
        for name, values in found.items():
            held = list(reachable(values))
            assert len(held) > 100, "the walk goes into the party's material"
            secret = [v for v in held if isinstance(v, ckks.SecretKey | ckks.Keys)]
            assert bool(secret) == (name[0] == "C"), name


def test_no_party_computes_with_the_plain_material_of_another(recorded, recorded_hesv):
    """Test samples, labels and models, by their place in memory, in all that any party's computations reach."""
    for _, seen in (recorded, recorded_hesv):
        secrets = {
            name: {v.data_ptr() for v in values if isinstance(v, torch.Tensor) and v.numel() > 1}
            for name, values in seen.brought.items()
            if name[0] == "C"
        }
        assert all(len(found) >= 4 for found in secrets.values())
        held: dict[str, set] = {}
        for name, values in seen.steps:
            plain = (v for v in tensors(values) if not isinstance(v, ckks.CKKSTensor) and not v.is_meta)
            held.setdefault(name, set()).update(v.data_ptr() for v in plain)
        for who, pointers in held.items():
            assert who[0] != "C" or pointers & secrets[who], "the walk finds a client's own samples"
            for other, found in secrets.items():
                assert other == who or not pointers & found, (who, other)


def test_the_messages_are_the_declared_ones(recorded, recorded_hesv):
    _, seen = recorded
    for i in range(1, 6):
        assert seen.labels(f"C{i}") == {"layer_output", "numbers", "task"}
    at_P = {
        "features_P",
        "labels_P",
        "model_P",
        "seed_P",
        "material_P",
        "masked_X",
        "partial_output",
        "correct_X",
        "number",
    }
    assert seen.labels("P") == at_P and seen.labels("P", shown=True) == {"correct_X", "number"}
    at_X = {"features_X", "labels_X", "model_X", "seed_X", "material_X", "masked_P", "correct_P", "numbers", "task"}
    assert seen.labels("X") == at_X and seen.labels("X", shown=True) == {"correct_P", "numbers", "task"}
    _, seen = recorded_hesv
    received = set().union(*(seen.labels(f"C{i}") for i in range(1, 6)))
    assert received == {"layer_output", "matches", "numbers", "task"}
    assert seen.labels("P") == {"samples", "labels", "model", "features", "prediction", "count", "number"}
    assert seen.labels("P", shown=True) == {"count", "number"}
    for _, seen in (recorded, recorded_hesv):
        for line, value in seen.lines:
            declared = PROTOCOLS[line.protocol].message(line.label)
            assert (declared.src, declared.dst) == (line.src.role, line.dst.role)
            assert line.bytes == value.numel() * value.element_size(), "bytes are those of what is sent"


def test_an_undeclared_message_is_refused(recorded):
    tester, _ = recorded
    net, other = tester.nets[:2]
    C, P, X = net.C, net.P, net.X
    words = net.own(P, torch.zeros(1, dtype=torch.int64))
    with Transcript() as transcript:
        with pytest.raises(UndeclaredMessageError, match="outside a protocol"):
            net.send(words, P, C, "layer_output")
        with net.declared(evaluate.spec):
            for label, dst in (("model_P", C), ("layer_output", X), ("partial_output", X)):
                with pytest.raises(UndeclaredMessageError):
                    words.send(P, dst, label)
            with pytest.raises(TopologyError, match="no channel from C1 to C2"):
                net.own(C, torch.zeros(1, dtype=torch.int64)).send(C, other.C, "layer_output")
    assert not transcript.lines


@pytest.mark.parametrize("value", [0.0, 1.0, None])
def test_what_a_server_receives_is_uniform_whatever_the_inputs(keys, form, field, value):
    """Shares, masked values and ciphertexts: the mean of residues / q within eight standard deviations of a half."""
    program, tests, models = federation(value=value)
    tester = SecSVTester(program, tests, keys, form, "single-layer")
    with Transcript() as transcript:
        tester.begin(models, WEIGHTS)
        tester.correct(0b00111, tests.all)
    found: dict[tuple, list] = {}
    for line, message in transcript.lines:
        name, kind = line.dst.name, line.label.rsplit("_", 1)[0]
        if name[0] == "C" or line.shows or kind == "seed":  # eight words of the operating system's
            continue
        ciphertext = kind in ("model", "partial")
        for v in message.unbind(0) if kind == "material" else [message]:
            primes = v.unbind(-2) if ciphertext else v.unbind(0)
            # Labels are shared modulo the first prime; what is only to be decrypted has lost the last.
            assert len(primes) == {"labels": 1, "partial": 2}.get(kind, len(primes)) and len(primes) in (1, 2, 3)
            for q, words in zip(field.primes, primes, strict=False):
                assert int(words.min()) >= 0 and int(words.max()) < q
                found.setdefault((name, kind, q), []).append(words.flatten().double() / q)
    assert {kind for _, kind, _ in found} == {"features", "labels", "model", "material", "masked", "partial"}
    for (name, label, _), words in found.items():
        words = torch.cat(words)
        assert len(words) >= 100
        for moment, mean, deviation in ((words, 0.5, 12**-0.5), (words**2, 1 / 3, math.sqrt(4 / 45))):
            assert abs(float(moment.mean()) - mean) < 8 * deviation / math.sqrt(len(words)), (name, label)


def test_no_server_can_add_up_features_outputs_or_labels(recorded, field):
    """Sums and differences of any two same-shaped tensors that a server received: none is a true value."""
    tester, seen = recorded
    truths = [field.encode(x.t()) for x in tester.tests.x]
    truths += [field.first.reduce(torch.nn.functional.one_hot(y, 3).t()) for y in tester.tests.labels]
    for name in ("P", "X"):
        received = [(line, v) for line, v in seen.view(name) if not line.label.startswith("model")]
        held = [v for line, v in received if not line.label.startswith("material")]
        held += [part for line, v in received if line.label.startswith("material") for part in v]
        for truth in truths:
            same = [v for v in held if v.shape == truth.shape]
            assert same
            for a in same:
                assert not torch.equal(a, truth)
                for b in same:
                    ring = field if len(truth) > 1 else field.first
                    assert not torch.equal(ring.add(a, b), truth) and not torch.equal(ring.subtract(a, b), truth)
    first, second = (next(v for line, v in seen.view(n) if line.label == f"features_{n}") for n in ("P", "X"))
    assert torch.equal(field.add(first, second), truths[0]), "both servers together could: they must not collude"


def test_no_client_holds_both_input_and_output_of_a_layer(recorded, recorded_hesv):
    """What each client decrypts of a batch, with what it knows already, leaves every layer's matrix unknown to it."""
    for tester, seen in (recorded, recorded_hesv):
        outputs = [line.dst.name for line, _ in seen.lines if line.label == "layer_output"]
        place = 0
        for coalition in (0b00001, 0b11111):
            for route in tester.routes(coalition):
                route.check("single-layer", 0 if coalition == 1 else None)
                knows = {f"C{i + 1}": {0} for i in route.owners}  # inputs of layer 0
                for k in range(len(tester.program.layers)):
                    receiver = outputs[place]
                    place += 1
                    assert k not in knows.get(receiver, set()), f"{receiver} holds input and output of layer {k}"
                    knows.setdefault(receiver, set()).add(k + 1)  # it computed the next layer's input
        assert place == len(outputs)


class _Careless(SecSVTester):
    """Routes everything to client 1, against the rules."""

    def routes(self, coalition):
        return [Route((0, 1, 2, 3, 4), (1, 1))]


def decrypted(
    public: secsv.Public, layer, data: torch.Tensor, sizes: list[int], keys: ckks.Keys, weight: int = 15
) -> torch.Tensor:
    """A coalition's first outputs from a message, with the joint key."""
    layout, columns = public.layout(layer), [layer.columns * size for size in sizes]
    parts = zip(data.split([layout.tiles(n) for n in columns]), columns, strict=True)
    found = [EncryptedColumns(layout, Cipher(part, keys.public), n).decrypt(keys) for part, n in parts]
    return secsv.outputs(public, layer, weight, "C1", *found)


def steal(tester, received: list, keys, x: torch.Tensor, rows: slice) -> torch.Tensor | None:
    """A client's equation-solving attack on the first layer (Definition 6.5): least squares, if it got the outputs."""
    layer = tester.program.layers[0]
    for _, message in received:
        try:
            y = decrypted(tester.public, layer, message, [12] * 5, keys)
        except Exception:  # the output of another layer, or no output
            continue
        design = torch.cat([x.double(), torch.ones(len(x), 1)], dim=1)
        return torch.linalg.lstsq(design, y[rows]).solution.t()[:, :6]
    return None


def test_the_attack_works_where_the_routing_is_broken(keys, form):
    """The control of the test above: with input and output of a layer, a client computes the others' weights."""
    program, tests, models = federation()
    tester = _Careless(program, tests, keys, form, "single-layer")
    with Seen() as seen:
        tester.begin(models, WEIGHTS)
        tester.correct(0b11111, tests.all)
    stolen = steal(tester, seen.view("C2"), keys, tests.x[1], slice(12, 24))
    name = program.layers[0].weight
    truth = sum(WEIGHTS[i] * models[i][f"{name}.weight"] for i in range(5)).double() / sum(WEIGHTS.values())
    assert float((stolen - truth).abs().max()) < 0.05


def first_outputs(tester, seen, client: int, coalition: int, parts: int, keys) -> list[torch.Tensor]:
    """What a client may take for the first layer's outputs, among all that it decrypts."""
    found, weight = [], sum(w for i, w in WEIGHTS.items() if coalition >> i & 1)
    for _, message in seen.view(f"C{client + 1}"):
        try:
            found.append(decrypted(tester.public, tester.program.layers[0], message, [12] * parts, keys, weight))
        except Exception:  # the output of another layer or batch, or no output
            continue
    return found


def test_who_decrypts_for_all_clients_finds_the_samples_by_the_global_model(keys, form):
    """Definition 6.5's data stealing, against Proposition 6.8: federated training gives every client the model of all
    clients, and with its own that of all but itself, for which it decrypts as the only one outside. With no fewer
    outputs than inputs the samples of others follow, to the last places of the fixed-point features. The control
    solves with the client's own model."""
    program, tests, models = federation()
    for left_out in (False, True):
        tester = SecSVTester(program, tests, keys, form, "single-layer")
        client = tester.routes(0b11111)[0].clients[0]
        coalition = 0b11111 ^ (left_out << client)
        (route,) = [route for route in tester.routes(coalition) if route.clients[0] == client]
        with Seen() as seen:
            tester.begin(models, WEIGHTS)
            tester.correct(coalition, tests.all)
        everybody = averaged([models[i] for i in range(5)], list(WEIGHTS.values()))
        mine, total = WEIGHTS[client], sum(WEIGHTS.values())
        known = {
            name: (total * everybody[name] - left_out * mine * models[client][name]) / (total - left_out * mine)
            for name in everybody
        }  # of the global model and the client's own alone
        truth = torch.cat([tests.x[i] for i in route.owners]).double()
        assert client not in route.owners
        errors = []
        for model in (known, models[client]):
            weight, bias = (model[f"{program.layers[0].weight}.{kind}"].double() for kind in ("weight", "bias"))
            seen_outputs = first_outputs(tester, seen, client, coalition, len(route.owners), keys)
            guesses = [torch.linalg.lstsq(weight, (y - bias).T).solution.T for y in seen_outputs]
            errors.append(min(float((guess - truth).abs().max()) for guess in guesses))
        assert errors[0] < 1e-3 and errors[1] > 0.1


def test_rounds_add_up_where_outputs_are_fewer_than_inputs():
    """Ten rounds of a logistic classifier on digits, 64 inputs and 10 outputs, with the error of the encryption: the
    client that decrypts for all clients has 100 equations for each image, and finds it to about 2 % of its spread."""
    found = federated("digits", clients=5)
    rounds, weights = fedavg(build("logistic", found.shape, found.classes), found.train, rounds=10)
    everybody = [averaged(list(one.values()), [w[n] for n in one]) for one, w in zip(rounds, weights, strict=True)]
    x = torch.cat([images.flatten(1) for images, _ in found.test.values()]).double()
    (name,) = (name for name in everybody[0] if name.endswith("weight"))
    errors = []
    for count in (1, 10):
        weight = torch.cat([model[name].double() for model in everybody[:count]])
        noise = 1e-4 * torch.randn(len(x), len(weight), generator=torch.Generator().manual_seed(0)).double()
        system = weight.T @ weight / 1e-4**2 + 10 * torch.eye(64).double()  # a prior of variance 0.1 on each pixel
        guess = torch.linalg.solve(system, weight.T @ (x @ weight.T + noise).T / 1e-4**2).T
        errors.append(float((guess - x).square().mean().sqrt() / (x - x.mean(0)).square().mean().sqrt()))
    assert errors[1] < 0.05 < 0.5 < errors[0]


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


def test_the_principal_cannot_solve_for_the_auxiliary_share(recorded, keys):
    """The partial output is linear in the share with ciphertexts that both servers have. Without the fresh encryption
    of zero the principal finds the share exactly, and recognises it in what is left of it after the rescale; with it
    the equations have no solution, and nothing can be recognised.
    """
    tester, seen = recorded
    public, layer = tester.public, tester.program.layers[0]
    p, layout, inner = public.parameters, public.layout(layer), layer.inner + 1
    q, moduli = p.primes[1], torch.tensor(p.primes)[:, None]
    features = next(v for line, v in seen.view("X") if line.label == "features_X")
    right = secsv.encoded(public, layer, 0, features)
    share = right.parts[1]  # [2 W, tiles, d_in + 1]
    pair = tester._models[0][layer.weight]
    model = pair.X.content._value
    known = model.parts[1]  # [2 W, d_in + 1, N / W], at the principal too
    whole = layout.multiply(model.parts, right.parts, p.primes, [q / 2 + 1 for q in p.primes])
    for out in (whole, (whole + zeros(Cipher(whole, keys.public))).remainder(moduli)):
        received = out[:, :, 1].view(1, 2, layout.columns, -1).permute(2, 0, 1, 3).reshape(layout.columns, -1)
        equations = [(known[0, :, e].long().tolist(), int(received[0, e])) for e in range(inner + 4)]
        found = solve(equations, inner, q)
        assert (found == share[0, 0].long().remainder(q).tolist()) if out is whole else (found is None)
    guessed = (model @ right).cipher.data
    with Transcript() as transcript:
        for _ in range(2):
            evaluate_first(tester.nets[0], layer, pair, tester._encoded[0])
    sent = [value.long() for _, value in transcript.lines]
    assert not any(torch.equal(a, b) for a, b in [(sent[0], guessed), (sent[1], guessed), sent])
    scale = 2.0 ** (p.scale_bits + secsv.WEIGHT_BITS + public.ring.frac_bits + ENCODING_BITS) / p.primes[-1]
    for one in sent:
        zero = (one - guessed).remainder(moduli[:-1])
        assert float((zero[:, 1] == 0).sum()) < 20, "no place of the share's image is left uncovered"
        assert float(decrypt_columns(layout, zero, keys, scale).abs().max()) < 2.0**-20


def test_what_the_first_layer_adds_up_to_is_what_was_sent_before(recorded, keys, field):
    """P's sum of the members' outputs and the product with the sum of their models decrypt to the same, to the last
    place that a decryption has, and no client sees the same ciphertext twice.
    """
    tester, seen = recorded
    public, layer, net = tester.public, tester.program.layers[0], tester.nets[0]
    owner, weights = 1, [tester._weights[i] for i in range(5)]
    parts = [tester._first(i, owner) for i in range(5)]
    with Transcript() as transcript:
        got, _ = (net.read(secsv.open_first(net, public, [parts], weights), net.C) for _ in range(2))
    assert not torch.equal(*(value for _, value in transcript.lines))
    model = tester._aggregate(0b11111, layer.weight)
    wanted = net.read(evaluate(net, public, layer, model, tester._encoded[owner], weights), net.C)
    # Each of the ten halves was rounded when it was rescaled: docs/secsv.md, errors.
    assert float((got - wanted).abs().max()) < 2.0**-20
    received = [v for line, v in seen.lines if line.label == "layer_output"]
    assert len({v.sum().item() for v in received}) == len(received)


def test_the_auxiliary_server_speaks_of_the_first_layer_once_for_each_model(recorded):
    """However many coalitions are tested: P gets as many ciphertexts of it as there are models and owners."""
    tester, seen = recorded
    lines = [line for line, _ in seen.lines if line.label == "partial_output"]
    firsts = [line for line in lines if line.protocol == "secsv_first"]
    others = [line for line in lines if line.protocol == "secsv_layer"]
    assert len(firsts) == 25 and len(others) == sum(len(tester.routes(c)) for c in (0b00001, 0b11111))
