"""Each party of SecSV and HESV by itself, with its own inputs only, over channels of bytes: as in one process."""

from __future__ import annotations

import multiprocessing
import queue
import threading

import pytest
import torch
from test_secsv_protocols import CASES, WEIGHTS, case

from sectorch import ckks
from sectorch.choreography import Party
from sectorch.choreography.ledger import Profile
from sectorch.choreography.run.frames import unpack
from sectorch.choreography.run.party import PartyRuntime
from sectorch.errors import MisplacedValueError
from sectorch.protocols.secsv import Settings, Training, build, fedavg, federation
from sectorch.protocols.secsv.algorithm import Utilities
from sectorch.protocols.secsv.hesv import HESVTester
from sectorch.protocols.secsv.hesv import joint_keys as hesv_keys
from sectorch.protocols.secsv.program import Program
from sectorch.protocols.secsv.secsv import Format, SecSVTester
from sectorch.protocols.secsv.testers import TestSet
from sectorch.protocols.secsv.values import coalitions

SECSV = ["P", "X", "C1", "C2", "C3", "C4"]
SOME = 0b1010010001011


class Ends:
    """A channel of bytes; what does not come within a minute never will."""

    def __init__(self, put, get):
        self._put, self._get = put, get

    def send(self, parts, later=False):
        for part in parts:
            self._put(bytes(part))

    def flush(self):
        pass

    def receive(self):
        (frame,) = unpack(self._get())
        return frame


def edges(names: list[str]) -> list[tuple[str, str]]:
    return [(a, b) for k, a in enumerate(names) for b in names[k + 1 :] if not (a[0] == "C" and b[0] == "C")]


def party(name: str) -> Party:
    return Party(name, name[0])


def own_part(name: str, tests: TestSet, models: dict, keys: ckks.Keys):
    """What a party has: a client its samples, model, weight and the joint keys; a server the public keys.

    All know the first global model, which is C1's here.
    """
    me = int(name[1:]) - 1 if name[0] == "C" else None
    mine = lambda values: tuple(v if i == me else None for i, v in enumerate(values))
    own = {me: models[me]} if me is not None else {}
    weights = {me: WEIGHTS[me]} if me is not None else {}
    return TestSet(mine(tests.x), mine(tests.labels)), own, weights, keys if me is not None else keys.public, models[0]


def ledger(profile: Profile) -> list[tuple]:
    return [(m.path, m.label, m.src.name, m.dst.name, m.round, tuple(m.shape), m.dtype, m.call) for m in profile.ledger]


def take_part(name: str, runtime, make, program: Program, given: tuple, ask):
    """One party's whole run: what P finds, None elsewhere; and the ledger."""
    tests, models, weights, keys, first = given
    with Profile() as profile:
        tester = make(program, tests, keys, runtime)
        tester.begin(models, weights)
        known, found = tester.known(first), None
        if name == "P":
            found = known, ask(tester)
            tester.end()
        else:
            tester.follow()
    return found, ledger(profile)


def apart(names: list[str], make, program: Program, tests: TestSet, models: dict, keys: ckks.Keys, ask) -> dict:
    """Every party in a thread of its own."""
    boxes = {(a, b): queue.Queue() for p, q in edges(names) for a, b in ((p, q), (q, p))}
    found: dict = {}

    def run(name: str) -> None:
        torch.set_num_threads(1)
        ends = {
            party(other): Ends(boxes[name, other].put, lambda box=boxes[other, name]: box.get(timeout=60))
            for other in names
            if (name, other) in boxes
        }
        try:
            runtime = PartyRuntime(party(name), bytes(16), ends)
            found[name] = take_part(name, runtime, make, program, own_part(name, tests, models, keys), ask)
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in found.values():
        if isinstance(error, Exception):
            raise error
    assert all(box.empty() for box in boxes.values()), "every message was expected"
    return found


def together(make, program: Program, tests: TestSet, models: dict, keys: ckks.Keys, ask):
    """All parties in one process, as a valuation runs them."""
    with Profile() as profile:
        tester = make(program, tests, keys, None)
        tester.begin(models, WEIGHTS)
        found = tester.known(models[0]), ask(tester)
        tester.end()
    return found, ledger(profile)


def secsv(form: Format):
    return lambda program, tests, keys, runtime: SecSVTester(program, tests, keys, form, "single-layer", runtime)


def hesv(program, tests, keys, runtime):
    return HESVTester(program, tests, keys, "single-layer", runtime)


def same(names: list[str], make, program, tests, models, keys, ask) -> None:
    found, sent = together(make, program, tests, models, keys, ask)
    each = apart(names, make, program, tests, models, keys, ask)
    assert each["P"][0] == found
    assert [each[name][0] for name in names[1:]] == [None] * (len(names) - 1), "P alone learns anything"
    assert all(lines == sent for _, lines in each.values()), "all know of the same messages"


