"""`Run`: stages at parties, kept by what they came from; what a kill, another party or another run does to them."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sectorch
from sectorch.errors import ArgumentError, MisplacedValueError
from sectorch.federated import CheckpointError, FederationError, Workers
from sectorch.federated.run import Held, Run, digest_of, estimated_by, note, progress
from sectorch.federated.watch import Estimate
from sectorch.nn import fhe_friendly

CALLS: list[tuple] = []


def double(x: torch.Tensor, times: int = 2) -> torch.Tensor:
    CALLS.append(("double", times))
    return times * x


def fails(x: torch.Tensor) -> torch.Tensor:
    raise FederationError("this is not a model")


@estimated_by(lambda x: Estimate(2.0, 10.0))
def total(x: torch.Tensor) -> float:
    CALLS.append(("total",))
    tick = progress(len(x))
    for _ in x:
        tick()
    note(parts=len(x))
    return float(x.sum())


def linear(x: torch.Tensor) -> nn.Module:
    CALLS.append(("linear",))
    layer = nn.Linear(len(x), 1)
    nn.init.constant_(layer.weight, float(x.sum()))
    return layer.eval()


def product(session: sectorch.Session, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    CALLS.append(("product",))
    with torch.no_grad():
        return sectorch.secure(model, session=session, party=session.answering[0])(
            sectorch.share(x, session=session, party=session.answering[0])
        ).reveal()


def program(run: Run, x: torch.Tensor | None, y: torch.Tensor | None) -> dict[str, Held]:
    like = torch.empty(3, device="meta")
    a = run.bring("north", x, public=like)
    b = run.bring("south", y, public=like)
    twice = run.at("north", double, a, stage="twice", public=like)
    model = run.at("south", linear, b, stage="model", into=nn.Linear(3, 1))
    cast = {"Q": "north", "A": "south", "S": "hub"}
    out = run.among(product, cast, twice, model, at="north", stage="product", public=torch.empty(1, device="meta"))
    return {"twice": twice, "model": model, "out": out, "sum": run.at("north", total, out, stage="sum")}


X, Y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 0.25])


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()


def test_a_run_is_taken_up_where_it_was(tmp_path: Path):
    first = program(Run({"run": "example"}, out=tmp_path), X, Y)
    assert len(CALLS) == 4 and first["sum"].value == pytest.approx(12.0, abs=2.0)
    CALLS.clear()
    run = Run({"run": "example"}, out=tmp_path)
    again = program(run, X, Y)
    assert CALLS == [] and torch.equal(again["out"].value, first["out"].value)
    assert run.record("sum")["parts"] == 1 and run.record("sum")["value"] == first["sum"].value
    assert {row["role"] for row in run.received} == {"Q", "A", "S"}, "the ledger is kept with a protocol's result"
    assert torch.equal(again["model"].value.weight, first["model"].value.weight)
    next(tmp_path.glob("product-*.json")).unlink()  # killed before it was whole
    program(Run({"run": "example"}, out=tmp_path), X, Y)
    assert [name for name, *_ in CALLS] == ["product"]


def test_other_inputs_are_another_run(tmp_path: Path):
    program(Run(out=tmp_path), X, Y)
    CALLS.clear()
    program(Run(out=tmp_path), X + 1, Y)
    assert [name for name, *_ in CALLS] == ["double", "product", "total"]


def test_another_run_or_version_is_refused_by_name(tmp_path: Path):
    Run({"run": "example", "rounds": 3}, out=tmp_path)
    with pytest.raises(CheckpointError, match=r"differs in rounds \(3 there, 4 now\)"):
        Run({"run": "example", "rounds": 4}, out=tmp_path)
    for text in ('{"rounds": 3}', "[]", "3"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(CheckpointError, match="a run of an older version of sectorch"):
            Run({"run": "example", "rounds": 3}, out=tmp_path)


def test_a_stage_takes_what_its_party_holds():
    run = Run()
    a = run.bring("north", X)
    for args in ((a,), ([a],), ({"x": (a,)},)):
        with pytest.raises(MisplacedValueError, match=r"stage 'peek.': south does not hold what north holds"):
            run.at("south", double, *args, stage=f"peek{len(run._seen)}")
    with pytest.raises(MisplacedValueError, match="holds one of its values, and takes no part"):
        run.among(product, {"Q": "west", "A": "south", "S": "hub"}, a, at="west", stage="other")
    assert CALLS == []
    assert torch.equal(run.at("south", double, run.public(X), stage="open").value, 2 * X)


@dataclasses.dataclass(frozen=True)
class Box:
    inner: object


class Pair(NamedTuple):
    a: object
    b: int


@pytest.mark.parametrize("wrap", [Box, lambda a: {a}, lambda a: {a: 1}, lambda a: [Box((a,))], lambda a: {"x": Box(a)}])
def test_a_holder_cannot_hide_where_its_value_is_not_opened(wrap):
    """Found by attack: in a dataclass, a set or a key, another party's value was read in a simulation."""
    run = Run()
    a = run.bring("north", X)
    for stage in (
        lambda: run.at("south", double, wrap(a), stage="peek"),
        lambda: run.among(product, {"Q": "west", "A": "south", "S": "hub"}, wrap(a), at="west", stage="peek"),
    ):
        run._seen.clear()
        with pytest.raises(ArgumentError, match="stage 'peek': what north holds lies inside another value"):
            stage()
    assert CALLS == []


