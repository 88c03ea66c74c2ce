"""Privacy budgets, in memory and on disk, that refuse a query before it would exceed the limit."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from .. import files
from ..errors import BudgetExhaustedError, BudgetFileError, BudgetInUseError, PrivacyError
from .noise import ORDERS, check_delta, check_epsilon, epsilon_of


class Budget:
    """A limit and the sum of all charges: a privacy filter over RDP curves (see `noise.py`).

    Charge before asking. A charge stays if the query then fails, so a run may report more than it spent, and never
    less.

    Args:
        epsilon, delta: the limit.

    Raises:
        PrivacyError: out of range.
    """

    def __init__(self, epsilon: float, delta: float):
        check_epsilon(epsilon)
        check_delta(delta)
        self.limit, self.delta = float(epsilon), float(delta)
        self._curve = np.zeros_like(ORDERS)

    def __repr__(self) -> str:
        return f"Budget(spent {self.spent:.4f} of {self.limit:g}, delta {self.delta:g})"

    @property
    def curve(self) -> np.ndarray:
        """The sum of all charges, over `ORDERS`; a copy."""
        return self._curve.copy()

    @property
    def spent(self) -> float:
        """Epsilon at the budget's delta; 0 before the first charge."""
        return epsilon_of(self._curve, self.delta)

    @property
    def remaining(self) -> float:
        """The limit less the epsilon spent. Later queries add less epsilon than earlier ones."""
        return max(0.0, self.limit - self.spent)

    def affords(self, curve: np.ndarray) -> bool:
        """Whether a charge of this curve fits the limit."""
        return epsilon_of(self._curve + _check_curve(curve), self.delta) <= self.limit

    def check(self, curve: np.ndarray) -> None:
        """Raise unless a charge of this curve fits the limit.

        Raises:
            BudgetExhaustedError: it would exceed the limit.
        """
        if not self.affords(curve):
            raise BudgetExhaustedError(
                f"epsilon {self.spent:.3f} of {self.limit:g} is spent (delta {self.delta:g}), and the next step would "
                f"bring it to {epsilon_of(self._curve + curve, self.delta):.3f}; ask no more, or start with a larger "
                f"budget or more noise"
            )

    def charge(self, curve: np.ndarray) -> None:
        """Add a curve to the charges.

        Raises:
            BudgetExhaustedError: it would exceed the limit; nothing is charged.
        """
        self.check(curve)
        self._curve = self._curve + curve

    def credit(self, curve: np.ndarray) -> None:
        """Take a curve off the charges, for a step that cost less than its worst case, which was charged.

        Raises:
            PrivacyError: more than was charged.
        """
        left = self._curve - _check_curve(curve)
        if (left < -1e-9 * self._curve).any():
            raise PrivacyError("more would be given back than was charged")
        self._curve = np.clip(left, 0, None)

    def restore(self, curve: np.ndarray) -> None:
        """Start a new budget with the charges of an earlier process.

        Raises:
            PrivacyError: the budget has charges already.
        """
        if self._curve.any():
            raise PrivacyError("a budget can be restored only before anything is charged to it")
        self._curve = _check_curve(curve).copy()


def _check_curve(curve: np.ndarray) -> np.ndarray:
    curve = np.asarray(curve, dtype=float)
    if curve.shape != ORDERS.shape or not (curve >= 0).all():
        raise PrivacyError(f"a charge is {len(ORDERS)} numbers from 0, one for each order, got shape {curve.shape}")
    return curve


