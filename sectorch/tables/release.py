"""Governed release: what leaves the shares is decided by a policy, in shares, and charged before it is sent.

    policy = sectorch.Policy(minimum=10, rounding=5, releases=3)
    result = sectorch.release(statistic, policy, to="Q", name="age by sex", ledger="ledger")

A cell with fewer rows than `minimum` is withheld. Its value and its count are multiplied by the secret bit
[count >= minimum] before they are opened, so that what is opened of it is 0 and the bit. Whoever knows the rule
and the number of all rows may still compute how large withheld cells can be, at times exactly (docs/governance.md).

**Differencing within a release.** The number of all rows is public, so the withheld cells of a line (the cells along
one dimension) together are a group whose size a reader may compute. Where that group has fewer rows than `minimum`, the
smallest other cell of the line is withheld as well, along each dimension in turn (secondary suppression). One cell is
enough, as it has `minimum` rows or more; the rows that are in no cell count as one more withheld cell where the number
of rows is given. Totals are not released beside cells: the learner adds up the cells of a line of which none is
withheld, and of others there is no total.

**Across releases.** A ledger counts them: `releases` for each ledger, 1 unless the policy says more, and one ledger is
of one data set. Two releases of overlapping groups can be subtracted from each other, and without noise no rule for a
single release prevents it. With `epsilon` each release has noise, and the budget bounds all of them together.

**Noise.** A and S each add discrete Gaussian noise of their own to their halves (`dp/gradients.py`), each enough for
epsilon. Nobody knows the sum of both. The bits are then of noisy counts, and cost nothing.

**Repeats.** A and S store their halves of the noisy result before either sends its own. A release that is repeated
under its name opens the stored halves: the same bits, without a second charge, so that repeats do not average the noise
out. A noise that is derived from the name instead would be the same for two different data sets, and cancel in their
difference. After a crash before both have stored theirs nobody has learned anything, and the noise is drawn anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from msgspec import Meta

from .. import files
from ..choreography import Party
from ..dp.budget import BudgetFile
from ..dp.gradients import add_noise
from ..dp.mechanisms import scale_for
from ..dp.noise import gaussian_curve
from ..errors import ArgumentError, BudgetFileError, PrivacyError, SectorchError
from ..ops.rounding import floor_value
from ..sealed import SealedHead, key_of, read_tensors, seal, unseal, write_tensors
from ..session import Session
from ..tensor import SharedTensor
from ..tensor.holders import one_hot_argmax
from ..tensor.shared import round_shares
from ..tensor.table import Context
from ..transcript import Agreement
from .statistics import Axis, HypothesisTest, LabelledResult, Origin, Statistic, origin_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports] # before Python 3.11


class PolicyError(SectorchError, ValueError):
    """A policy that is contradictory or cannot be evaluated, or a release that it does not cover. Nothing was released.

    Example:
        a release is under a Policy, got a dict; sectorch.Policy(minimum=10)

    What to do:
        Correct what the text names: the policy, the name of the release, or its ledger. A ledger is of one policy and
        one data set, and a name of one release.
    """


_Whole = Annotated[int, Meta(ge=2, lt=1 << 31, description="a whole number from 2")]
_Above = Annotated[float, Meta(gt=0, lt=1e6, description="a number above 0")]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules by which statistics leave the shares. All of them hold together.

    Args:
        minimum: fewest rows of a cell that is released.
        k: of a table of groups: where any group has 1 to k - 1 rows, no cell of the table is released.
        rounding: counts and whole-number values are released as multiples of it, the nearest, half up; at most
            `minimum`.
        step: as `rounding`, of values with fractions: the nearest multiple, within 1/8 of a step; the one beside it at
            times, where the step is no multiple of the last place (2^-20).
        epsilon, delta: differential privacy of each release, where the content of one row is replaced. Discrete
            Gaussian noise is added in shares. A cell below the minimum is then released with a probability of at most
            delta, for the counts are noisy.
        budget: the epsilon, at the same delta, of all releases of a ledger together.
        releases: the number of releases of a ledger; 0 sets no limit. 1 by default; with epsilon 0, as the budget is
            the limit.
        counts: whether the counts are released beside the values.
        plain: whether a party with [governed] releases tensors and statistics that the program made itself, with counts
            that are the program's word. False by default: then only what sectorch's functions made of tables is.

    Raises:
        PolicyError: an entry of another type or range, one that is missing beside another, or two that contradict.
    """

    minimum: _Whole | None = None
    k: _Whole | None = None
    rounding: _Whole | None = None
    step: _Above | None = None
    epsilon: _Above | None = None
    delta: Annotated[float, Meta(gt=0, lt=1, description="a number between 0 and 1")] | None = None
    budget: _Above | None = None
    releases: Annotated[int, Meta(ge=0, lt=1 << 31, description="a whole number, 0 for no limit")] | None = None
    counts: Annotated[bool, Meta(description="true or false")] = True
    plain: Annotated[bool, Meta(description="true or false")] = False

    def __post_init__(self):
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:  # a whole number where a fraction may stand becomes one, so that both give one digest
                msgspec.structs.force_setattr(self, field.name, msgspec.convert(value, field.type, strict=True))
            except (msgspec.ValidationError, TypeError):
                raise PolicyError(
                    f"{field.name} of a policy is {_description(field.type)}, got {value!r:.40}"
                ) from None
        for text in self._contradictions():
            raise PolicyError(text)

    def _contradictions(self) -> Iterator[str]:
        if self.minimum is None and self.epsilon is None:
            yield "a policy names a minimum or an epsilon, and this one names neither; Policy(minimum=10)"
        noise = {"epsilon": self.epsilon, "delta": self.delta, "budget": self.budget}
        lacking = [name for name, value in noise.items() if value is None]
        if 0 < len(lacking) < 3:
            yield f"epsilon, delta and budget belong together, and this policy has no {' and no '.join(lacking)}"
        if self.epsilon is not None and self.budget is not None and self.budget < self.epsilon:
            yield f"a budget of {self.budget:g} does not afford one release of epsilon {self.epsilon:g}"
        if self.k is not None and self.epsilon is not None:
            yield "k looks at exact counts, and epsilon allows noisy ones only; leave one of them out"
        if self.rounding is not None and self.minimum is not None and self.rounding > self.minimum:
            yield f"rounding to {self.rounding} could show the minimum of {self.minimum} as none; at most the minimum"

    @property
    def limit(self) -> int:
        """The number of releases of a ledger; 0 for no limit."""
        return self.releases if self.releases is not None else int(self.epsilon is None)

    @property
    def digest(self) -> str:
        """SHA-256 of all entries, by which ledgers, receipts and the parties of a session know a policy."""
        content = msgspec.to_builtins(self)
        if not self.plain:  # ledgers from before there was this entry keep their policy
            del content["plain"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def text(self) -> str:
        """The entries in words, for people."""
        found = {k: v for k, v in msgspec.to_builtins(self).items() if v is not None} | {"releases": self.limit}
        usual = {"counts": True, "plain": False}
        return ", ".join(f"{name} {value}" for name, value in found.items() if usual.get(name) is not value)

    @classmethod
    def read(cls, path: str | Path) -> Policy:
        """The policy of a TOML file, whose keys are those of the constructor.

        Raises:
            PolicyError: it cannot be read, is no TOML, or names no valid policy; the text has the file's name.
        """
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise PolicyError(f"cannot read the policy {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{path} is not TOML: {str(error)[:200]}") from None
        known = [field.name for field in msgspec.structs.fields(cls)]
        if unknown := sorted(set(content) - set(known)):
            raise PolicyError(f"{path}: a policy has no {unknown[0]!r:.40}; it has {', '.join(known)}")
        try:
            return cls(**content)
        except PolicyError as error:
            raise PolicyError(f"{path}: {error}") from None


def _description(kind: Any) -> str:
    kinds = [getattr(kind, "__origin__", kind), *getattr(kind, "__args__", ())]
    metas = [m for k in (kind, *kinds) for m in getattr(k, "__metadata__", ())]
    return next((m.description for m in metas if m.description), "of another type")


# The ledger of a party: the names of its releases, its budget, and its halves of what was released.


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One release in a ledger: the digest of what was asked, its cells, and the epsilon that its noise gives.

    `complete` once all holders have stored their halves, and before this party sends its own.
    """

    facts: str
    cells: int
    epsilon: float
    complete: bool = False


class _LedgerContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    policy: str
    releases: dict[str, _Entry]
    digest: str = ""

    def checksum(self) -> str:
        """A checksum against damage; it is no protection against the file's owner."""
        content = msgspec.to_builtins(self)
        del content["digest"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class StoredRelease(SealedHead, frozen=True, kw_only=True):
    """The head of a stored half: the draw that both holders have in common, and the digest of what was asked."""

    draw: int
    facts: str


class PolicyLedger:
    """What one party has released under one policy, in a folder of its own.

        FOLDER/releases.json    the policy's digest and the names of all releases
        FOLDER/budget.json      the budget (`sectorch.dp.BudgetFile`), where the policy has noise
        FOLDER/*.release        this party's halves of what was released, sealed under FOLDER/key

    A charge is on the disk before the first message of its release. Several runs, of one federation or several, may
    use a ledger; each locks it while it charges.

    Raises:
        PolicyError: the folder cannot be used.
    """

    def __init__(self, folder: str | Path, party: str):
        self.folder, self._party = Path(folder), party
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._key = key_of(self.folder / "key")
        except OSError as error:
            raise PolicyError(f"cannot keep a ledger in {self.folder}: {error.strerror}") from None
        except ArgumentError as error:
            raise PolicyError(str(error)) from None

    def __repr__(self) -> str:
        return f"PolicyLedger({self.folder})"

    def locked(self) -> AbstractContextManager[None]:
        """Keep other runs from charging in the block. Raises PolicyError: one has charged for longer than 20 seconds.

        The other parties' order of runs may be another, so no wait is without end.
        """
        return self._alone("lock", f"another run charges the ledger {self.folder}, or holds its lock: repeat this one")

    def alone(self, request: Request) -> AbstractContextManager[None]:
        """Keep other runs from this name in the block. Raises PolicyError: one is under way for over 20 seconds."""
        return self._alone(
            self._half(request).with_suffix(".lock").name,
            f"another run of the release {request.name!r:.60} is under way in {self.folder}: repeat this one when it "
            f"has ended",
        )

    @contextmanager
    def _alone(self, name: str, error: str) -> Iterator[None]:
        handle = self._open(name)
        try:
            until = time.monotonic() + _WAIT
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise PolicyError(error) from None
                    time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    def _open(self, name: str) -> int:
        try:
            return os.open(self.folder / name, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise PolicyError(f"cannot lock the ledger {self.folder}: {error.strerror}") from None

    @property
    def place(self) -> tuple[int, int]:
        """Which folder it is, by whatever path."""
        found = self.folder.stat()
        return found.st_dev, found.st_ino

    def is_complete(self, policy: Policy, request: Request) -> bool:
        """Whether all holders had stored their halves of this release."""
        entry = self._read(policy).releases.get(request.name)
        return entry is not None and entry.complete

    def complete(self, policy: Policy, request: Request) -> None:
        """Write that all holders have stored their halves, so that none is ever drawn again."""
        with self.locked():
            content = self._read(policy)
            entry = content.releases.get(request.name)
            if entry is None:
                raise PolicyError(f"the ledger {self.folder} has lost the release {request.name!r:.60}: put it back")
            if not entry.complete:
                self._write(content, request.name, msgspec.structs.replace(entry, complete=True))

    def check(self, policy: Policy, request: Request) -> bool:
        """Whether this release is charged already; the caller has locked the ledger.

        Raises:
            PolicyError: the ledger is damaged or of another policy, the name stands for another release, or there were
                as many releases as the policy allows.
            BudgetExhaustedError, BudgetFileError: as of `BudgetFile`.
        """
        content = self._read(policy)
        if (entry := content.releases.get(request.name)) is not None:
            if entry.facts != request.facts:
                raise PolicyError(
                    f"the ledger {self.folder} has a release {request.name!r:.60} of something else; give this one "
                    f"another name"
                )
            return True
        if policy.limit and len(content.releases) >= policy.limit:
            raise PolicyError(
                f"the ledger {self.folder} has {len(content.releases)} releases, as many as its policy allows: what is "
                f"released already stays available under its name"
            )
        if policy.epsilon is not None:
            with self._budget(policy, content) as budget:
                if not budget.holds(request.name):
                    budget.check(request.curve)
        return False

    def charge(self, policy: Policy, request: Request) -> None:
        """Write that a release begins, and pay for it; the caller has locked and checked the ledger."""
        content = self._read(policy)
        if request.name in content.releases:
            return
        if policy.epsilon is not None:
            with self._budget(policy, content) as budget:  # a charge without an entry is found by its mark
                budget.charge(request.curve, request.name, "release", request.cells)
        entry = _Entry(request.facts, request.cells, policy.epsilon or 0.0)
        self._write(content, request.name, entry)

    def withdraw(self, policy: Policy, request: Request) -> None:
        """Take back a charge of this run, of which nobody has stored a half."""
        with self.locked():
            content = self._read(policy)
            self._write(content, request.name, None)  # first: a charge without an entry is found by its mark
            if policy.epsilon is not None:
                with self._budget(policy, content) as budget:
                    budget.withdraw(request.curve, request.name)

    def _write(self, content: _LedgerContent, name: str, entry: _Entry | None) -> None:
        others = {n: e for n, e in content.releases.items() if n != name}
        content = msgspec.structs.replace(content, releases=others if entry is None else {**others, name: entry})
        content = msgspec.structs.replace(content, digest=content.checksum())
        try:
            files.write(self._path, json.dumps(msgspec.to_builtins(content), indent=1).encode(), 0o600)
        except OSError as error:
            raise PolicyError(f"cannot write the ledger {self.folder}: {error.strerror}") from None

    def load(self, request: Request) -> tuple[StoredRelease, list[Any]] | None:
        """This party's halves of an earlier run of the release; None if it has stored none.

        Raises:
            PolicyError: they are damaged. A new draw in their place would show the same numbers under other noise.
        """
        path = self._half(request)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise PolicyError(f"cannot read {path}: {error.strerror}") from None
        try:
            opened = unseal(self._key, io.BytesIO(content), len(content), self._about(request))
            return read_tensors(opened, StoredRelease)
        except (InvalidTag, ValueError):
            raise PolicyError(
                f"{path} is not whole, or was sealed by another party: put it back, for the release cannot be drawn "
                f"twice"
            ) from None

    def store(self, request: Request, draw: int, halves: Sequence[torch.Tensor]) -> None:
        """Store this party's halves, before it sends its own or receives another's."""
        parts, _ = write_tensors({"draw": draw, "facts": request.facts}, list(halves))
        try:
            files.write(self._half(request), b"".join(seal(self._key, parts, self._about(request))), 0o600)
        except OSError as error:
            raise PolicyError(f"cannot store a release in {self.folder}: {error.strerror}") from None

    @property
    def _path(self) -> Path:
        return self.folder / "releases.json"

    def _half(self, request: Request) -> Path:
        return self.folder / f"{hashlib.sha256(request.name.encode()).hexdigest()[:32]}.release"

    def _about(self, request: Request) -> bytes:
        return f"sectorch v1/release/{self._party}/{request.facts}".encode()

    def _budget(self, policy: Policy, content: _LedgerContent) -> BudgetFile:
        """The budget; one that had charges and is missing is not started again."""
        limit = float(policy.budget or 0), float(policy.delta or 0)
        path = self.folder / "budget.json"
        if content.releases and not path.exists():
            raise BudgetFileError(f"there is no budget {path}, and the ledger has releases: put it back")
        return BudgetFile(path, limit)

    def _read(self, policy: Policy) -> _LedgerContent:
        if not os.path.lexists(self._path):
            return _LedgerContent(policy=policy.digest, releases={})
        try:
            content = msgspec.convert(json.loads(self._path.read_bytes()), _LedgerContent)
            if content.digest != content.checksum():
                raise ValueError
        except (OSError, ValueError, RecursionError, msgspec.ValidationError):
            raise PolicyError(
                f"the ledger {self._path} cannot be read; put back a copy that lacks no release"
            ) from None
        if content.policy != policy.digest:
            raise PolicyError(
                f"the ledger {self.folder} is of the policy {content.policy[:16]}, and this release is under "
                f"{policy.digest[:16]}: two policies of one data set would not count each other's releases"
            )
        return content


@dataclass(frozen=True)
class Request:
    """What a release asks for. All of it is public.

    Args:
        name: of the release. facts: digest of the policy, the statistic's public facts, and who learns it.
        cells: values that are released at most. curve: Renyi cost of the noise, zeros without.
    """

    name: str
    facts: str
    cells: int
    curve: np.ndarray


def _no_record(_: Mapping[str, Any]) -> None:
    return None


@dataclass(frozen=True, eq=False)
class ReleaseGovernor:
    """What a party of a federation makes of the releases in its runs (`network/federation/reveals.py`).

    Args:
        policy: the party's own; releases under another one are refused.
        folder: of its ledger, which stands in place of one that the program names.
        record: writes a receipt; called once a release is charged, and at the learner again once it has it.
    """

    policy: Policy
    folder: Path
    record: Callable[[Mapping[str, Any]], None] = _no_record


_governors: weakref.WeakKeyDictionary[Any, ReleaseGovernor] = weakref.WeakKeyDictionary()
"""By a session's `agreement`, and not at the session, since an attribute of it is the word of the program."""


def govern(session: Session, governor: ReleaseGovernor) -> None:
    """Hold the releases of a session to a party's policy and ledger, as long as the session lives.

    Raises:
        PolicyError: the session is held to another one.
    """
    if _governors.setdefault(session.agreement, governor) is not governor:
        raise PolicyError("this session is held to a policy already")


class GovernedResult(LabelledResult):
    """A result under a policy: NaN and `withheld` where a cell is withheld.

    Attributes:
        counts: the rows of each value, NaN where they are withheld; None if the policy keeps them.
        policy: the digest of the policy. name: of the release.
        epsilon: of this release; 0 without noise.
    """

    counts: torch.Tensor | None = None
    policy = ""
    name = ""
    epsilon = 0.0


def release(
    statistic: Any,
    policy: Policy,
    *,
    to: Any = None,
    name: str | None = None,
    ledger: str | Path | None = None,
    counts: SharedTensor | None = None,
    rows: int | None = None,
    row_bound: float | None = None,
    cells_per_row: int | None = None,
) -> GovernedResult:
    """Show a statistic to the named parties (Q by default) as far as a policy allows it, and charge it before.

    Args:
        statistic: of a table's functions (`Statistic`), or a shared tensor with `counts`. At a party with [governed] a
            tensor, or a `Statistic` that no function of sectorch made, needs a policy with `plain`.
        policy: the rules. All parties of the session need the same.
        to: who learns it, as of `SharedTensor.reveal`.
        name: of the release in the ledger. A release that is repeated under its name gives the same result, bit for
            bit, without a second charge, whatever has become of the data.
        ledger: the folder in which each party of this process keeps a ledger (FOLDER/PARTY). A policy with a limit of
            releases or with noise needs one. In a run of a party whose own file has [governed], that party's ledger
            stands in its place.
        counts: of a plain tensor: the rows of each value, whole numbers in shares; for counts themselves the same
            tensor. Of the values' shape, or one that broadcasts to it.
        rows: the number of all rows, if it is public and cells need not have all of them. A Statistic of a table that
            is not padded has that of the table before any filter.
        row_bound: of a plain tensor, for noise: how far one row can move all values together (L2).
        cells_per_row: for noise: how many cells one row can be in, 1 for groups that do not overlap; all of them unless
            given.

    Returns:
        The values with their labels; of shape alone at parties that do not learn them.

    Rounds and bytes: a comparison of each count, a tournament of the cells of a line for each dimension, products, and
    two reveals; between processes 2 rounds in which all compare what is asked, and with a ledger 2 for the charge and 4
    for the halves. What is opened is, for each cell, the bit and, where it is 1, the value and the count, rounded or
    with noise as the policy says. Nobody else learns anything; all parties learn the name and the public facts. Exact
    where there is no noise and no `step`.

    Raises:
        PolicyError: the policy cannot be evaluated for this statistic, the ledger is of another one, or the name of
            another release. BudgetExhaustedError, BudgetFileError: a budget does not afford it. Nothing was released.
        DisagreementError: parties have another policy, name or statistic.
        RangeExceededError: a value on which it depends left its range (without noise; with noise there is no check).
    """
    if type(policy) is not Policy:
        raise PolicyError(f"a release is under a Policy, got a {type(policy).__name__}; sectorch.Policy(minimum=10)")
    asked = _Asked.of(statistic, counts, row_bound, cells_per_row, policy)
    if rows is not None and (type(rows) is not int or rows < 1):
        raise PolicyError(f"rows is the public number of all rows, from 1, got {rows!r:.40}")
    if rows is not None and asked.origin is None and sum(size > 1 for size in asked.counts.shape) > 1:
        raise PolicyError("rows is of cells of one dimension; release a table of several without it")
    session, party = asked.values.session, asked.values.party
    learners = session.parties_named(to, party)
    governor = _governors.get(session.agreement)
    if governor is not None and governor.policy.digest != policy.digest:
        raise PolicyError(
            f"this party releases under its own policy {governor.policy.digest[:16]} ({governor.policy.text}), and the "
            f"program's is {policy.digest[:16]} ({policy.text})"
        )
    if governor is not None:
        policy = governor.policy
    if governor is not None and not policy.plain:
        _check_made(asked, rows)
    if ledger is not None and (not isinstance(ledger, (str, Path)) or "\0" in str(ledger)):
        raise PolicyError(f"ledger is the path of a folder, got {ledger!r:.40}")
    folder = governor.folder if governor is not None else None if ledger is None else Path(ledger)
    ledgered = bool(policy.limit or policy.epsilon is not None or ledger is not None)
    members = [member for member in sorted(session.parties, key=lambda p: p.name) if session.present(member)]
    if ledgered and folder is None and members:
        raise PolicyError(
            "this policy limits what is released in all, and there is no ledger to count it: name a folder, "
            "release(..., ledger='ledger', name='...'), or set no limit, Policy(releases=0), if each release may be "
            "subtracted from each other one"
        )
    if ledgered and (type(name) is not str or not 0 < len(name) <= 200 or not name.isprintable()):
        raise PolicyError(
            f"a release has a name, 1 to 200 printable characters, by which it is charged once; got {name!r:.40}"
        )
    if not ledgered and name is not None and type(name) is not str:
        raise PolicyError(f"the name of a release is a text, got {name!r:.40}")
    facts = [policy.digest, name, [p.name for p in learners], asked.described(), rows]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    request = Request(name or "", digest, asked.values.numel(), asked.curve)
    _check_public(asked, policy, rows)
    ledgers: dict[Party, PolicyLedger] = {}
    if ledgered and folder is not None:
        for member in members:
            own = folder if governor is not None else folder / member.name
            ledgers[member] = PolicyLedger(own, member.name)
        if len({each.place for each in ledgers.values()}) < len(ledgers):
            raise PolicyError(f"two parties have one ledger under {folder}; each keeps its own")
    about = {
        "name": name or "", "policy": policy.digest, "asked": asked.text, "to": ", ".join(p.name for p in learners),
        "cells": request.cells, "epsilon": policy.epsilon or 0.0,
    }  # fmt: skip
    shown = policy.digest if asked.origin is not None or policy.plain else ""
    choice = _Choice(session, party, shown, governor)
    session.agreement.note(party, "release", digest)
    session.agreement.compare(party)  # before anybody is charged for what others do not ask
    with ExitStack() as stack:
        for each in ledgers.values():
            stack.enter_context(each.alone(request))
        if ledgered:
            _charge_all(list(ledgers.values()), choice, policy, request)
        if governor is not None:
            governor.record(about)
        opened = _Released(asked, policy, rows)
        tensors = opened.tensors
        if ledgered:
            tensors = _stored(tensors, choice, ledgers, request, policy)
        checks = sum(3 for x in tensors if x.flags)  # a range check is one element more, or two of its own
        with _granted(session, shown, tensors, sum(x.shape.numel() for x in tensors) + checks, governor):
            plain = [x.reveal(list(learners)) for x in tensors]
    result = opened.result(plain)
    result.policy, result.name, result.epsilon = policy.digest, name or "", policy.epsilon or 0.0
    if governor is not None and result.withheld is not None:
        governor.record({**about, "withheld": int(result.withheld.sum())})
    return result


_WAIT = 20.0
"""Seconds for which a run waits for another of the same name."""


class _Grant:
    """What one release may reveal now: some tensors of its own, element by element for each way of a message."""

    def __init__(
        self, session: Session, policy: str, of: Sequence[torch.Tensor], elements: int, governor: ReleaseGovernor | None
    ):
        self.session, self.policy, self.governor = session, policy, governor
        self._of, self._elements = tuple(of), elements
        self._spent: dict[Any, int] = {}

    def covers(self, way: Any, elements: int) -> bool:
        """Whether the message that this thread sends opens a tensor of the grant, and not more of it than there is."""
        if not self.is_opened():
            return False
        self._spent[way] = self._spent.get(way, 0) + max(1, elements)
        return self._spent[way] <= self._elements

    def is_opened(self) -> bool:
        """Whether `release` opens one of the tensors, and no other code runs between it and the message.

        A program may have code run here by hooks: attributes of a session, modes of torch, profilers, observers.
        """
        frame, opens = sys._getframe(1), None
        while frame is not None and frame.f_code is not release.__code__:
            if not frame.f_code.co_filename.startswith(_OWN_CODE):
                return False
            if opens is None and frame.f_code in _OPENERS:
                opens = frame
            frame = frame.f_back
        if frame is None or opens is None:
            return False
        opened = opens.f_locals[_OPENERS[opens.f_code]]
        if opens.f_back is not None and opens.f_back.f_code is SharedTensor.check_range.__code__:
            if opened.shape.numel():  # a check opens no element
                return False
            opened = opens.f_back.f_locals["self"]
        return any(opened is x for x in self._of)


_OWN_CODE = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", contextlib.__file__)
"""Places of the code that may run between a release and its messages."""
_OPENERS = {
    SharedTensor.reveal.__code__: "self", SharedTensor.open.__code__: "self",
    Agreement.choose_and_broadcast.__code__: "own",
}  # fmt: skip
"""The functions by which values leave a release, and what each of them calls the value."""
_grants = threading.local()


@contextmanager
def _granted(
    session: Session, policy: str, of: Sequence[torch.Tensor], elements: int, governor: ReleaseGovernor | None
) -> Iterator[None]:
    """In the block `release` may open these tensors, of so many elements, under this policy, in this thread."""
    before = getattr(_grants, "current", None)
    _grants.current = _Grant(session, policy, of, elements, governor)
    try:
        yield
    finally:
        _grants.current = before


def policy_of_message(session: Session, way: Any, elements: int, governor: ReleaseGovernor | None) -> str:
    """The policy under which this thread sends a message that shows so many elements; empty if no release covers it.

    Args:
        way: its protocol, sender, receiver and learner; each has what the release opens, once.
        governor: that of the party's run, by whose ledger the release was charged.
    """
    grant = getattr(_grants, "current", None)  # a session may come as a weak proxy
    if grant is None or grant.session.agreement is not session.agreement or grant.governor is not governor:
        return ""
    if not grant.covers(way, elements):
        return ""
    return grant.policy


def is_confirmed(session: Session, governor: ReleaseGovernor) -> bool:
    """Whether this thread may confirm what the parties compare now: no reveal, or one of a release under the policy.

    Parties that hold no half of a tensor send nothing of its reveal but this confirmation, for which the others wait.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Agreement.compare.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code is not SharedTensor.reveal.__code__:
        return True
    grant = getattr(_grants, "current", None)
    if grant is None or grant.session.agreement is not session.agreement or grant.governor is not governor:
        return False
    return grant.policy == governor.policy.digest and grant.is_opened()


@dataclass(frozen=True)
class _Choice:
    """How the parties of a release tell each other whole numbers: under the policy, from their own process."""

    session: Session
    party: Party
    policy: str
    governor: ReleaseGovernor | None

    def of(self, name: str, own: list[int], choose: Callable[..., torch.Tensor]) -> torch.Tensor:
        """choose(what all parties say), which all learn. Rounds 2, bytes 16 for each number and party but S."""
        said = torch.tensor(own, dtype=torch.int64)
        with _granted(self.session, self.policy, [said], len(own), self.governor):
            return self.session.agreement.choose_and_broadcast(self.party, name, said, choose)


def _check_public(asked: _Asked, policy: Policy, rows: int | None) -> None:
    """Refuse before the charge what `_Released` would refuse after it; all of this is public."""
    if rows is not None and rows >= 1 << 40:
        raise PolicyError(f"rows is the public number of all rows, below 2^40, got {rows!r:.40}")
    counts, values = _whole(asked.counts), asked.values
    bounds = [_bound_of(counts), _bound_of(values)]
    if policy.epsilon is not None:
        bounds[0] += _noise_bound(counts, asked.sigma)
        bounds[1] += 0 if asked.same else _noise_bound(values, asked.spread)
    step = policy.rounding if _is_whole(values) else policy.step
    cases: list[tuple[float | None, int, int]] = [(policy.rounding, 0, bounds[0])]
    if not asked.same:
        cases.append((step, values.scale_bits, bounds[1]))
    for each, scale_bits, most in cases:
        if each is not None:
            r = _step(each, scale_bits)
            _division((2 * (most + 1 + r) + r).bit_length(), r)


def _charge_all(ledgers: list[PolicyLedger], choice: _Choice, policy: Policy, request: Request) -> None:
    """Charge the ledgers of all parties, or none: where one cannot be charged, the others take their charges back.

    Rounds 2 and 8 bytes for each party but S, between processes.

    Raises:
        PolicyError, BudgetExhaustedError, BudgetFileError: of a ledger here, or PolicyError for another party's.
    """
    error, fresh = None, []
    try:
        fresh = _charge(ledgers, policy, request)
    except SectorchError as own:
        error = own
    try:
        all_can = choice.of("charged", [int(error is None)], _least)
        if not all_can.is_meta and not int(all_can):
            raise error or PolicyError(
                f"another party's ledger does not allow the release {request.name!r:.60}, and nobody was charged: see "
                f"that party's own log"
            )
    except BaseException:  # also of a lost connection: no half of this run is sent without this party
        for ledger in fresh:
            ledger.withdraw(policy, request)
        raise


def _charge(ledgers: list[PolicyLedger], policy: Policy, request: Request) -> list[PolicyLedger]:
    """Charge all ledgers of this process, or none; those that had no charge of this release are returned."""
    charged: list[PolicyLedger] = []
    error = None
    with ExitStack() as stack:
        for ledger in ledgers:
            stack.enter_context(ledger.locked())
        fresh = [ledger for ledger in ledgers if not ledger.check(policy, request)]
        try:
            for ledger in fresh:
                charged.append(ledger)
                ledger.charge(policy, request)
        except SectorchError as own:  # a full disk
            error = own
    if error is not None:
        for ledger in charged:
            with suppress(SectorchError):
                ledger.withdraw(policy, request)
        raise error
    return fresh


def _least(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values).amin(0)


# What is asked, and what the policy makes of it.


@dataclass(frozen=True)
class _Asked:
    """A statistic that a policy can be evaluated for, with the noise that it needs."""

    values: SharedTensor
    counts: SharedTensor
    axes: tuple[Axis, ...]
    kind: str
    defined: SharedTensor | None
    same: bool
    sigma: float
    spread: float
    curve: np.ndarray
    source: str
    origin: Origin | None

    @classmethod
    def of(
        cls, statistic: Any, counts: Any, row_bound: float | None, cells_per_row: int | None, policy: Policy
    ) -> _Asked:
        if cells_per_row is not None and (type(cells_per_row) is not int or cells_per_row < 1):
            raise PolicyError(f"cells_per_row is a whole number from 1, got {cells_per_row!r:.40}")
        if isinstance(statistic, Statistic) and type(statistic) not in (Statistic, HypothesisTest):
            raise PolicyError(f"a release is of a Statistic, got a {type(statistic).__name__}")
        origin = origin_of(statistic) if isinstance(statistic, Statistic) else None
        if origin is not None:
            statistic = origin.statistic
        many = 1 if origin is None else origin.many
        if isinstance(statistic, Statistic):
            if counts is not None or row_bound is not None:
                raise PolicyError("counts and row_bound are of a plain tensor; a Statistic has its own")
            values, counts, axes, kind = statistic.values, statistic.counts, statistic.axes, statistic.kind
            defined, moves = statistic.defined, statistic.row_bound
            _check_cells(statistic, origin, policy, cells_per_row)
            # A row that is in one cell of a group has a value in each column.
            last = axes[len(axes) - (0 if origin is None else origin.columns) :]
            last = last if origin is not None else [axis for axis in axes if axis.name in ("column", "with")]
            columns = math.prod(len(axis.labels) for axis in last)
            cells_per_row = None if cells_per_row is None else cells_per_row * columns
            moves = None if moves is None else moves * math.sqrt(min(cells_per_row or values.numel(), values.numel()))
        else:
            values, kind, defined, moves = statistic, "statistic", None, row_bound
            if type(values) is not SharedTensor:
                raise PolicyError(f"a release is of a Statistic or a shared tensor, got a {type(values).__name__}")
            axes = tuple(Axis(f"dimension {i}", tuple(range(n))) for i, n in enumerate(values.shape))
        if type(counts) is not SharedTensor:
            raise PolicyError(
                f"a release of a {kind} needs the number of rows behind each value, in shares: release(x, policy, "
                f"counts=...); without them no minimum can be checked"
            )
        session, party = values.session, values.party
        if counts.session is not session or counts.party != party:
            raise PolicyError("values and counts are of one session and one answering party")
        if party == session.Q:
            raise PolicyError("a tensor that Q and the server hold is not released; release it before it is collected")
        if counts.scale_bits and not counts.is_integral:
            raise PolicyError("counts are whole numbers in shares, and these have fraction bits")
        cells_per_row = min(cells_per_row or counts.numel(), max(1, counts.numel()))
        same = counts is values or counts.shares is values.shares
        try:
            fits = torch.broadcast_shapes(counts.shape, values.shape) == values.shape
        except RuntimeError:
            fits = False
        if not fits or not values.numel():
            raise PolicyError(f"counts of shape {tuple(counts.shape)} do not belong to values of {tuple(values.shape)}")
        fractions = values.scale_bits and not values.is_integral
        if policy.rounding is not None and fractions and policy.step is None and policy.epsilon is None:
            raise PolicyError(
                f"the policy rounds counts, and a {kind} with all its digits would show what rounding takes away: "
                f"name a step for values with fractions, Policy(rounding=..., step=0.1)"
            )
        sigma, spread, curve = 0.0, 0.0, np.zeros_like(gaussian_curve(1.0, 1.0))
        if policy.epsilon is not None and policy.delta is not None:
            if not same and not (isinstance(moves, (int, float)) and 0 < moves < math.inf):
                raise PolicyError(
                    f"how far one row can move a {kind} is not known, so no noise hides it: release the counts and "
                    f"sums that it is computed from, or name row_bound for a plain tensor"
                )
            if origin is not None and (values.flags or counts.flags):
                raise PolicyError(
                    f"the {kind} is of columns or filters whose range is checked, and noise for a range that does not "
                    f"hold hides nothing: have owners bring them, or clamp what is computed (x.clamp(low, high))"
                )
            parts = 1 if same else 2
            try:
                unit = scale_for("gaussian", policy.epsilon, policy.delta, parts) / math.sqrt(2)
            except PrivacyError as error:
                raise PolicyError(f"the policy cannot be evaluated: {error}") from None
            sigma = many * unit * math.sqrt(min(2 * cells_per_row, counts.numel()))
            spread = 0.0 if same else many * unit * 2 * float(moves or 0.0)
            curve = parts * gaussian_curve(unit, 1.0)
        source = statistic.source if isinstance(statistic, Statistic) else ""
        return cls(values, counts, axes, kind, defined, same, sigma, spread, curve, source, origin)

    @property
    def text(self) -> str:
        of = f" of {self.source}" if self.source else ""
        return f"{self.kind}{of} {[axis.name for axis in self.axes]} {list(self.values.shape)}"

    def described(self) -> list[Any]:
        """The public facts of what is asked, for the digest."""
        axes = [[axis.name, [str(label) for label in axis.labels]] for axis in self.axes]
        facts = [self.kind, axes, list(self.counts.shape), self.defined is not None, self.sigma, self.spread]
        if self.origin is not None:
            facts.append(["of", *self.origin.of, *([f"many {self.origin.many}"] if self.origin.many > 1 else [])])
        return [*facts, self.source] if self.source else facts


def _check_made(asked: _Asked, rows: int | None) -> None:
    """Refuse at a party with [governed] what rests on the program's word."""
    if asked.origin is None:
        raise PolicyError(
            f"the counts of this {asked.kind} are the program's word, for no function of sectorch made it: this party "
            f"releases what statistics and evaluations of sectorch give; a policy with plain = true releases others too"
        )
    if rows is not None and rows != asked.origin.rows:
        raise PolicyError(
            f"rows={rows} is the program's word, and this {asked.kind} is of {asked.origin.rows or 'padded'} rows: "
            f"leave rows out, or name a policy with plain = true"
        )


def _check_cells(statistic: Statistic, made: Origin | None, policy: Policy, cells_per_row: int | None) -> None:
    """Refuse without noise what a minimum does not protect: differences of one row, and rows' own values."""
    kind = statistic.kind
    if policy.epsilon is not None:
        if statistic.cells == "nested" and cells_per_row is not None:
            raise PolicyError(f"a row may be in all cells of a {kind}: leave cells_per_row out")
        if statistic.defined is not None:
            raise PolicyError(
                f"whether a {kind} has a value would be told without noise: release the counts and sums that it is "
                f"computed from"
            )
        return
    if statistic.cells == "nested":
        raise PolicyError(
            f"the rows of one value of a {kind} are part of another's, so that the difference of two counts may be one "
            f"row, whatever the minimum: release it under a policy with epsilon, or groups that have no row in common"
        )
    if statistic.cells == "extreme":
        raise PolicyError(f"a {kind} is one row's own value, whatever the minimum: release a quantile, with a step")
    if statistic.cells == "ranked" and policy.step is None:
        raise PolicyError(
            f"a {kind} is one row's own value, or between two: name a step to which values are rounded, "
            f"Policy(minimum=..., step=1.0)"
        )
    if made is not None and made.disguised:
        raise PolicyError(
            f"a {kind} of a flag tells how many rows have it, which no minimum of the rows behind it protects: release "
            f"count(by=[...]) with the flag among its groups, or sum or mean"
        )
    if made is not None and sum(made.flags) > 1:
        raise PolicyError(
            f"a {kind} of several flags tells how many rows have one and not another, which no minimum looks at: "
            f"release count(by=[...]) with the flags among its groups, or one flag"
        )
    if made is not None and made.uneven:
        raise PolicyError(
            f"the columns of this {kind} may have values of other rows, or be computed of each other, so that their "
            f"difference is of a few: release one column at a time, each as a release of its own, or have owners bring "
            f"them as they are"
        )
    if made is not None and made.shows_counts and (policy.rounding is not None or not policy.counts):
        raise PolicyError(
            f"a {kind} contains exact numbers of rows, which this policy rounds or keeps: release mean and variance"
        )


class _Released:
    """The tensors that are opened for a release: for each cell the bit, the count, and the value."""

    def __init__(self, asked: _Asked, policy: Policy, rows: int | None):
        counts, values, noisy = _whole(asked.counts), asked.values, policy.epsilon is not None
        made, many = asked.origin, 1 if asked.origin is None else asked.origin.many
        minimum = None if policy.minimum is None else policy.minimum * many
        k = None if policy.k is None else (policy.k - 1) * many + 1
        few = max(minimum or 0, k or 0)  # of numbers of rows that are not those of cells
        if made is not None and any(x is not None for x in (made.ones, made.behind)):
            counts = cast(SharedTensor, counts.expand(values.shape))
        # A reader may know the rows of all cells from elsewhere, even if not all rows are in one.
        lines = rows is None or made is not None
        if rows is None and made is not None:
            rows = made.rows
        if noisy:  # whether a value left its range would be told without noise
            counts = _noisy(counts.unchecked(), asked.sigma)
            values = counts if asked.same else _noisy(values.unchecked(), asked.spread)
        bits: Any = torch.ones_like(counts) if policy.minimum is None else _at_least(counts, _threshold(asked, policy))
        if not noisy and minimum is not None:
            if lines and rows is not None:
                bits = _with_secondary(bits, counts, minimum, None)
            bits = _with_secondary(bits, counts, minimum, rows, made is not None and made.columns == 1)
            if made is not None and made.ranks:
                bits = bits.expand(values.shape) * _inner(counts, made.ranks, few).reshape(values.shape)
                counts = cast(SharedTensor, counts.expand(values.shape))
            if made is not None and made.behind is not None:
                # Sums of the numbers behind are below those of their groups together, so the groups that are withheld
                # have `minimum` together, too.
                bits = _with_secondary(bits * _at_least(made.behind, few), made.behind, few, None)
            if made is not None and made.ones is not None:
                bits = bits * _both_kinds(made.ones, counts, made.flags, few)
            if made is not None and made.cells is not None:
                small = (_at_least(made.cells, 1) - _at_least(made.cells, few)).sum()
                bits = bits * (1 - _at_least(small, 1))
            if made is not None and made.crossed is not None:
                rows_of, columns_of = (_at_least(made.crossed.sum(dim, keepdim=True), 1) for dim in (1, 0))
                small: Any = (rows_of * columns_of - _at_least(made.crossed, few)).sum()
                bits = bits * (1 - _at_least(small, 1))
        if k is not None:
            small = (_at_least(counts, 1) - _at_least(counts, k)).sum()
            if rows is not None:
                by_column = made is not None and made.columns == 1
                rest: Any = rows - (counts.reshape(-1, counts.shape[-1]).sum(0) if by_column else counts.sum())
                small = small + (_at_least(rest, 1) - _at_least(rest, k)).sum()
            bits = bits * (1 - _at_least(small, 1))
        self._asked, self._cells = asked, counts.shape
        self._shows_counts = policy.counts or asked.same
        self._count_step = policy.rounding
        whole: list[Any] = [bits]
        if self._shows_counts:
            whole.append(_multiples(_where(bits, counts), policy.rounding))
        self._value_step = policy.rounding if _is_whole(asked.values) else policy.step
        parts: list[SharedTensor] = []
        if not asked.same:
            shape = tuple(asked.values.shape)
            if asked.defined is not None:
                defined = _where(bits.expand(shape), _whole(asked.defined).expand(shape))
                whole.append(defined)
                values = _where(defined, values)
            parts = [_multiples(_where(bits.expand(shape), values), self._value_step)]
        flat: Any = torch.cat([x.reshape(-1) for x in whole])
        self.tensors = [_fewer_bits(x) for x in (flat, *parts)]

    def result(self, plain: list[torch.Tensor]) -> GovernedResult:
        """The labelled result, from what was opened."""
        asked, shape = self._asked, tuple(self._asked.values.shape)
        if plain[0].is_meta:
            return GovernedResult(torch.empty(shape, dtype=torch.float64, device="meta"), asked.axes, asked.kind)
        cells, flat = self._cells.numel(), plain[0]
        bits = flat[:cells].view(self._cells).bool()
        counts = flat[cells : 2 * cells].view(self._cells).double() if self._shows_counts else None
        if counts is not None:
            counts = torch.where(bits, counts * (self._count_step or 1), math.nan)
        withheld = ~bits.expand(shape)
        if asked.same:
            values = counts if counts is not None else torch.empty(0)
        else:
            values = torch.where(withheld, math.nan, self._in_steps(plain[1].double()))
            if asked.defined is not None:
                there = flat[-values.numel() :].view(shape).bool()
                values = torch.where(there, values, math.nan)
        found = GovernedResult(values, asked.axes, asked.kind, withheld)
        found.counts = counts if counts is None else counts.expand(shape)
        return found

    def _in_steps(self, k: torch.Tensor) -> torch.Tensor:
        """The multiples of the policy's step next to k steps of the ring, of which a step may be no multiple."""
        if self._value_step is None:
            return k
        scale_bits = 0 if _is_whole(self._asked.values) else self._asked.values.scale_bits
        unit = _step(self._value_step, scale_bits) * 2.0**-scale_bits
        return torch.round(k * unit / self._value_step) * self._value_step


def _where(bits: Any, x: Any) -> SharedTensor:
    """x where the bit is 1, and else 0: a product that is exact in the ring whatever x holds, and checks no range.

    All that depends on a cell's content comes after it, so that nothing tells what a withheld cell holds. Without a
    minimum the bits are public ones.
    """
    if not isinstance(bits, SharedTensor):
        return x
    with x.session.operation(x.party):
        made = x.like(x.backend.multiply(torch.mul, x.shares, bits.shares), bound=x.bound)
    made.whole_bits, made.flags = x.whole_bits, (*dict.fromkeys((*x.flags, *bits.flags)),)
    return made


def _is_whole(x: SharedTensor) -> bool:
    return not x.scale_bits or x.is_integral


def _whole(x: SharedTensor) -> SharedTensor:
    """Whole numbers, without fraction bits, as int64."""
    x = cast(SharedTensor, x.to(torch.int64))
    return x.like(x.shares, 0, x.bound, dtype=torch.int64)


def _at_least(x: SharedTensor, least: int) -> SharedTensor:
    """[x >= least] as whole numbers 0 and 1."""
    bits: Any = x >= least
    return bits.like(bits.shares, 0, 1.0, dtype=torch.int64)


def _bound_of(x: SharedTensor) -> int:
    """A public bound of the elements' magnitudes, as ring elements."""
    return math.ceil(min(2.0**45, x.bound if x.bound is not None else 2.0**45)) + 1


def _context_of(x: SharedTensor) -> Context:
    return Context(x.session, x.party, x.scheme)


def _noisy(x: SharedTensor, sigma: float) -> SharedTensor:
    """x with noise of A's and of S's own, of deviation sigma each."""
    bound = _bound_of(x) + _noise_bound(x, sigma)
    with x.session.operation(x.party):
        return add_noise(_context_of(x), x, sigma).bounded(float(bound))


def _noise_bound(x: SharedTensor, sigma: float) -> int:
    """A public bound of both parties' noise, in ring elements."""
    if not 0 < sigma * 2.0**x.scale_bits <= 2.0**40:
        raise PolicyError(
            f"the noise would have deviation {sigma:g}, which {x.scale_bits} fraction bits do not hold; allow a larger "
            f"epsilon, or name a smaller limit of the values"
        )
    return math.ceil(80 * sigma * 2.0**x.scale_bits)


def _threshold(asked: _Asked, policy: Policy) -> int:
    """The fewest rows, by noisy counts so many that of all cells none has fewer than the minimum but by delta."""
    minimum = (policy.minimum or 0) * (1 if asked.origin is None else asked.origin.many)
    if policy.minimum is None or policy.delta is None:
        return minimum
    deviation = math.sqrt(2) * asked.sigma  # of both parties' noise
    return minimum + math.ceil(deviation * math.sqrt(2 * math.log(asked.counts.numel() / policy.delta)))


def _inner(counts: Any, ranks: tuple[float, ...], minimum: int) -> SharedTensor:
    """1 where a quantile has at least `minimum` rows on either side, its own among them: it is no extreme.

    Neighbours that both have them are shown where `minimum` rows or more are from one to the other. So the quantiles
    that are shown count no smaller groups, as the bins of a histogram.
    """
    least = [math.ceil((minimum - 1) / min(q, 1 - q)) + 1 if 0 < q < 1 else 1 << 40 for q in ranks]
    order = sorted(dict(zip(ranks, least, strict=True)).items())
    near = [(p, q, max(m, n), math.ceil(minimum / (q - p)) + 1) for (p, m), (q, n) in itertools.pairwise(order)]
    near = [pair for pair in near if pair[2] < pair[3]]
    limits = [*least, *(n for *_, low, high in near for n in (low, high))]
    wide = counts.reshape(1).expand(len(limits))
    with counts.session.operation(counts.party):
        own = wide.like(wide.shares - torch.tensor(limits), 0, 2.0**41, dtype=torch.int64)
    reached: Any = _at_least(own, 0)
    bits = reached[: len(ranks)]
    for i, (p, q, *_) in enumerate(near):
        both, apart = (reached[len(ranks) + 2 * i + j] for j in (0, 1))
        bits = bits * (1 - (both - apart) * torch.tensor([int(rank in (p, q)) for rank in ranks]))
    return bits


def _both_kinds(ones: Any, counts: Any, flags: tuple[bool, ...], minimum: int) -> SharedTensor:
    """1 where a flag's column has `minimum` rows or more of each kind, with 1 and with 0; 1 for other columns.

    Also no row of a kind is too few: then all rows of the group are known to be of the other.
    """
    scale = ones.scale_bits
    with counts.session.operation(counts.party):
        own = counts.like(counts.shares << scale, scale, _bound_of(counts) * 2.0**scale, dtype=ones.dtype)
    found: Any = _at_least(ones, minimum) * _at_least(own - ones, minimum)
    return found if all(flags) else 1 - (1 - found) * torch.tensor(flags).to(torch.int64)


def _with_secondary(bits: Any, counts: Any, minimum: int, rows: int | None, columns: bool = False) -> SharedTensor:
    """The bits after secondary suppression, along each dimension in turn.

    A withheld group of a line has no rows that a reader could count, or `minimum` rows or more. A cell that is withheld
    along one dimension has `minimum` rows or more, so the lines of the dimensions before keep that property. Where the
    number of all rows is public, all cells (of each column, where the last dimension is one of columns) are a line too.
    """
    groups = len(counts.shape) - int(columns)
    if rows is None or sum(size > 1 for size in counts.shape[:groups]) > 1:
        for dim, size in enumerate(counts.shape if rows is None else counts.shape[:groups]):
            if size > 1:
                moved = _line(bits.movedim(dim, -1), counts.movedim(dim, -1), minimum, None)
                bits = moved.movedim(-1, dim)
    if rows is None:
        return bits
    if not columns:
        return _line(bits.reshape(1, -1), counts.reshape(1, -1), minimum, rows).reshape(counts.shape)
    bits, own = (x.reshape(-1, x.shape[-1]).movedim(-1, 0) for x in (bits, counts))
    found: Any = _line(bits, own, minimum, rows).movedim(0, -1)
    return found.reshape(counts.shape)


def _line(bits: Any, counts: Any, minimum: int, rows: int | None) -> SharedTensor:
    """Withhold one more cell of each line, the last dimension, whose withheld cells have too few rows together."""
    hidden = 1 - bits
    number, together = hidden.sum(-1), (counts * hidden).sum(-1)
    if rows is not None:
        rest = rows - counts.sum(-1)
        number, together = number + _at_least(rest, 1), together + rest
    lacking = _at_least(number, 1) * (1 - _at_least(together, minimum))
    if bits.shape[-1] == 1:
        return bits * (1 - lacking.unsqueeze(-1))
    most = _bound_of(counts) + 1
    with counts.session.operation(counts.party):
        score = counts.like(-counts.shares + most, 0, 2.0 * most) * bits  # 0 of withheld cells, largest of the smallest
        first = counts.like(one_hot_argmax(score).shares, 0, 1.0, dtype=torch.int64)
    return bits * (1 - first * lacking.unsqueeze(-1))


def _multiples(x: SharedTensor, step: float | None) -> SharedTensor:
    """How many steps x is, the nearest whole number, half up; x itself without a step.

    floor(y / r) is floor(y m / 2^s) with m = ceil(2^s / r): exact for 0 <= y < 2^b where 2^s >= 2^b r (Granlund and
    Montgomery, PLDI 1994). Where the ring has no room for that, the last d bits of y are dropped first, and a quotient
    within 1/8 of a boundary may be rounded to the other side.
    """
    if step is None:
        return x
    r, most = _step(step, x.scale_bits), _bound_of(x)
    shift = (most // r + 1) * r
    bits = (2 * (most + r) + r).bit_length()
    drop, scale = _division(bits, r)
    factor, context = -(-(1 << (scale + drop)) // r), _context_of(x)
    with x.session.operation(x.party):
        y = x.like(x.shares + (shift + r // 2), drop, 2.0**bits, dtype=torch.float32)
        y = floor_value(context, y) if drop else y
        product = x.like(y.shares * factor, scale, 2.0 ** (bits - drop) * factor, dtype=torch.float32)
        k = floor_value(context, product)
        return k.like(k.shares - shift // r, 0, float(most // r + 2), dtype=torch.int64)


def _step(step: float, scale_bits: int) -> int:
    """A step in ring elements."""
    if (r := round(step * 2**scale_bits)) < 1:
        raise PolicyError(f"a step of {step:g} is below the last place of {scale_bits} fraction bits")
    return r


def _division(bits: int, r: int) -> tuple[int, int]:
    """d and s of `_multiples`, for y below 2^bits.

    Raises:
        PolicyError: no choice is precise enough.
    """
    quotient = max(1, -(-(1 << bits) // r)).bit_length()  # bits of the largest quotient
    room = 59 - quotient
    if bits + r.bit_length() <= room:
        return 0, bits + r.bit_length()
    errors = {
        d: 2.0**bits / r / max(1, (1 << (room + d)) // r) + (2.0**d / r if d else 0) for d in range(r.bit_length())
    }
    drop = min(errors, key=errors.__getitem__)
    if room < 1 or errors[drop] > 1 / 8:
        raise PolicyError("values up to their public limit are too large to round in shares; name a smaller limit")
    return drop, room


def _fewer_bits(x: SharedTensor) -> SharedTensor:
    """x with at most the scheme's fraction bits, as float64 where it has some: the others would show more."""
    with x.session.operation(x.party):
        shares, scale_bits = round_shares(x.backend, x.shares, x.scale_bits, x.scheme)
        dtype = torch.float64 if scale_bits else torch.int64
        return x.like(shares, scale_bits, x.bound if scale_bits == x.scale_bits else None, dtype=dtype)


# Halves that are stored before they are opened.


def _stored(
    tensors: list[SharedTensor], choice: _Choice, ledgers: Mapping[Party, PolicyLedger], request: Request,
    policy: Policy,
) -> list[SharedTensor]:  # fmt: skip
    """The tensors of the first run of this release that both holders have stored; these ones, stored, if there is none.

    Rounds 4 and 56 bytes for each party but S, between processes.

    Raises:
        PolicyError: a holder has written that the release was complete, and a half of it is gone.
    """
    session, party = choice.session, choice.party
    holders = list(dict.fromkeys((party, session.S)))
    kept = {member: ledgers[member].load(request) for member in holders if member in ledgers}
    draws = {0 if each is None else each[0].draw for each in kept.values()}
    own = draws.pop() if len(draws) == 1 else 0 if draws else _NO_HALF
    fresh = int.from_bytes(os.urandom(7), "big") + 1
    complete = int(any(each.is_complete(policy, request) for each in ledgers.values()))
    chosen = choice.of("release", [own, fresh, complete], _common_draw)
    again, fresh, lost = (0, fresh, 0) if chosen.is_meta else chosen.tolist()
    if lost or (complete and not again):
        raise PolicyError(
            f"the release {request.name!r:.60} was complete, and a holder lacks its half, or has another: put it back, "
            f"for a release is not drawn twice"
        )
    halves = []
    with session.operation(party) as net:
        for x in tensors:
            backend = session.backend(net, x.scheme)
            halves.append([backend.export_shares(value) for value in (x.shares, *x.flags)])
    for place, member in enumerate(holders):
        mine = [value[place] for each in halves for value in each if place < len(value)]
        if member not in ledgers:
            continue
        if not again:
            ledgers[member].store(request, fresh, mine)
            continue
        _, before = kept[member] or (None, [])
        if [tuple(v.shape) for v in before] != [tuple(v.shape) for v in mine]:
            raise PolicyError(f"what is stored of the release {request.name!r:.60} is not of this one")
        values = iter(before)
        halves = [
            [tuple(next(values) if i == place else h for i, h in enumerate(value)) if place < len(value) else value
             for value in each]
            for each in halves
        ]  # fmt: skip
    # Nobody marks it as complete, or sends a half, before all holders have said that they have stored theirs.
    choice.of("stored", [1], _all_stored)
    for ledger in ledgers.values():
        ledger.complete(policy, request)
    made = []
    with session.operation(party) as net:
        for number, (x, each) in enumerate(zip(tensors, halves, strict=True)):
            backend = session.backend(net, x.scheme)
            shares, *flags = [
                _with_origin(backend.import_shares(f"release {number}.{i}", list(value)), old)
                for i, (value, old) in enumerate(zip(each, (x.shares, *x.flags), strict=True))
            ]
            found = x.like(shares, bound=x.bound)
            found.whole_bits, found.flags = x.whole_bits, tuple(flags)
            made.append(found)
    return made


_NO_HALF = -1
"""Of a process that holds no half."""


def _common_draw(*values: torch.Tensor) -> torch.Tensor:
    """[the draw that all holders of halves have stored, or 0; S's fresh one; whether a complete one lacks a half]."""
    draws = {int(value[0]) for value in values} - {_NO_HALF}
    common = draws.pop() if len(draws) == 1 else 0
    lost = not common and any(int(value[2]) for value in values)
    return torch.tensor([common, int(values[0][1]), int(lost)], dtype=torch.int64)


def _all_stored(*values: torch.Tensor) -> torch.Tensor:
    return values[0]


def _with_origin(value: Any, before: Any) -> Any:
    """A value that was stored, with the inputs that it was computed from (`choreography.net.Origins`)."""
    for half in ("A", "S"):
        origin = getattr(getattr(before, half, None), "_origin", None)
        if origin is not None:
            getattr(value, half)._origin = origin
    return value
