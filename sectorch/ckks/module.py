"""A model at A that is queried under encryption: one message each way. Q encrypts, A evaluates, Q decrypts.

`explain` says before anything is encrypted what a model takes of the modulus chain, layer by layer, and how much
memory.

Source: CaPriDe (section 2.1), PrivHFL (Appendix B.2, where HE-Transformer does the same).
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from ..choreography import Located, Message, Net, Party, Phase, protocol
from ..display import Display
from ..errors import (
    ArgumentError,
    LevelError,
    MemoryBudgetError,
    ScaleError,
    SectorchError,
    SecurityLevelError,
    ShapeError,
    TrainingModeError,
    UnsupportedOpError,
)
from ..session import Session, default_session
from ..tensor.compile_mode import InferenceModule
from .exchange import LocatedCKKSTensor, LocatedKeys, on_shapes
from .scheme.ciphertext import capacity, clear_pending_factor, limit, metering
from .scheme.keys import Keys, PublicKeys, keys_for
from .scheme.seal import INTEGER_BITS, VALUE_BOUND, Parameters, choose
from .tensor.ckks_tensor import CKKSTensor, blank_encryption, observe_operations, rerandomise

_UNBOUNDED = 38


@dataclass(frozen=True)
class EncryptedStep:
    """One operation of the model on encrypted values."""

    layer: str
    operation: str
    shape: tuple[int, ...]
    ciphertexts: int
    levels_left: int
    bytes: int
    bound: float = math.inf
    """Values are below it in magnitude."""
    error: float = 0.0
    """Values are within it of the plain computation's."""
    room: float = math.inf
    """Values below it fit this place of the chain."""


@dataclass
class Report(Display):
    """The result of `explain`.

    Attributes:
        depth: levels that the model takes; None if it does not run to its end.
        parameters: the parameters that the caller named, or the smallest that fit.
        problem: why the model does not run on them, naming the layer; empty if it does.
        peak_bytes: the most bytes of ciphertexts that exist at a time from encryption to the result, as the same
            program makes and drops them on shapes. The process itself (torch, SEAL, keys) takes some hundred MB beside.
    """

    steps: list[EncryptedStep]
    parameters: Parameters | None
    depth: int | None
    problem: str = ""
    peak_bytes: int = 0
    runs_out: str = field(default="")
    too_large: bool = False
    """Whether the problem is a value that may not fit its level."""

    @property
    def supported(self) -> bool:
        return not self.problem

    def __str__(self) -> str:
        return self.table(140)

    def sections(self) -> Iterator[RenderableType]:
        """A row for each operation, and what the whole of them takes."""
        yield str(self.parameters) if self.parameters else "no secure parameters fit"
        table = Table(title="level by level")
        for column in ("layer", "operation", "result", "ciphertexts", "levels left", "bound", "room", "error", "MB"):
            table.add_column(column, justify="left" if column in ("layer", "operation", "result") else "right")
        for s in self.steps:
            sizes = (f"{s.bound:.3g}", f"{s.room:.3g}", f"{s.error:.1g}", f"{s.bytes / 1e6:.1f}")
            table.add_row(s.layer, s.operation, str(s.shape), str(s.ciphertexts), str(s.levels_left), *sizes)
        yield table
        if self.depth is not None:
            yield (f"depth {self.depth}; about {self.peak_bytes / 2**30:.2f} GiB of ciphertexts at the peak")
        if self.problem:
            yield Text(f"does not run: {self.problem}", style="red")


def _step(layer: str, name: str, e: CKKSTensor) -> EncryptedStep:
    c = e.cipher
    room = capacity(c.keys.parameters, c.levels_left) * abs(c.multiplier)
    return EncryptedStep(
        layer, name, tuple(e.full_shape), c.count, c.levels_left, e.ciphertext_bytes, c.bound, c.error_bound, room
    )


def _dry_run(
    model: nn.Module, x: torch.Tensor, parameters: Any, bound: float
) -> tuple[list[EncryptedStep], CKKSTensor | None, SectorchError | None]:
    """The model on shapes alone: the handlers run, and no ciphertext exists."""
    e = blank_encryption(x, parameters, bound)
    steps = [_step("input", "encrypt", e)]

    def watch(name: str, layer: str | None, result: Any) -> None:
        if isinstance(result, CKKSTensor):
            steps.append(_step((layer or "").removeprefix("layer "), name, result))

    try:
        with observe_operations(watch), torch.no_grad():
            answer = model(e)
        if isinstance(answer, CKKSTensor) and answer.cipher.pending_factor is not None:
            answer = CKKSTensor(clear_pending_factor(answer.cipher), answer.batch, answer.row_shape, answer.float_dtype)
            steps.append(_step("answer", "mul", answer))
        elif isinstance(answer, CKKSTensor) and answer.levels_left < steps[-1].levels_left:
            steps.append(_step("answer", "polynomial", answer))  # which is no torch function, so nothing watched it
        return steps, answer, None
    except SectorchError as error:
        return steps, None, error