@pytest.mark.parametrize("name", CASES)
def test_each_party_of_secsv_by_itself(name, keys, form):
    """Whole batches, parts of batches, a coalition of one; with layers, and a state, that clients must not see."""
    ask = lambda tester: [tester.correct(0b0110, tester.tests.all), tester.correct(0b0110, SOME), tester.correct(1, 3)]
    same(SECSV, secsv(form), *case(name), keys, ask)


@pytest.mark.parametrize("name", CASES)
def test_each_party_of_hesv_by_itself(name):
    program, tests, models = case(name, each=3)
    ask = lambda tester: [tester.hits(0b0001), tester.hits(0b1111)]
    same(["P", *SECSV[2:]], hesv, program, tests, models, hesv_keys(program), ask)


def test_a_coalition_of_hesv_on_digits():
    program, tests, models = digits(3)
    names = ["P", "C1", "C2", "C3"]
    same(names, hesv, program, tests, models, hesv_keys(program), lambda tester: tester.hits(0b110))


def digits(clients: int):
    """Clients' logistic models of scikit-learn's digits, and ten test samples each."""
    found = federation("digits", clients, samples=50 * clients, tests=10 * clients)
    net = build("logistic", found.shape, found.classes)
    (models,), _ = fedavg(net, found.train, 1, Training(epochs=3))
    tests = TestSet(tuple(x for x, _ in found.test.values()), tuple(y for _, y in found.test.values()))
    return Program(net, found.shape), tests, dict(enumerate(models.values()))


def valued(tester: SecSVTester) -> dict[int, dict]:
    """P's side of a round's valuation, with SampleSkip: what it finds of every coalition."""
    utilities = Utilities(range(3), len(tester.tests), lambda: tester, Settings(skip="saving"))
    utilities.ask(coalitions(range(3)))
    return {c: {k: r[k] for k in ("right", "samples", "tested", "skipped")} for c, r in utilities.records.items()}


def agreed(program, tests, keys, runtime):
    """The clients agree on the number format, each from what its own model needs."""
    tester = SecSVTester(program, tests, keys, None, "single-layer", runtime)
    tester.agree([0 if x is None else 4 + i % 2 for i, x in enumerate(tests.x)], None)
    return tester


def alone(name: str, ends: dict, folder: str, given: tuple, told) -> None:
    """A process that is one party: what it is given and its ends of its edges are all that it has."""
    torch.set_num_threads(1)
    program, tests, models, weights, first = given
    keys = ckks.PublicKeys.load(f"{folder}/public")
    if name[0] == "C":
        keys = ckks.Keys(keys, ckks.SecretKey.load(f"{folder}/secret"))
    channels = {party(other): Ends(end.send_bytes, end.recv_bytes) for other, end in ends.items()}
    runtime = PartyRuntime(party(name), bytes(16), channels)
    told.send(take_part(name, runtime, agreed, program, (tests, models, weights, keys, first), valued))


def test_a_round_of_digits(keys):
    """All coalitions of a round, with SampleSkip and a number format that the clients agree on."""
    same(SECSV[:-1], agreed, *digits(3), keys, valued)


@pytest.mark.sectorch_long
def test_a_round_of_digits_as_five_processes(keys, tmp_path):
    """The same, each party a process that was started with nothing but its own inputs."""
    program, tests, models = digits(3)
    found, sent = together(agreed, program, tests, models, keys, valued)
    keys.public.save(tmp_path / "public")
    keys.secret.save(tmp_path / "secret")
    spawn = multiprocessing.get_context("spawn")
    names = SECSV[:-1]
    ends: dict[str, dict] = {name: {} for name in names}
    for p, q in edges(names):
        ends[p][q], ends[q][p] = spawn.Pipe()
    processes, heard = [], {}
    for name in names:
        own, mine, weights, _, first = own_part(name, tests, models, keys)
        heard[name], told = spawn.Pipe(duplex=False)
        given = (name, ends[name], str(tmp_path), (program, own, mine, weights, first), told)
        processes.append(spawn.Process(target=alone, args=given))
        processes[-1].start()
        told.close()
    try:
        said = {name: end.recv() for name, end in heard.items()}
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    assert said["P"][0] == found
    assert all(lines == sent for _, lines in said.values())


def test_who_was_not_told_cannot_follow(keys, form):
    program, tests, _ = case("logistic")
    tester = SecSVTester(program, tests, keys, form, "single-layer")
    net = tester.nets[0]
    with pytest.raises(MisplacedValueError, match="C1, C2, C3, C4, X cannot follow"):
        net.agreed(net.own(net.P, torch.ones(1)), tester.parties.everyone)


def test_a_server_cannot_decrypt(keys, form):
    """The keys are at the clients: a step of P's or X's that takes them is refused."""
    program, tests, _ = case("logistic")
    tester = SecSVTester(program, tests, keys, form, "single-layer")
    net = tester.nets[0]
    for server in (net.P, net.X):
        with pytest.raises(MisplacedValueError, match="cannot compute"):
            net.fresh(server, lambda found: found, tester.keys.keys)
