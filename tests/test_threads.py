"""Several threads of one process, as in a web service: one session, one module, or several of both at once."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from cases import long, some
from helpers import ring_values
from torch import nn

import sectorch
from sectorch import ckks
from sectorch.choreography import Phase
from sectorch.choreography.ledger import Profile
from sectorch.choreography.run.local import LocalRuntime
from sectorch.choreography.streams import PairKey, random_secret
from sectorch.errors import MaterialError, StreamReuseError
from sectorch.mpc.star.linear import mask_weight
from sectorch.ring.jit import run_in_threads
from sectorch.session import Session, default_session
from sectorch.tensor import unwrap_openings

THREADS = 8
TOLERANCE = 1e-4
"""Logits of size one after a few layers, each with an error of the order of 2^-20 times the norm of a weight row."""


@pytest.fixture
def slow(monkeypatch):
    """Threads change places often, and in the midst of draws, messages and computations above all."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    pauses = random.Random(0)
    for name in ("draw", "transfer"):
        inner = getattr(LocalRuntime, name)

        def paused(self, *args, inner=inner):
            time.sleep(pauses.choice((0, 0, 2e-4, 6e-4)))
            return inner(self, *args)

        monkeypatch.setattr(LocalRuntime, name, paused)
    yield
    sys.setswitchinterval(interval)


def at_once(work, count: int = THREADS) -> list:
    """work(i) in a thread each, begun together; what they give, or the first error."""
    together = threading.Barrier(count)

    def begun(i: int):
        torch.set_num_threads(1)
        together.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begun, range(count)))


def pausing(kind: type, *names: str) -> type:
    """A list or dict that gives way to other threads after these of its methods."""

    def slowed(name: str):
        def method(self, *args):
            result = getattr(super(made, self), name)(*args)
            time.sleep(2e-3)
            return result

        return method

    made = type(kind.__name__, (kind,), {name: slowed(name) for name in names})
    return made


