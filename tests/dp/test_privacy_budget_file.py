"""A budget on disk: what it holds after any sequence of processes, what it refuses, and who may have it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import PIPE, Command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sectorch.dp import (
    ORDERS,
    Budget,
    BudgetExhaustedError,
    BudgetFile,
    BudgetFileError,
    BudgetInUseError,
    GNMax,
    LNMax,
    PrivacyError,
    charge,
    epsilon_for,
    epsilon_of,
)

LIMIT = (10.0, 1e-5)
QUERY = GNMax(8.0).curve


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([GNMax(4.0), LNMax(6.0), GNMax(20.0)]), st.booleans()), max_size=12))
def test_over_any_sequence_of_processes_it_is_the_budget_in_memory(tmp_path, steps):
    """Charges add up order by order, refused ones change nothing, and a mark is paid once."""
    path, memory = tmp_path / f"{len(list(tmp_path.iterdir()))}.json", Budget(*LIMIT)
    file = BudgetFile(path, LIMIT)
    for i, (mechanism, again) in enumerate(steps):
        refused = None
        try:
            memory.charge(mechanism.curve)
        except BudgetExhaustedError as error:
            refused = error
        for _ in range(1 + again):
            if refused is None:
                file.charge(mechanism.curve, f"m{i}", "p1", 1)
            else:
                with pytest.raises(BudgetExhaustedError, match=r"over all runs and askers, .* leave \d+ out"):
                    file.charge(mechanism.curve, f"m{i}", "p1", 1)
            file.close()
            file = BudgetFile(path)
        assert (file.budget.curve == memory.curve).all() and file.holds(f"m{i}") == (refused is None)
    file.close()


def test_epsilons_are_not_added_but_curves(tmp_path: Path):
    path = tmp_path / "a.json"
    for i in range(2):
        with BudgetFile(path, LIMIT) as file:
            file.charge(10 * QUERY, f"run {i}", f"p{i}", 10)
    spent = json.loads(path.read_text())
    assert spent["spent"] == epsilon_of(20 * QUERY, 1e-5) < 2 * epsilon_of(10 * QUERY, 1e-5)
    assert spent["charges"] == {f"run {i}": {"asker": f"p{i}", "queries": 10} for i in range(2)}


def test_only_its_owner_may_read_it(tmp_path: Path):
    with BudgetFile(tmp_path / "in" / "a.json", LIMIT):
        for path in (tmp_path / "in", *(tmp_path / "in").iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_two_at_once(tmp_path: Path):
    with BudgetFile(tmp_path / "a.json", LIMIT), BudgetFile(tmp_path / "b.json", LIMIT):
        with pytest.raises(BudgetInUseError, match="is in use by another run; wait until it ends"):
            BudgetFile(tmp_path / "a.json", LIMIT)
    with BudgetFile(tmp_path / "a.json") as file:
        file.charge(QUERY, "m", "p1", 1)
    with pytest.raises(BudgetFileError, match="was closed"):
        file.charge(QUERY, "n", "p1", 1)


def test_another_limit_or_none(tmp_path: Path):
    path = tmp_path / "a.json"
    with pytest.raises(BudgetFileError, match=r"there is no budget .*; put it back, or name an epsilon"):
        BudgetFile(path)
    assert not path.exists()
    with BudgetFile(path, LIMIT) as file:
        assert file.new
        file.charge(QUERY, "m", "p1", 1)
    for other in ((10.0, 1e-6), (11.0, 1e-5)):
        with pytest.raises(BudgetFileError, match=r"allows epsilon 10 at delta 1e-05, not .*; name its own, or none"):
            BudgetFile(path, other)
    for bad in ((0.0, 1e-5), (1.0, 2.0)):
        with pytest.raises(PrivacyError, match="must be above 0"):
            BudgetFile(path, bad)
    with BudgetFile(path) as file:
        assert not file.new and (file.budget.curve == QUERY).all()
    path.unlink()
    path.symlink_to(tmp_path / "unmounted")
    with pytest.raises(BudgetFileError, match="cannot be read"):
        BudgetFile(path, LIMIT)


def signed(content: dict) -> dict:
    """The content of a file with the checksum that its other entries have."""
    content.pop("digest")
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def test_a_file_as_json_is_read_whatever_its_layout(tmp_path: Path):
    """Also with a curve that is infinite at some orders, as a mechanism's may be."""
    path = tmp_path / "a.json"
    with BudgetFile(path, LIMIT) as file:
        file.charge(np.where(ORDERS[-2] < ORDERS, np.inf, QUERY), "m", "p1", 7)
        curve = file.budget.curve
    content = json.loads(path.read_bytes())
    path.write_text(json.dumps(signed(dict(reversed(content.items())))))
    with BudgetFile(path, LIMIT) as file:
        assert (file.budget.curve == curve).all() and np.isinf(curve).any() and file.paid("m") == 7