LADDER = (INTEGER_BITS, 14, 20)
"""What `explain` tries for the room of the last level."""


def _fitting(model: nn.Module, x: torch.Tensor, depth: int, bound: float) -> Parameters:
    """The first parameters that hold the model's values: more room at the last level, or a level that stays unused."""
    for levels, bits in (*((depth, bits) for bits in LADDER), (depth + 1, INTEGER_BITS)):
        try:
            parameters = choose(levels, slots=x.shape[0], integer_bits=bits)
        except SecurityLevelError:
            if (levels, bits) == (depth, INTEGER_BITS):
                raise
            continue
        if not isinstance(_dry_run(model, x, parameters, bound)[2], ScaleError):
            return parameters
    return choose(depth, slots=x.shape[0])


def explain(
    model: nn.Module, x: torch.Tensor, keys: Keys | PublicKeys | Parameters | None = None, *, bound: float = VALUE_BOUND
) -> Report:
    """What `model(encrypt(x, keys, bound=bound))` takes of the chain, without keys, ciphertexts or values.

    The bounds of the steps come from the largest sums of magnitudes in a layer's weights: they are for whoever has the
    model. `integer_bits` of the parameters that are chosen without keys is one of `LADDER`, and tells Q that much.

    Args:
        bound: on the input's values.
        x: only its shape and dtype are used; the batch is dimension 0.
        keys: whose chain is asked about; without, the smallest secure parameters that the model needs are chosen.

    A model that is not supported, or whose chain runs out, gives a report with `problem`, naming the layer.
    """
    if x.dim() < 1:
        raise ArgumentError("explain() needs an input with a batch dimension")
    if keys is None:
        # A chain that does not run out, to count the levels that the model takes.
        fake = SimpleNamespace(
            degree=8192, primes=(1 << 48, *(1 << 28,) * _UNBOUNDED), scales=(2.0**28,) * (_UNBOUNDED + 1),
            depth=_UNBOUNDED, slots=1 << 20, special=1 << 50,
        )  # fmt: skip
        steps, _, error = _dry_run(model, x, fake, bound)
        if error is not None:
            return Report(steps, None, None, str(error))
        depth = _UNBOUNDED - min((s.levels_left for s in steps), default=_UNBOUNDED)
        try:
            parameters = _fitting(model, x, max(1, depth), bound)
        except SecurityLevelError as refused:
            return Report(steps, None, depth, str(refused))
    else:
        parameters = keys if isinstance(keys, Parameters) else keys.parameters
    with metering() as meter:
        steps, _, error = _dry_run(model, x, parameters, bound)
    layer = str(getattr(error, "layer", "") or "") if isinstance(error, LevelError) else ""
    used = parameters.depth - min(s.levels_left for s in steps) if error is None else None
    too_large = isinstance(error, ScaleError)
    return Report(steps, parameters, used, "" if error is None else str(error), meter.peak, layer, too_large)


@dataclass(frozen=True)
class Query:
    """The cost of one call: seconds of Q's and A's work, and the bytes of the two messages (ciphertexts as words)."""

    encrypt_seconds: float
    evaluate_seconds: float
    decrypt_seconds: float
    query_bytes: int
    answer_bytes: int


@protocol(
    "ckks_query",
    "CaPriDe, 2.1; PrivHFL, B.2",
    [
        Message("query", "Q", "S", "encrypted"),
        Message("query_forwarded", "S", "A", "encrypted"),
        Message("answer", "A", "S", "encrypted", opens="Q"),
        Message("answer_forwarded", "S", "Q", "rerandomised", shows="the result, with the size of its error"),
    ],
)
def ask(net: Net, query: LocatedCKKSTensor, model: nn.Module, clock: Callable[[], None] = lambda: None) -> Located:
    """The model's answer to Q's encrypted query, at Q. A evaluates, Q decrypts; the residues go by way of S.

    Args:
        model: A's model with its weights; at the other parties its architecture.
        clock: called when A's answer is made.

    Rounds 4; bytes: the residues of the query and of the answer, twice. S learns nothing, A the shapes, Q the result.
    """
    answer = query.to(net.A, "query").apply(model).rerandomise()
    clock()
    return answer.to(net.Q, "answer").decrypt_at(net.Q)