class Shared(nn.Module):
    """Weights that are used directly, as views, derived from others, tiled, and in a copy that is changed in place."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.norm = nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.first, self.last = nn.Linear(32, 130), nn.Linear(130, 3)
        self.gain = nn.Parameter(torch.rand(130))

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.nn.functional.linear(x, self.first.weight * self.gain.view(-1, 1), self.first.bias)
        bias = self.last.bias.clone()
        bias += self.last.bias
        return x @ self.last.weight.t() + bias


class Untraced(Shared):
    """Runs operation by operation: what a graph would fold is derived in the call."""

    def forward(self, x):
        return super().forward(x) if x.shape[0] > 0 else x


MODELS = [Shared, Untraced]


def checked(secured, model, x) -> None:
    with torch.no_grad():
        assert float((secured(x) - model(x)).abs().max()) < TOLERANCE


@pytest.mark.parametrize("round", some(range(20), [2]))
def test_many_threads_call_modules_of_one_session_for_the_first_time(slow, round):
    session = Session()
    models = [MODELS[i % 2](i).eval() for i in range(1 + round % 3)]
    secured = [sectorch.secure(model, session=session) for model in models]
    profiles = [Profile() for _ in range(THREADS)]

    def work(i: int) -> None:
        x = torch.randn(2 + i % (1 + round % 2), 1, 4, 4, generator=torch.Generator().manual_seed(i))
        with profiles[i]:
            for _ in range(2):
                checked(secured[i % len(models)], models[i % len(models)], x)

    at_once(work)
    masked = [line for p in profiles for line in p.ledger if line.phase == Phase.SETUP]
    with sectorch.profile() as alone:
        fresh = Session()
        for model in models:
            sectorch.secure(model, session=fresh)(torch.zeros(2, 1, 4, 4))
    wanted = [line for line in alone.ledger if line.phase == Phase.SETUP and line.label == "omega_masked"]
    assert Counter((m.path, m.label, m.shape) for m in masked) == Counter((m.path, m.label, m.shape) for m in wanted), (
        "each weight is masked and sent once, whoever comes first"
    )
    drawn = session.setup(session.answering[0])._draws + sum(len(setup._numbers) for setup in session._settled.values())
    assert drawn == len(wanted)


@pytest.mark.parametrize("times", [1, *long(3)])
def test_modules_are_made_and_called_while_others_are(slow, times):
    """Binding a model traces it, and fx then has nn.Module's call of the whole process in its hands."""
    session = Session(answering=2)

    def work(i: int) -> None:
        model = MODELS[i % 2](i).eval()
        secured = sectorch.secure(model, session=session, party=session.answering[i // 2 % 2])
        checked(secured, model, torch.randn(2, 1, 4, 4))

    for _ in range(times):
        at_once(work)


STARTED, GO_ON = threading.Event(), threading.Event()


class Waiting(nn.Module):
    """Stops in the midst of its recording."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        STARTED.set()
        GO_ON.wait(30)
        return self.layer(x)


def test_recording_a_model_leaves_the_modules_of_other_threads_alone():
    STARTED.clear(), GO_ON.clear()
    model, other = Waiting().eval(), nn.Sequential(nn.Linear(2, 3), nn.ReLU()).eval()
    x = torch.ones(1, 2)
    wanted = other(x)
    secured = sectorch.secure(model, session=Session())
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(secured.program, x)
        try:
            assert STARTED.wait(30)
            got, drawn = other(x), torch.rand(2)
        finally:
            GO_ON.set()
        assert torch.equal(got, wanted) and drawn.shape == (2,)
        assert recording.result() is not None, "another thread's random numbers are not this module's"
    checked(secured, model, x)


def test_the_draws_of_a_setup_are_one_each(slow):
    """Protocols of the setup from several threads: no place of a stream twice, none refused, each by its own name."""
    for _ in range(20):
        session = Session()
        setup, profile = session.setup(session.answering[0]), [Profile() for _ in range(THREADS)]
        before, weights = setup._draws, [ring_values((3, i + 1), 63, i) for i in range(THREADS)]

        def work(i: int):
            with profile[i]:
                return mask_weight(setup, setup.own(setup.A, weights[i], Phase.SETUP))

        made = at_once(work)
        assert setup._draws == before + THREADS and setup._stack == []
        for i, weight in enumerate(made):
            opened = setup.read(weight.masked, setup.A) - setup.read(weight.a, setup.A)
            assert torch.equal(opened, weights[i])
            assert [m.path for m in profile[i].ledger] == ["mask_weight"]
        assert len({int(setup.read(weight.a, setup.A)[0, 0]) for weight in made}) == THREADS


def test_of_threads_that_ask_for_one_place_of_a_stream_one_gets_it():
    """Whatever goes wrong above, a mask is not used twice."""
    key = PairKey(random_secret(), b"a session")
    key._latest[7] = pausing(dict, "get")()

    def work(i: int) -> list[int]:
        drawn = []
        for draw in range(10):
            with suppress(StreamReuseError):
                drawn.append((draw, int(key.words("a", 7, draw, 1))))
        return drawn

    drawn = [pair for pairs in at_once(work) for pair in pairs]
    assert len(drawn) == len({draw for draw, _ in drawn}) == len({word for _, word in drawn})
    assert (9, int(PairKey(key._secret, key._session).words("a", 7, 9, 1))) in drawn


def test_material_is_for_one_thread_each(slow):
    session, model, shape = Session(), Shared(0).eval(), (2, 1, 4, 4)
    secured = sectorch.secure(model, session=session)
    x = torch.randn(shape)
    at_once(lambda i: secured.preprocess(2, (1, 4, 4)))
    assert secured.prepared() == {shape: THREADS}
    served = THREADS // 2
    inputs = sectorch.Inputs(x)
    made = [one for _, one in secured.material_cache.all()]
    secured.material_cache._held[inputs.key] = inputs.meta(), pausing(list, "__len__")(made[:served])
    profiles = [Profile() for _ in range(THREADS)]

    def work(i: int) -> None:
        with profiles[i]:
            checked(secured, model, x + i)

    at_once(work)
    assert secured.prepared() == {}
    phases = [{line.phase for line in p.ledger} for p in profiles]
    assert phases.count({Phase.ONLINE}) == served and phases.count({Phase.OFFLINE, Phase.ONLINE}) == THREADS - served
    assert len({line.call for p in profiles for line in p.ledger}) == THREADS, "each on material of its own"


def test_material_is_taken_by_one_of_several_threads(slow):
    """A second use of the same masks would show the difference of two queries."""
    session, model = Session(), Shared(0).eval()
    secured = sectorch.secure(model, session=session)
    secured.preprocess(2, (1, 4, 4))
    material = secured.material_cache.take(sectorch.Inputs(torch.empty(2, 1, 4, 4)))
    material.values = pausing(list, "__len__")(material.values)

    def work(i: int) -> bool:
        x = torch.randn(2, 1, 4, 4)
        try:
            y = session.run(secured.choreography(x), secured._program_inputs(sectorch.Inputs(x)), material)
        except MaterialError:
            return False
        assert torch.equal(unwrap_openings(y), sectorch.reference(model)(x))
        return True

    assert sum(at_once(work)) == 1


def test_what_a_module_keeps_of_shapes_is_changed_by_one_thread_at_a_time(monkeypatch):
    """More shapes than are kept, from all sides; every answer is right and no shape is lost on the way."""
    monkeypatch.setattr(sys.modules["sectorch.nn.graph_cache"], "KEPT_SHAPES", 2)
    model = nn.Linear(3, 2).eval()
    secured = sectorch.secure(model, session=Session())
    secured._checked = pausing(dict, "__contains__", "__len__")()

    def work(i: int) -> None:
        for rows in range(1, 6):
            x = torch.randn(1 + (rows + i) % 3, 3)
            secured._check(torch.empty_like(x, device="meta"))
            checked(secured, model, x)

    at_once(work)
    assert len(secured._checked) == 2


def test_threads_share_the_default_session(monkeypatch):
    monkeypatch.setattr("sectorch.session._default", {})
    seeding = sectorch.session.seed

    def slowly(*args, **kwargs):
        time.sleep(0.01)
        return seeding(*args, **kwargs)

    monkeypatch.setattr("sectorch.session.seed", slowly)
    sessions = at_once(lambda i: default_session())
    assert all(s is sessions[0] for s in sessions)
    x, y = at_once(lambda i: sectorch.share(torch.full((2,), float(i))), 2)
    assert (x + y).reveal().tolist() == [1.0, 1.0]


def test_an_encrypted_module_makes_its_keys_once():
    model = nn.Linear(3, 2).eval()
    module = ckks.CKKSModule(model, session=Session())
    x = torch.randn(4, 3)
    with torch.no_grad():
        wanted = model(x)
    for y in at_once(lambda i: module(x), 3):
        assert float((y - wanted).abs().max()) < 1e-2
    assert len(module.queries) == 3


def test_a_loop_covers_each_element_once_whoever_else_runs_one():
    """And one that raises is over, in all threads, when its error comes: nothing is written afterwards."""

    def add(out: torch.Tensor, low: int, high: int) -> None:
        out[low:high] += 1

    def all_counts(_: int) -> bool:
        found = [torch.zeros(n, dtype=torch.int64) for n in range(1, 60)]
        for out in found:
            run_in_threads(len(out), add, out)
        return all(bool((out == 1).all()) for out in found)

    def broken(out: torch.Tensor, low: int, high: int) -> None:
        if low == 0:
            raise ValueError("the first piece")
        time.sleep(0.01)
        add(out, low, high)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(THREADS) as pool:
            assert all(pool.map(all_counts, range(THREADS)))
        out = torch.zeros(100, dtype=torch.int64)
        with pytest.raises(ValueError, match="the first piece"):
            run_in_threads(len(out), broken, out)
        kept = out.clone()
        time.sleep(0.05)
        assert torch.equal(out, kept)
    finally:
        torch.set_num_threads(before)