def test_any_damage_is_refused_and_left_as_it_is(tmp_path: Path):
    """Cut anywhere, or any digit of it changed: it is not read, and not replaced by a new one."""
    path = tmp_path / "a.json"
    with BudgetFile(path, LIMIT) as file:
        file.charge(QUERY, "m", "p1", 1)
    whole = path.read_bytes()
    cuts = [whole[:n] for n in range(0, len(whole) - 1, 997)]
    digits = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    flips = [whole[:i] + str(9 - int(chr(whole[i]))).encode() + whole[i + 1 :] for i in digits[::211]]
    shapes = [b"[]", b"null", b'"a"', b"{}", b"[" * 100_000]
    wrong = [{"curve": [1.0]}, {"more": 1}, {"charges": {"m": {"asker": "p1"}}}, {"charges": []}, {"epsilon": "10"}]
    shapes += [json.dumps(signed({**json.loads(whole), **entry})).encode() for entry in wrong]
    for damaged in (*cuts, *flips, *shapes):
        path.write_bytes(damaged)
        with pytest.raises(BudgetFileError, match=r"cannot be read .* put back a copy that lacks no charge"):
            BudgetFile(path, LIMIT)
        assert path.read_bytes() == damaged
    path.write_bytes(whole)
    with BudgetFile(path, LIMIT) as file:
        assert file.holds("m")


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BudgetFileError, match="cannot keep a budget in"):
        BudgetFile(tmp_path / "file" / "a.json", LIMIT)


def test_credit_gives_back_no_more_than_was_charged(tmp_path: Path):
    with BudgetFile(tmp_path / "a.json", LIMIT) as file:
        file.charge(5 * QUERY, "m", "p1", 5)
        file.credit(2 * QUERY)
        with pytest.raises(PrivacyError, match="more would be given back"):
            file.credit(4 * QUERY)
    with BudgetFile(tmp_path / "a.json") as file:
        np.testing.assert_allclose(file.budget.curve, 3 * QUERY)


CHARGES = """
import sys
from sectorch.dp import BudgetFile, GNMax
with BudgetFile(sys.argv[1]) as file:
    for i in range(10_000):
        file.charge(GNMax(8000.0).curve, f"m{i}", "p1", 1)
        print(i, flush=True)
"""


def test_a_process_that_is_killed_has_charged_what_it_said(tmp_path: Path):
    """kill -9 at any moment: the file is whole, holds every charge that was reported and at most one more."""
    path = tmp_path / "a.json"
    BudgetFile(path, LIMIT).close()
    with Command([sys.executable, "-c", CHARGES, str(path)], stdout=PIPE) as process:
        assert process.stdout is not None
        for _ in range(25):
            process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        said = 25 + len(process.stdout.read().splitlines())
    with BudgetFile(path, LIMIT) as file:
        charged = round(float(file.budget.curve[0] / GNMax(8000.0).curve[0]))
        assert charged in (said, said + 1)
        assert all(file.holds(f"m{i}") for i in range(charged)) and not file.holds(f"m{charged}")
        np.testing.assert_allclose(file.budget.curve, charged * GNMax(8000.0).curve)
        assert file.budget.curve.shape == ORDERS.shape


def test_charge_is_before_the_block_for_all_or_none_and_once_for_a_mark(tmp_path: Path):
    query, run = GNMax(8.0), Budget(10, 1e-5)
    wide, narrow = (BudgetFile(tmp_path / f"{name}.json", (epsilon, 1e-5)) for name, epsilon in (("a", 10), ("b", 1.0)))
    with charge([run, wide], query, 5, mark="m", asker="p1"):
        assert run.spent == wide.budget.spent == epsilon_for(query, 5, 1e-5) and wide.paid("m") == 5
    with charge([wide], query, 5, mark="m"):
        assert wide.budget.spent == epsilon_for(query, 5, 1e-5), "paid already"
    with pytest.raises(BudgetExhaustedError, match=r"b\.json has spent"), charge([wide, narrow], query, 50):
        raise AssertionError("asked")
    assert wide.budget.spent == epsilon_for(query, 5, 1e-5) and not narrow.budget.curve.any()
    with pytest.raises(KeyError), charge([wide], query, 1, mark="n"):
        raise KeyError
    assert wide.holds("n"), "a charge stays"
    for _ in range(2):
        wide.credit(2 * query.curve, "m")
    assert wide.budget.spent == epsilon_for(query, 4, 1e-5)
    wide.close()
    with BudgetFile(tmp_path / "a.json") as again:
        again.credit(2 * query.curve, "m")
        again.credit(2 * query.curve, "unknown")
        assert again.budget.spent == epsilon_for(query, 4, 1e-5), "given back once, over runs"
    narrow.close()