def test_a_function_encloses_no_holder():
    run = Run()
    a = run.bring("north", X)
    for number, function in enumerate((lambda held=a: held.value, lambda: a.value, functools.partial(double, a))):
        with pytest.raises(ArgumentError, match=f"stage '{number}': what north holds lies inside .* the function"):
            run.at("south", function, stage=str(number))


def test_a_named_tuple_is_opened():
    run = Run()
    pair = Pair(run.bring("north", X), 3)
    assert torch.equal(run.at("north", lambda pair: pair.a * pair.b, pair, stage="times").value, 3 * X)
    with pytest.raises(MisplacedValueError, match="south does not hold what north holds"):
        run.at("south", double, pair, stage="peek")


@pytest.mark.parametrize("value", [Box(1), np.arange(3), Pair(1, 2), Path("a"), [Box(1)], nn.Linear(2, 2)])
def test_a_result_that_would_not_come_back_is_refused_at_once(tmp_path: Path, value):
    """Found by attack: it was kept, and could not be read, or was another, when the run went on."""
    for out in (None, tmp_path):
        with pytest.raises(ArgumentError, match=r"stage 'odd' at north: (a result is kept as|its result is a model)"):
            Run(out=out).at("north", lambda x: x, value, stage="odd")
    assert not list(tmp_path.glob("odd*"))


@pytest.mark.parametrize("value", [np.float64(1.5), np.int64(3), {1, 2}, (X, 1), {"a": [X, None]}, float("inf"), True])
def test_a_result_comes_back_as_it_was(tmp_path: Path, value):
    first, second = (Run(out=tmp_path).at("north", lambda: value, stage="s").value for _ in range(2))
    assert type(first) is type(second) and repr(first) == repr(second)


def test_what_is_public_of_a_value_is_true_of_it():
    """Found as a newcomer: a wrong `public=` was right in a simulation, and wrong apart."""
    run, wrong = Run(members=["north", "south"]), torch.empty(4, device="meta")
    with pytest.raises(ArgumentError, match=r"input 1 of north is a tensor of torch.float32 \[3\], and public= says"):
        run.bring("north", X, public=wrong)
    a = run.bring("north", X)
    with pytest.raises(
        ArgumentError, match=r"stage 'twice' at north: its result is a tensor .* says torch.float32 \[4"
    ):
        run.at("north", double, a, stage="twice", public=wrong)
    with pytest.raises(ArgumentError, match="stage 'give': whoever receives a tensor knows its shape"):
        run.send(a, "south", stage="give")
    with pytest.raises(ArgumentError, match="stage 'raw': what `bring`, `at` or `among` gave is sent, got a Tensor"):
        run.send(X, "south", stage="raw")  # pyright: ignore[reportArgumentType]