@protocol(
    "ckks_chain",
    "sectorch/ckks/module.py",
    [
        Message("chain", "A", "S", "", shows="which of a few chains holds the model's values"),
        Message("chain_forwarded", "S", "Q", "", shows="which of a few chains holds the model's values"),
    ],
)
def tell_chain(net: Net, wanted: Located) -> Located:
    """Send the depth and the integer bits that Q's keys need, from A to Q: int64 [2].

    The depth follows from the architecture; the bits, or one level more, from the largest sums of A's weights
    (`LADDER`). Rounds 2, 32 bytes, once for the keys.
    """
    return wanted.send(net.A, net.S, "chain").send(net.S, net.Q, "chain_forwarded")


@protocol(
    "ckks_keys",
    "CaPriDe, Algorithm 1, first loop",
    [
        Message("keys", "Q", "S", "a public key", shows="Q's public keys"),
        Message("keys_forwarded", "S", "A", "a public key", shows="Q's public keys"),
    ],
)
def send_keys(net: Net, keys: Located) -> Located:
    """Send Q's public and relinearisation key (`PublicKeys.message`) to A, by way of S: uint8.

    Rounds 2; bytes: twice `PublicKeys.message_bytes`, about 32 N (primes + 1)^2, once for the keys.
    """
    return keys.send(net.Q, net.S, "keys").send(net.S, net.A, "keys_forwarded").at("A")


def answer_form(model: nn.Module, parameters: Parameters, x: torch.Tensor) -> CKKSTensor:
    """The answer to a query of x's shape and dtype, on meta tensors, which every party derives from the architecture.

    Raises:
        UnsupportedOpError: which operations the model makes of its input depends on its weights.
    """
    try:
        with torch.no_grad():
            return rerandomise(on_shapes(model)(blank_encryption(x, parameters, None)))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, SectorchError):
            raise
        raise UnsupportedOpError(
            f"what the model does depends on its weights' values ({error}); Q works out on shapes what it is sent. "
            f"Multiply by a weight's tensor, not by a Python number made of it"
        ) from None


