"""A model at A that is queried under encryption: one message each way. Q encrypts, A evaluates, Q decrypts.

Source: CaPriDe (section 2.1), PrivHFL (Appendix B.2, where HE-Transformer does the same).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..choreography import Located, Message, Net, Party, protocol
from ..errors import ArgumentError, ShapeError, TrainingModeError
from ..located import compute
from ..session import Session, default_session
from .errors import LevelError, MemoryBudgetError, ScaleError
from .explain import Report, explain
from .keys import Keys, keygen
from .memory import limit
from .parameters import VALUE_BOUND
from .rerandomise import rerandomised
from .tensor import CKKSTensor, encrypt


@dataclass(frozen=True)
class Query:
    """What one call took: seconds of Q's and A's work, and the bytes of the two messages (ciphertexts as words)."""

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
        Message("answer", "A", "S", "encrypted"),
        Message("answer_forwarded", "S", "Q", "rerandomised", shows="the result, with the size of its error"),
    ],
)
def ask(net: Net, x: Located, encrypt: Callable, evaluate: Callable, decrypt: Callable) -> Located:
    """The model's answer to x, at Q. Q encrypts, A evaluates, Q decrypts; the residues go by way of S.

    Args:
        encrypt, evaluate, decrypt: values to residues, residues to residues, residues to values. What else there is to
            a ciphertext (level, scale, shape) follows from the architecture, and is public; but for its factor, in
            which weights of a single number stand: Q needs it to decode, and so is told their product.

    Rounds 4; bytes: the residues of the query and of the answer, twice. S learns nothing, A the shapes, Q the result.
    """
    query = net.fresh(net.Q, encrypt, x)
    at_A = query.send(net.Q, net.S, "query").send(net.S, net.A, "query_forwarded")
    answer = net.fresh(net.A, evaluate, at_A)
    return compute(decrypt, answer.send(net.A, net.S, "answer").send(net.S, net.Q, "answer_forwarded").at("Q"))


class CKKSModule(nn.Module):
    """Called with Q's plain tensor [batch, ...], gives the plain result, as Q decrypts it; with a CKKSTensor, a
    CKKSTensor.

    A knows bounds on its values, layer by layer, from the weights; the answer carries none of them. Keys made on the
    first call tell Q which of four sizes of the last level the model needs (`explain`).

    Q learns the result with its error, A the shapes; the answer is rerandomised, so that its ciphertexts show Q nothing
    of the weights beyond the result and the size of its error (`rerandomise.py`). A batch beyond the slots is cut.

    Args:
        model: FHE-friendly, in evaluation mode; its weights stay with A in plain.
        keys: Q's; made on the first call, to the depth that `explain` finds, unless given.
        session, party: where the messages are counted (`sectorch.profile`) and who answers; the process's default
            session unless named. All parties are in this process.
        bound: on the inputs' values; A is told it (`encrypt`).

    Raises on a call, before anything is encrypted:
        LevelError: the chain is too short; the layer is named.
        ScaleError: an input beyond the bound, or a layer whose values a level of the chain may not hold.
        MemoryBudgetError: with the estimate.
    """

    def __init__(
        self,
        model: nn.Module,
        keys: Keys | None = None,
        *,
        session: Session | None = None,
        party: Party | None = None,
        bound: float = VALUE_BOUND,
    ):
        super().__init__()
        self.bound = bound
        if any(m.training for m in model.modules()):
            raise TrainingModeError("the model is in training mode; call model.eval() first")
        self.__dict__["model"], self.__dict__["keys"] = model, keys
        self.session = session or default_session()
        self.party = self.session.answering_party(party)
        if not self.session.complete:
            raise ArgumentError("an encrypted model needs a session with all parties in this process")
        self.queries: list[Query] = []
        self._making = threading.Lock()  # of the keys: several threads may call the module
        super().train(False)

    def train(self, mode: bool = True) -> CKKSModule:
        if mode:
            raise TrainingModeError("an encrypted model is for inference; train the plain model")
        return self

    def explain(self, x: torch.Tensor) -> Report:
        """Depth, levels and memory of a call with such an input; runs nothing."""
        return explain(self.model, x, self.keys, bound=self.bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, CKKSTensor):
            with torch.no_grad():
                return rerandomised(self.model(x))
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or not len(x):
            raise ShapeError(
                "an encrypted model takes a tensor whose first dimension is the batch, of at least one sample"
            )
        with self._making:
            if self.keys is None:
                report = self.explain(x[: 1 << 14])
                self._check(report)
                p = report.parameters
                self.__dict__["keys"] = keygen(p.depth, slots=min(len(x), 1 << 14), integer_bits=p.integer_bits)
        self._check(self.explain(x[: self.keys.parameters.slots]))
        return torch.cat([self._query(part) for part in x.split(self.keys.parameters.slots)])

    def _check(self, report: Report) -> None:
        if report.runs_out:
            raise LevelError(report.problem)
        if report.too_large:
            raise ScaleError(report.problem)
        if report.problem:
            raise ArgumentError(report.problem)
        if report.peak_bytes > limit():
            raise MemoryBudgetError(
                f"the run would take about {report.peak_bytes / 2**30:.1f} GiB of ciphertexts, more than the "
                f"{limit() / 2**30:.1f} GiB allowed; use a smaller input or network, or "
                f"sectorch.ckks.memory_limit(bytes)"
            )

    def _query(self, x: torch.Tensor) -> torch.Tensor:
        times = [time.perf_counter()]
        query = encrypt(x.to("meta"), self.keys.public, bound=self.bound)
        answer = self._answered(query)  # on shapes: what both know of the answer before there is one

        def encrypted(values: torch.Tensor) -> torch.Tensor:
            residues = encrypt(values, self.keys, bound=self.bound).cipher.data
            times.append(time.perf_counter())
            return residues

        def evaluated(residues: torch.Tensor) -> torch.Tensor:
            residues = self._answered(_of(query, residues)).cipher.data
            times.append(time.perf_counter())
            return residues

        def decrypted(residues: torch.Tensor) -> torch.Tensor:
            return _of(answer, residues).decrypt(self.keys.secret)

        with self.session.operation(self.party) as net:
            y = net.read(ask(net, net.own(net.Q, x), encrypted, evaluated, decrypted), net.Q)
        times.append(time.perf_counter())
        spent = [b - a for a, b in itertools.pairwise(times)]
        self.queries.append(Query(*spent, query.ciphertext_bytes, answer.ciphertext_bytes))
        return y

    def _answered(self, query: CKKSTensor) -> CKKSTensor:
        with torch.no_grad():
            return rerandomised(self.model(query))


def _of(form: CKKSTensor, residues: torch.Tensor) -> CKKSTensor:
    """The residues as ciphertexts of this form."""
    return CKKSTensor(replace(form.cipher, data=residues), form.batch, form.row_shape, form.float_dtype)