def test_members_are_named_once_and_nobody_else_plays():
    with pytest.raises(ArgumentError, match="each once; got north, north"):
        Run(members=["north", "north"])
    run = Run(members=["north", "south"])
    with pytest.raises(ArgumentError, match="an input is at nroth, which is no member"):
        run.bring("nroth", X)
    with pytest.raises(ArgumentError, match="stage 'a' is at nroth, which is no member; they are north, south"):
        run.at("nroth", double, X, stage="a")
    with pytest.raises(ArgumentError, match="stage 'b' is at west, which is no member"):
        run.among(product, {"Q": "north", "A": "south", "S": "west"}, X, at="north", stage="b")
    assert CALLS == []


def test_a_stage_keeps_no_more_than_its_result(tmp_path: Path):
    """Found by attack: a part of a tensor went to disk, and to a worker, with all of that tensor."""
    run = Run(out=tmp_path)
    few = run.at("north", lambda x: {"few": x[:2]}, run.bring("north", torch.rand(100_000)), stage="few")
    [kept] = tmp_path.glob("few-*.pt")
    assert kept.stat().st_size < 10_000 and len(pickle.dumps(few)) < 10_000
    assert torch.equal(pickle.loads(pickle.dumps(few)).value["few"], few.value["few"])


def test_a_value_is_sent_by_its_one_holder():
    run = Run()
    a = run.bring("north", X)
    given = run.send(a, ["south", "west"], stage="given")
    assert torch.equal(run.at("south", double, given, stage="twice").value, 2 * X)
    assert {row["shows"] for row in run.received} == {"a value that its holder gives away"}
    with pytest.raises(MisplacedValueError, match="one party sends what it holds"):
        run.send(given, "hub", stage="again")
    with pytest.raises(ArgumentError, match="stage 'model' at north and south: a tensor is sent"):
        run.send(run.bring("north", {"a": X}), "south", stage="model")


def test_names_of_stages():
    run = Run()
    a = run.bring("north", X)
    run.at("north", double, a, stage="one")
    with pytest.raises(ArgumentError, match="two stages are called 'one'"):
        run.at("north", double, a, stage="one")
    run.at("north", double, a, stage="one/two")  # two files
    for name in ("../up", "/root", "", "a\nb", "x*", "é" * 100):
        with pytest.raises(ArgumentError, match="a stage's name"):
            run.at("north", double, a, stage=name)


def test_an_error_names_stage_and_party():
    run = Run()
    with pytest.raises(FederationError, match="stage 'bad' at north: this is not a model"):
        run.at("north", fails, run.bring("north", X), stage="bad")


def test_what_cannot_be_known_is_refused():
    run = Run()
    for value, name in (((i for i in X), "generator"), (object(), "object"), (torch.Generator(), "Generator")):
        with pytest.raises(ArgumentError, match=f"a {name} has no content to know it by"):
            run.at("north", double, value, stage=f"lazy {name}")
        with pytest.raises(ArgumentError, match=f"a {name} has no content to know it by"):
            run.at("north", lambda x, held=value: held, X, stage=f"enclosed {name}")


def test_a_result_that_is_not_kept_is_made_when_it_is_needed(tmp_path: Path):
    for expected in (["double", "total"], []):
        run = Run(out=tmp_path)
        later = run.at("north", double, run.bring("north", X), stage="twice", keep=False)
        run.at("north", total, later, stage="sum")
        assert [name for name, *_ in CALLS] == expected
        CALLS.clear()


def test_a_replaced_result_leaves_the_disk(tmp_path: Path):
    """One copy of a state stays, a finished run is taken up without the others, and what still needs one says so."""

    def states(run: Run, rounds: int) -> Held:
        state = run.bring("Q", torch.ones(3))
        for t in range(rounds):
            state = run.at("Q", double, state, stage=f"state-{t}", replaces=state)
        return state

    for rounds, calls in ((3, 3), (3, 0), (5, 2)):
        CALLS.clear()
        assert torch.equal(states(Run({"run": "x"}, out=tmp_path), rounds).value, torch.ones(3) * 2**rounds)
        assert len(CALLS) == calls and len(list(tmp_path.glob("*.pt"))) == 1
    next(tmp_path.glob("state-4-*.json")).unlink()
    with pytest.raises(CheckpointError, match=r"state-3-\w+.pt is missing; remove .*state-3-\w+.json"):
        states(Run({"run": "x"}, out=tmp_path), 5)
    run = Run()
    with pytest.raises(ArgumentError, match="Q may lack this one when S has removed that"):
        run.at("Q", double, torch.ones(3), stage="other", replaces=run.bring("S", torch.ones(3)))


