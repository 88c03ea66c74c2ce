"""Old forms of the API: each that docs/migrating.md lists with a warning works, warns once, and does as the new one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sectorch
from sectorch import Scheme, choreography, ckks, dp, errors, federated, network, testing
from sectorch.deprecation import MOVED_MODULES, MovedModules
from sectorch.estimators import Ridge
from sectorch.network import aio
from sectorch.network.federation.party import Federation as FederationParty
from sectorch.protocols import capc, capride, privhfl, secsv

ROOT = Path(sectorch.__file__).parent.parent
ROW = re.compile(r"^\| (.+?) \| (.+?) \| warns \|$", re.MULTILINE)
X = torch.linspace(-1, 1, 6).reshape(2, 3)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def scheme_of_call(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    made = f(net(), *args, **kwargs)
    return made.scheme, made(X)


DOCUMENTED = {
    "choreography.parties": "Party, Phase",
    "choreography.program.text": "PartyProgram",
    "choreography.steps": "Sent",
    "ckks.errors": "LevelError, ScaleError",
    "data.errors": "DataError, PartitionError",
    "dp.errors": "BudgetExhaustedError, PrivacyError",
    "federated.errors": "CheckpointError, FederationError",
    "federated.scores": "equal_opportunity, equalized_odds, scores",
    "garbled.confident": "UNANSWERED, argmax_confident_shares",
    "garbled.gates": "argmax_circuit",
    "garbled.shares": "argmax_noisy_shares, argmax_onehot_shares",
    "mpc.smooth.normalise": "normalise",
    "mpc.smooth.trigonometric": "draw_error, trigonometric",
    "mpc.star.claims": "settle",
    "mpc.star.fours": "max_by_fours, max_of_four",
    "mpc.star.largest": "ramp_of_largest",
    "mpc.star.mask": "open_masked",
    "mpc.star.pool": "max_tree",
    "mpc.star.share": "aggregate, aggregate_noisy, reveal, reveal_to_A, reveal_to_S, share",
    "mpc.star.sign": "at_least",
    "mpc.star.streamed": "mask_streamed",
    "mpc.star.within": "raise_outside",
    "network.parties.stage": "Stage",
    "nn.describe": "describe",
    "nn.model_file": "read_model, write_model",
    "nn.program": "load_program",
    "nn.served": "Served",
    "plots": "Plot",
    "privacy": "Budget, BudgetFile, PrivateGradients",
    "protocols.capride.directions": "Directions, features_and_logits",
    "protocols.capride.meter": "Meter",
    "protocols.perturbation.data": "Data, load",
    "protocols.perturbation.federated": "PerturbedFL, Settings, train",
    "protocols.perturbation.masks": "ClientMasks, Opening, cohort",
    "protocols.privhfl.privacy": "curve, epsilon",
    "protocols.secsv.training": "Training, fedavg",
    "ring.scheme": "Scheme",
}
"""Modules by the names that docs, examples and pickles of their classes gave them, and what these imported."""


def import_old(module: str, names: str) -> tuple[Any, ...]:
    """What `from module import names` gives when this process has not imported the module before."""
    for old in [name for name in MOVED_MODULES if name == module or module.startswith(f"{name}.")]:
        sys.modules.pop(old, None)
    imported: dict[str, Any] = {}
    exec(compile(f"from {module} import {names}", __file__, "exec"), imported)  # the user's line is in this file
    return tuple(imported[name] for name in names.split(", "))


def import_new(module: str, names: str) -> tuple[Any, ...]:
    new, renamed = MOVED_MODULES[module]
    return tuple(getattr(importlib.import_module(new), renamed.get(name, name)) for name in names.split(", "))


def names_of(module: Any, **names: str) -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
    """Classes of a module by their old names and by their new ones."""
    return [(lambda old=old: getattr(module, old), lambda new=new: getattr(module, new)) for old, new in names.items()]


def numbers() -> sectorch.SharedTensor:
    return sectorch.share(X, session=sectorch.Session(reference=True))


def a_call() -> sectorch.Inputs:
    return sectorch.Inputs(X)


def encrypted() -> ckks.CKKSTensor:
    return ckks.encrypt(X, depth=1)


def fit_on_shares() -> Any:
    session = sectorch.Session(reference=True)
    x, y = (sectorch.share(v, session=session) for v in (X.repeat(2, 1), torch.arange(4.0)))
    return Ridge(max_iter=3, tol=0.5).fit(x, y)


PRIVATE = {"clip": "max_grad_norm", "noise": "noise_multiplier", "batch": "batch_size"}


def private_gradients(**old: Any) -> Any:
    given = {"max_grad_norm": 2.0, "noise_multiplier": 4.0, "batch_size": 3}
    for name in old:
        del given[PRIVATE[name]]
    model = sectorch.shared(nn.Sequential(nn.Linear(3, 2)), session=sectorch.Session(reference=True))
    return dp.PrivateGradients(model, rows=9, **given, **old)


TRAINING = {
    "optimiser": ("optimizer", "sgd"),
    "batch": ("batch_size", 7),
    "decay": ("gamma", 0.5),
    "smoothing": ("label_smoothing", 0.1),
    "clip": ("max_norm", 2.0),
}


def fields_of(kind: Any, names: dict[str, tuple[str, Any]]) -> list[tuple[Callable[[], Any], Callable[[], Any]]]:
    """A dataclass made with each old name, and read by it."""
    made = [
        (lambda old=old, value=value: kind(**{old: value}), lambda new=new, value=value: kind(**{new: value}))
        for old, (new, value) in names.items()
    ]
    return made + [
        (lambda old=old: getattr(kind(), old), lambda new=new: getattr(kind(), new)) for old, (new, _) in names.items()
    ]


CASES: dict[str, list[tuple[Callable[[], Any], Callable[[], Any]]]] = {
    '`secure(model, frac_bits=16, network="wan")`, and `relu=`': [
        (
            lambda: scheme_of_call(sectorch.secure, frac_bits=16, network="wan"),
            lambda: scheme_of_call(sectorch.secure, Scheme(frac_bits=16, network="wan")),
        ),
        (
            lambda: scheme_of_call(sectorch.secure, activation_limit=1024),
            lambda: scheme_of_call(sectorch.secure, Scheme(limit_bits=10)),
        ),
        (
            lambda: str(sectorch.explain(net(), X, network="wan")),
            lambda: str(sectorch.explain(net(), X, Scheme(network="wan"))),
        ),
        (
            lambda: str(sectorch.diff(net(), X, range_check=False)),
            lambda: str(sectorch.diff(net(), X, Scheme(range_check=False))),
        ),
    ],
    '`secure(model, "privhfl")`': [
        (
            lambda: scheme_of_call(sectorch.secure, "privhfl"),
            lambda: scheme_of_call(sectorch.secure, Scheme(relu="privhfl")),
        ),
        (
            lambda: scheme_of_call(sectorch.reference, "exact"),
            lambda: scheme_of_call(sectorch.reference, Scheme(relu="exact")),
        ),
    ],
    "`estimator.reveal()`, which changed the estimator": [
        (lambda: fit_on_shares().reveal().coef_, lambda: fit_on_shares().revealed().coef_),
    ],
    "`PrivateGradients(clip=, noise=, batch=)`, and the attributes": [
        *(
            (lambda old=old: repr(private_gradients(**old)), lambda: repr(private_gradients()))
            for old in ({"clip": 2.0}, {"noise": 4.0}, {"batch": 3})
        ),
        *(
            (lambda old=old: getattr(private_gradients(), old), lambda new=new: getattr(private_gradients(), new))
            for old, new in PRIVATE.items()
        ),
    ],
    "`sectorch.federated.Training(optimiser=, batch=, decay=, smoothing=, clip=)`, and the attributes": [
        *fields_of(federated.Training, TRAINING),
        (lambda: federated.Training().but(batch=7), lambda: federated.Training().but(batch_size=7)),
    ],
    "`sectorch.protocols.secsv.Training(batch=, decay=)`, and the attributes": fields_of(
        secsv.Training, {"batch": ("batch_size", 7), "decay": ("weight_decay", 0.5)}
    ),
    "`sectorch.protocols.secsv.Settings(skip=True)`, and `skip=False`": [
        (lambda: secsv.Settings(skip=True).skip, lambda: secsv.Settings(skip="saving").skip),  # type: ignore[arg-type]
        (lambda: secsv.Settings(skip=False).skip, lambda: secsv.Settings(skip="never").skip),  # type: ignore[arg-type]
    ],
    '`explain(...).seconds("lan")["ahead"]`': [
        (
            lambda: sectorch.explain(net(), X).seconds("lan")["ahead"],
            lambda: sectorch.explain(net(), X).seconds("lan")["offline"],
        )
    ],
    '`explain(...).seconds("LAN")`, "WAN"': [
        (
            lambda old=old: sectorch.explain(net(), X).seconds(old),
            lambda old=old: sectorch.explain(net(), X).seconds(old.lower()),
        )
        for old in ("LAN", "WAN")
    ],
    **{
        f"`{old}`": [
            (lambda old=old, names=names: import_old(old, names), lambda old=old, names=names: import_new(old, names))
        ]
        for old, names in ((f"sectorch.{old}", names) for old, names in DOCUMENTED.items())
    },
    "`sectorch.ckks.rerandomised`": names_of(ckks, rerandomised="rerandomise"),
    "`sectorch.protocols.capride.Guard`": names_of(capride, Guard="ReleaseLedger"),
    "`CKKSTensor.settled()`": [
        (lambda: encrypted().settled().full_shape, lambda: encrypted().smallest_form().full_shape),
    ],
    "`left` and `right` of `sectorch.ckks.MatrixProduct`": names_of(
        ckks.MatrixReducing(2, 3, 4, 8), left="prepare_left", right="prepare_right"
    ),
    "`sectorch.federated.Federation`": names_of(federated, Federation="FederatedData"),
    "`sectorch.network.aio.Connection`, `Model`, `Federation`": names_of(
        aio, Connection="AsyncConnection", Model="AsyncModel", Federation="AsyncFederation"
    ),
    "`sectorch.testing.Call(...).mapped(f)`": [
        (lambda: testing.Call(2, 3).mapped(float).args, lambda: testing.Call(2, 3).map(float).args),
    ],
    "`asked`, `having`, `holding`, `known` and `staying` of `Inputs`": [
        *(
            (lambda old=old: repr(getattr(a_call(), old)()), lambda new=new: repr(getattr(a_call(), new)()))
            for old, new in {
                "asked": "as_plain_call",
                "known": "describing_shares",
                "staying": "retaining_results",
            }.items()
        ),
        (lambda: a_call().having([X]).tensors, lambda: a_call().with_tensors([X]).tensors),
        (lambda: a_call().holding({}, 1).form, lambda: a_call().with_shared_inputs({}, 1).form),
    ],
    "`over` and `recorded` of `SecureModule`": names_of(
        sectorch.secure(net()), over="with_module", recorded="recording"
    ),
    "`shown()` of profiles, explanations and reports": names_of(sectorch.profile(), shown="sections"),
    "`sectorch.network.Answering.beside`": names_of(object.__new__(network.Answering), beside="at_server"),
    "`sectorch.network.Store.room`": names_of(object.__new__(network.Store), room="free_bytes"),
    "`sectorch.network.federation.party.Federation.taking`": names_of(
        object.__new__(FederationParty), taking="for_run"
    ),
    "`SharedTensor.whole`": [(lambda: numbers().whole, lambda: numbers().is_integral)],
    "`named`, `apart` and `settled` of `Session`": names_of(
        sectorch.Session(reference=True), named="parties_named", apart="is_distributed", settled="run_setup"
    ),
    "`sectorch.network.Pins.known()`": names_of(network.Pins("pins"), known="fingerprints"),
    "`sectorch.choreography.shaped`": names_of(choreography, shaped="with_shapes"),
    "`sectorch.testing.Options`, `Planted`": names_of(testing, Options="CheckOptions", Planted="PlantedFault"),
}
"""By the first column: old and new, each as what can be compared."""

ELSEWHERE = {
    "`--local-optimiser`, `--local-batch`, `--local-smoothing`, and those of `--retraining-`": (
        "tests/federated/test_federated_options.py"
    ),
    "`--require-pin`": "tests/network/test_network_processes.py",
}
"""Rows whose old form is an option of a command that needs processes, and the test that has it."""


def rows() -> list[str]:
    return [old for old, _ in ROW.findall((ROOT / "docs/migrating.md").read_text(encoding="utf-8"))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(np.all(one == other))


def test_each_old_form_that_is_listed_has_a_case():
    assert sorted(rows()) == sorted([*CASES, *ELSEWHERE])
    for row, file in ELSEWHERE.items():
        assert row.split("`")[1] in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("row", CASES)
@pytest.mark.filterwarnings("ignore::sectorch.errors.LeakyProtocolWarning")
def test_old_forms_warn_once_and_do_what_the_new_ones_do(row: str):
    for old, new in CASES[row]:
        expected = new()  # warnings are errors here
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DeprecationWarning)
            found = old()
        assert [w.category for w in caught] == [DeprecationWarning], [str(w.message) for w in caught]
        assert " is " in str(caught[0].message), "the warning spells the new form"
        assert caught[0].filename == __file__, "the warning points at the user's line"
        assert same(found, expected), row


def test_modules_that_moved_are_found_last_and_hide_nothing():
    assert {f"sectorch.{old}" for old in DOCUMENTED} == set(MOVED_MODULES) - {"sectorch.mpc.smooth"}
    assert sys.meta_path.count(MovedModules) == 1  # pyright: ignore[reportArgumentType]
    for old, (new, _) in MOVED_MODULES.items():
        parent, _, name = old.rpartition(".")
        there = vars(importlib.import_module(parent)).get(name) if parent not in MOVED_MODULES else None
        assert there is None or there.__name__ == old, f"{old} is something else"
        assert importlib.util.find_spec(new) is not None
    assert all(MovedModules.find_spec(name) is None for name in ("sectorch", "sectorch.dp", "privacy", "torch.privacy"))
    with pytest.raises(ImportError, match=r"No module named 'sectorch\.nothing'"):
        importlib.import_module("sectorch.nothing")
    with pytest.raises(AttributeError, match=r"module 'sectorch\.testing' has no attribute 'nothing'"):
        _ = testing.nothing


def test_a_scheme_shows_its_fields():
    signature = inspect.signature(Scheme)
    assert {name: p.annotation for name, p in signature.parameters.items()} == {
        "frac_bits": int, "relu": str, "network": str | sectorch.Link, "range_check": bool,
        "limit_bits": int | None, "audited": int, "verified": bool, "accountable": bool,
    }  # fmt: skip
    assert all(p.default == getattr(Scheme(), name) for name, p in signature.parameters.items())
    assert all(f"        {name}: " in (Scheme.__doc__ or "") for name in signature.parameters)
    with pytest.raises(TypeError, match=r"keyword argument 'fracbits'; did you mean Scheme\(frac_bits=...\)"):
        Scheme(fracbits=3)  # pyright: ignore[reportCallIssue]


def test_a_network_by_its_name_is_a_scheme():
    model, wan = net(), Scheme(network="wan")
    session = sectorch.Session()
    assert sectorch.secure(model, "wan").scheme == wan and sectorch.secure(model, scheme="lan").scheme == Scheme()
    assert sectorch.reference(model, "wan").scheme == wan
    assert sectorch.share(X, scheme="wan", session=session).scheme == wan
    assert sectorch.shared(net(), scheme="wan", session=session)[0].weight.as_shared().scheme == wan
    assert str(sectorch.explain(model, X, "wan")) == str(sectorch.explain(model, X, wan))
    assert str(sectorch.diff(model, X, "wan")) == str(sectorch.diff(model, X, wan))
    assert sectorch.secure(model, "wan", calibrate=X).scheme.network == "wan"
    for wrong in ("wlan", "", "WAN"):
        for call in (sectorch.secure, sectorch.reference, lambda m, s: sectorch.share(X, scheme=s)):
            with pytest.raises(errors.ArgumentError, match="a network: lan or wan; got"):
                call(model, wrong)  # pyright: ignore[reportArgumentType]


def test_an_old_name_beside_the_new_one_is_refused():
    with pytest.raises(TypeError, match=r"Training\(\) got both 'batch_size' and its old name 'batch'"):
        federated.Training(batch=3, batch_size=4)  # pyright: ignore[reportCallIssue]
    assert "batch:" not in str(inspect.signature(federated.Training)) and "batch=" not in repr(federated.Training())


SIGNATURES = [
    sectorch.secure, sectorch.explain, sectorch.diff, sectorch.reference, sectorch.share, sectorch.shared,
    sectorch.generate, sectorch.program, sectorch.testing.check_module, sectorch.network.Connection.model,
    sectorch.network.Connection.aggregate,
]  # fmt: skip


@pytest.mark.parametrize("f", SIGNATURES, ids=lambda f: f.__qualname__)
def test_public_signatures_name_what_they_take(f: Callable[..., Any]):
    kinds = {p.kind for p in inspect.signature(f).parameters.values()}
    assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}


def test_pickles_of_classes_that_moved_are_read():
    """A pickle names a class by its module."""
    for moved in (Scheme(frac_bits=18), sectorch.Session(reference=True).Q, secsv.Training(epochs=2)):
        now = type(moved)
        old = {new: name for name, (new, _) in MOVED_MODULES.items()}[now.__module__]
        name = {"LocalTraining": "Training"}.get(now.__name__, now.__name__)
        pickled = pickle.dumps(moved, 0).replace(
            f"c{now.__module__}\n{now.__name__}\n".encode(), f"c{old}\n{name}\n".encode()
        )
        sys.modules.pop(old, None)
        with pytest.warns(DeprecationWarning, match=f"{old} is {now.__module__} now"):
            assert pickle.loads(pickled) == moved


def test_settings_by_place_are_refused():
    """Their first was epsilon once: it must not become another number without a word."""
    positional: tuple[tuple[Any, float], ...] = ((capc.Settings, 0.5), (privhfl.Settings, 0.5), (secsv.Training, 3))
    for kind, value in positional:
        with pytest.raises((errors.SectorchError, TypeError)):
            kind(value, 1e-5)
    assert (capc.Settings(0.5).epsilon, capc.Settings(0.5).delta) == (0.5, 1e-5)