class BudgetCharge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One charge of a budget file, for people: who asked, how many queries, and whether a part was given back."""

    asker: str
    queries: Annotated[int, msgspec.Meta(ge=0)]
    credited: bool = False


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of a budget file; `charges` are by their marks."""

    epsilon: float
    delta: float
    spent: float
    charges: dict[str, BudgetCharge]
    orders: list[float]
    curve: list[float]
    digest: str = ""

    def checksum(self) -> str:
        """A checksum against damage; it is no protection against the file's owner."""
        content = msgspec.to_builtins(self)
        del content["digest"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class BudgetFile:
    """An organisation's budget on disk, for all runs and all askers together.

        with BudgetFile("budgets/clinic.json", (10, 1e-5)) as file:    # a new file, if there is none
            file.charge(25 * mechanism.curve, mark="...", asker="p1", queries=25)
            ...                                                        # only now the votes are given

        NAME.json        the limit, the sum of all charges for each order, the marks of the charges, and a digest
        NAME.json.lock   locked while a process has the budget

    A charge is on disk before the query that it pays for. The file has the Renyi curve and no epsilon: charges of
    several runs and askers add up order by order, and give an epsilon at the organisation's own delta, whatever delta a
    run has.

    Args:
        path: of the file; only its owner may read it.
        limit: epsilon and delta. A new file gets this limit, and an existing one must have it. Without a limit the file
            must exist, and its own limit applies.

    Raises:
        PrivacyError: a limit out of range.
        BudgetInUseError: another process has it, or another object of this one.
        BudgetFileError: it is damaged, missing, or has another limit. A budget is never started again by itself.
    """

    def __init__(self, path: str | Path, limit: tuple[float, float] | None = None):
        self.path = Path(path)
        if limit is not None:
            check_epsilon(limit[0])
            check_delta(limit[1])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(f"{self.path}.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise BudgetFileError(f"cannot keep a budget in {self.path}: {error.strerror}") from None
        try:
            self._take(limit)
        except BaseException:
            os.close(self._lock)
            raise

    def _take(self, limit: tuple[float, float] | None) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BudgetInUseError(f"the budget {self.path} is in use by another run; wait until it ends") from None
        except OSError as error:
            raise BudgetFileError(f"cannot lock the budget {self.path}: {error.strerror}") from None
        self.new = not os.path.lexists(self.path)
        if not self.new:
            self._read(limit)
        elif limit is None:
            raise BudgetFileError(
                f"there is no budget {self.path}; put it back, or name an epsilon to start it with if it is a new one"
            )
        else:
            self.budget, self._charges = Budget(*limit), {}
            self._write()

    def __enter__(self) -> BudgetFile:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"BudgetFile({self.path}, {self.budget})"

    def close(self) -> None:
        """Unlock the file. It takes no further charges."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def holds(self, mark: str) -> bool:
        """Whether the file has a charge of that mark."""
        return mark in self._charges

    def paid(self, mark: str) -> int:
        """The number of queries that were charged under that mark."""
        return self._charges[mark].queries if mark in self._charges else 0

    def affords(self, curve: np.ndarray) -> bool:
        """Whether a charge of this curve fits the limit."""
        return self.budget.affords(curve)

    def affordable(self, most: int, curve: np.ndarray, mark: str) -> int:
        """How many of `most` queries are paid: those charged under that mark, or those that still fit the limit."""
        if self.holds(mark):
            return min(most, self.paid(mark))
        while most and not self.affords(most * curve):
            most -= 1
        return most

    def check(self, curve: np.ndarray) -> None:
        """Raise unless a charge of this curve fits the limit.

        Raises:
            BudgetExhaustedError: it would exceed the limit.
        """
        if not self.affords(curve):
            raise BudgetExhaustedError(
                f"the budget {self.path} has spent epsilon {self.budget.spent:.3f} of {self.budget.limit:g} (delta "
                f"{self.budget.delta:g}) over all runs and askers, and the next step would overrun it; leave "
                f"{self.path.stem} out, ask less, or use more noise"
            )

    def charge(self, curve: np.ndarray, mark: str, asker: str, queries: int) -> None:
        """Add a curve to the charges and write the file.

        Args:
            mark: a unique name of the charge. A mark that the file has already is not charged again.
            asker, queries: the asker and the number of queries, for people who read the file.

        Raises:
            BudgetExhaustedError: it would exceed the limit; nothing is charged.
            BudgetFileError: the file was closed, or cannot be written.
        """
        if self.holds(mark):
            return
        self.check(curve)
        self.budget.charge(curve)
        self._charges[mark] = BudgetCharge(asker, queries)
        self._write()

    def credit(self, curve: np.ndarray, mark: str | None = None) -> None:
        """Take a curve off the charges, for a step that cost less than its worst case, which was charged.

        Args:
            mark: of the charge of which a part is given back: once, however often it is asked for.

        Raises:
            PrivacyError: more than was charged.
            BudgetFileError: as `charge`.
        """
        if mark is not None:
            if not self.holds(mark) or self._charges[mark].credited:
                return
            self._charges[mark] = replace(self._charges[mark], credited=True)
        self.budget.credit(curve)
        self._write()

    def withdraw(self, curve: np.ndarray, mark: str) -> None:
        """Take a charge back, of a step that was not taken.

        Raises:
            PrivacyError: more than was charged.
            BudgetFileError: as `charge`.
        """
        if self.holds(mark):
            self.budget.credit(curve)
            del self._charges[mark]
            self._write()

    def _write(self) -> None:
        if self._lock < 0:
            raise BudgetFileError(f"the budget {self.path} was closed; open it again")
        budget = self.budget
        content = _Content(
            epsilon=budget.limit, delta=budget.delta, spent=budget.spent, charges=self._charges,
            orders=ORDERS.tolist(), curve=budget.curve.tolist(),
        )  # fmt: skip
        content = msgspec.to_builtins(replace(content, digest=content.checksum()))
        try:
            files.write(self.path, json.dumps(content, indent=1).encode(), 0o600)
        except OSError as error:
            raise BudgetFileError(f"cannot write the budget {self.path}: {error.strerror}") from None

    def _read(self, limit: tuple[float, float] | None) -> None:
        try:
            content = msgspec.convert(json.loads(self.path.read_bytes()), _Content)
            if content.digest != content.checksum():
                raise ValueError("its digest is another")
            if content.orders != ORDERS.tolist():
                raise ValueError("other orders")
            self.budget, self._charges = Budget(content.epsilon, content.delta), content.charges
            self.budget.restore(np.asarray(content.curve))
        except (OSError, ValueError, RecursionError, msgspec.ValidationError, PrivacyError) as error:
            raise BudgetFileError(
                f"the budget {self.path} cannot be read ({type(error).__name__}); put back a copy that lacks no charge"
            ) from error
        own = self.budget.limit, self.budget.delta
        if limit is not None and own != (float(limit[0]), float(limit[1])):
            raise BudgetFileError(
                f"the budget {self.path} allows epsilon {own[0]:g} at delta {own[1]:g}, not {limit[0]:g} at "
                f"{limit[1]:g}; name its own, or none"
            )


@contextmanager
def charge(
    budgets: Iterable[Budget | BudgetFile], mechanism: Any, count: int, *, mark: str | None = None, asker: str = ""
) -> Iterator[None]:
    """Charge budgets for `count` answers of a mechanism, before anything is asked; in the block they may be asked.

        with charge([BudgetFile(path) for path in paths], mechanism, len(votes)):
            labels = mechanism.release(votes)

    All budgets are charged, or none. A charge stays whatever happens in the block, since an answer may have been heard.

    Args:
        mechanism: its `curve` is the cost of one answer, over `ORDERS`.
        mark: names the question; a new one unless given. A `BudgetFile` that holds the mark is not charged again: ask
            a question again under its mark only with the same noise.
        asker: for people who read the files.

    Raises:
        BudgetExhaustedError: one of them does not afford it; nothing was charged.
        BudgetFileError: a file cannot be written.
    """
    mark, curve = mark or secrets.token_hex(16), count * mechanism.curve
    due = [b for b in budgets if not (isinstance(b, BudgetFile) and b.holds(mark))]
    for budget in due:
        budget.check(curve)
    for budget in due:
        if isinstance(budget, BudgetFile):
            budget.charge(curve, mark, asker, count)
        else:
            budget.charge(curve)
    yield