def test_an_estimate_runs_nothing_and_leaves_out_what_is_done(tmp_path: Path):
    run = Run(out=tmp_path)
    algorithm = lambda run: program(run, X, Y)
    assert run.estimate(algorithm) == Estimate(2.0, 10.0) and CALLS == []
    assert run.estimate(algorithm, {product: lambda x, model: Estimate(3.0)}) == Estimate(5.0, 10.0)
    algorithm(run)
    assert Run(out=tmp_path).estimate(algorithm) == Estimate(0.0)


def part(run: Run, name: str, x: Held) -> Held:
    return run.at(name, total, run.at(name, double, x, stage=f"{name}/twice"), stage=f"{name}/sum")


def test_workers_leave_what_one_process_makes(tmp_path: Path):
    names = ("north", "south", "west")
    run = Run(out=tmp_path, workers=Workers(2))
    held = {name: run.bring(name, X + i) for i, name in enumerate(names)}
    found = run.each(names, part, lambda name: (held[name],))
    assert CALLS == [], "the workers did it"
    alone = Run()
    assert [found[n].value for n in names] == [part(alone, n, alone.bring(n, X + i)).value for i, n in enumerate(names)]
    assert [r["stage"] for r in run.records] == [f"{n}/{s}" for n in names for s in ("twice", "sum")]
    with pytest.raises(FederationError, match="hand over their results in the run folder"):
        Run(workers=Workers(2)).each(names, part, lambda name: (held[name],))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_a_digest_tells_values_apart(one, other):
    same = repr(one) == repr(other)
    assert (digest_of(one) == digest_of(other)) == same


class Scaled(nn.Linear):
    """Of one text and one state, whatever the factor is."""

    def __init__(self, factor: float, table: float = 0.0):
        super().__init__(2, 2)
        nn.init.constant_(self.weight, 1.0), nn.init.constant_(self.bias, 0.0)
        self.factor = factor
        self.register_buffer("table", torch.tensor([table]), persistent=False)


def enclosing(value: object):
    return lambda x: (x, value)


@dataclasses.dataclass
class Settings:
    a: int = 1
    b: int = 2


@pytest.mark.parametrize(
    "values",
    [
        [0, False, 0.0, "0", None, b"0", "", [], {}, set()],
        [
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int64),
            torch.zeros(1, 2),
            torch.zeros(2, device="meta"),
            np.zeros(2),
        ],
        [Settings(), Settings(a=2), Settings(b=1), {"a": 1, "b": 2}],
        [double, total, torch.float32, Settings, "Settings", torch.zeros, torch.ones, X.add, (X + 1).add],
        [lambda x: x, lambda x: x + 1, lambda x: x + 2, lambda x, y=1: x, enclosing(1), enclosing(2), enclosing("1")],
        [Scaled(1.0), Scaled(2.0), Scaled(1.0, 3.0), Scaled(1.0).eval(), nn.Linear(2, 2), nn.Sequential(Scaled(1.0))],
        [np.float32(1), np.float64(1), np.int64(1), 1.0, 1, True],
        [torch.ones(2, dtype=t) for t in (torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.uint8)],
        [["ab", "c"], ["a", "bc"], ["abc"], [["ab"], "c"], ["ab", ["c"]]],
        [torch.tensor(1.0), torch.tensor([1.0]), torch.tensor(1), 1.0],
    ],
)
def test_unlike_values_have_unlike_digests(values):
    assert len({digest_of(value) for value in values}) == len(values)


def test_a_traced_module_is_known_by_its_graph():
    """`fhe_friendly` gives modules of `torch.fx`: two traces of one network are one, another activation is another."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    one, other, square = fhe_friendly(plain), fhe_friendly(plain), fhe_friendly(plain, "square")
    assert digest_of(one) == digest_of(other) != digest_of(square)