class CKKSModule(InferenceModule):
    """A model of A's that is evaluated under encryption.

    A call takes Q's plain tensor [batch, ...] and returns the plain result that Q decrypts. A call with a CKKSTensor
    returns a CKKSTensor.

    A knows bounds on its values, layer by layer, from the weights; the answer carries none of them. On the first call
    Q sends A its public keys (`send_keys`), with which A evaluates. If Q has no keys yet, A first tells Q which of four
    chains the model needs (`tell_chain`).

    Q learns the result with its error, and A the shapes. The answer is rerandomised, so its ciphertexts show Q nothing
    of the weights beyond the result and the size of its error (`ckks.rerandomise`). A batch with more samples than
    slots is cut into several.

    Args:
        model: an FHE-friendly model in evaluation mode; its weights stay with A in plain. A process without A takes its
            architecture on `torch.device("meta")`, as a process without Q takes the input.
        keys: Q's keys. Without, the first call makes them, of the depth that `explain` finds. A process without Q takes
            their `Parameters`, if Q has made them.
        session, party: the session, and its answering party. The default is the process's default session, with all
            parties in this process.
        bound: a bound on the inputs' magnitude, which A learns (`encrypt`).

    Raises on a call, before anything is encrypted:
        LevelError: the chain is too short; the layer is named.
        ScaleError: an input beyond the bound, or a layer whose values a level of the chain may not hold.
        MemoryBudgetError: with the estimate.
        SerialisationError: at A: the received bytes are no keys of these parameters.
    """

    model: nn.Module
    keys: Keys | None

    def __init__(
        self,
        model: nn.Module,
        keys: Keys | Parameters | None = None,
        *,
        session: Session | None = None,
        party: Party | None = None,
        bound: float = VALUE_BOUND,
    ):
        super().__init__()
        self.bound = bound
        if any(m.training for m in model.modules()):
            raise TrainingModeError("the model is in training mode; call model.eval() first")
        self.session = session or default_session()
        self.party = self.session.answering_party(party)
        self._at_Q, self._at_A = map(self.session.present, (self.session.Q, self.party))
        if not (self._at_Q or self._at_A or self.session.present(self.session.S)):
            raise ArgumentError("an encrypted model needs a session with a party in this process, not a dry one")
        if not isinstance(keys, (Keys if self._at_Q else Parameters, type(None))):
            raise ArgumentError(
                f"keys are Q's Keys, and their Parameters in a process without Q; got {type(keys).__name__}"
            )
        self.__dict__["model"] = model
        self.keys = keys if isinstance(keys, Keys) else None
        self.key_parameters = keys.parameters if isinstance(keys, Keys) else keys
        self._public: PublicKeys | None = None
        """At A: Q's public keys, as received."""
        self._keyed = False
        self.queries: list[Query] = []
        self._making = threading.Lock()  # several threads may call the module, and one makes the keys
        super().train(False)

    def explain(self, x: torch.Tensor) -> Report:
        """Depth, levels and memory of a call with such an input; runs nothing."""
        return explain(self.model, x, self.key_parameters, bound=self.bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, CKKSTensor):
            with torch.no_grad():
                return rerandomise(self.model(x))
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or not len(x):
            raise ShapeError(
                "an encrypted model takes a tensor whose first dimension is the batch, of at least one sample"
            )
        with self._making:
            parameters = self._agree_on_parameters(x) if self.key_parameters is None else self.key_parameters
            self.key_parameters = parameters
        if self._at_A:  # its errors depend on the weights, so only A checks
            self._check(self.explain(x[: parameters.slots]))
        with self._making:
            if not self._keyed:
                answer_form(
                    self.model, parameters, x[: parameters.slots]
                )  # it refuses a model before a message is sent
                self._send_keys(parameters)
        return torch.cat([self._query(part, parameters) for part in x.split(parameters.slots)])

    def _agree_on_parameters(self, x: torch.Tensor) -> Parameters:
        """The parameters that the model needs, which A tells Q."""
        slots, wanted = min(len(x), 1 << 14), torch.empty(2, dtype=torch.int64, device="meta")
        if self._at_A:
            chain = self._check(self.explain(x[:slots]))
            wanted = torch.tensor([chain.depth, chain.integer_bits])
        setup = self.session.setup(self.party)
        chain = tell_chain(setup, setup.own(self.party, wanted, Phase.SETUP, "chain"))
        depth, bits = setup.agreed(chain, (self.session.Q, self.party, self.session.S)).tolist()
        return choose(depth, slots=slots, integer_bits=bits)

    def _send_keys(self, parameters: Parameters) -> None:
        """Q makes its keys, unless it has them, and A gets the public ones."""
        message = torch.empty(PublicKeys.message_bytes(parameters), dtype=torch.uint8, device="meta")
        if self._at_Q:
            self.keys = self.keys or keys_for(parameters)
            message = self.keys.public.message()
        setup = self.session.setup(self.party)
        came = setup.read(send_keys(setup, setup.own(self.session.Q, message, Phase.SETUP, "keys")), self.party)
        if self._at_A:
            self._public = PublicKeys.from_message(parameters, came)
        self._keyed = True

    def _check(self, report: Report) -> Parameters:
        if report.runs_out:
            raise LevelError(report.problem)
        if report.too_large:
            raise ScaleError(report.problem)
        if report.problem or report.parameters is None:
            raise ArgumentError(report.problem)
        if report.peak_bytes > limit():
            raise MemoryBudgetError(
                f"the run would take about {report.peak_bytes / 2**30:.1f} GiB of ciphertexts, more than the "
                f"{limit() / 2**30:.1f} GiB allowed; use a smaller input or network, or "
                f"sectorch.ckks.memory_limit(bytes)"
            )
        return report.parameters

    def _query(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        times, own = [time.perf_counter()], self.keys if self._at_Q else parameters
        clock = lambda: times.append(time.perf_counter())
        with self.session.operation(self.party) as net:
            keys = LocatedKeys(net, net.Q, parameters, own, {net.A: self._public or parameters})
            query = keys.encrypt(net.own(net.Q, x), bound=self.bound)
            clock()
            y = net.read(ask(net, query, self.model, clock), net.Q)
            clock()
        encrypting, evaluating, decrypting = (b - a for a, b in itertools.pairwise(times))
        answer = answer_form(self.model, parameters, x).ciphertext_bytes
        self.queries.append(Query(encrypting, evaluating, decrypting, query.content._value.ciphertext_bytes, answer))
        return y
