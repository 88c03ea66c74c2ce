"""A model at A that is queried under encryption: one message each way. Q encrypts, A evaluates, Q decrypts.

Source: CaPriDe (section 2.1), PrivHFL (Appendix B.2, where HE-Transformer does the same).
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..choreography import Located, Message, Net, Party, Phase, protocol
from ..choreography.located import compute
from ..errors import ArgumentError, SectorchError, ShapeError, TrainingModeError, UnsupportedOpError
from ..session import Session, default_session
from .errors import LevelError, MemoryBudgetError, MissingKeyError, ScaleError
from .scheme.keys import Keys, PublicKeys, keygen
from .scheme.memory import limit
from .scheme.parameters import VALUE_BOUND, Parameters
from .scheme.rerandomise import rerandomised
from .tensor.encrypted import CKKSTensor, encrypt
from .tensor.explain import Report, explain


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
            a ciphertext (level, scale, factor, shape) follows from the architecture, and everybody works it out on
            shapes (`parts`).

    Rounds 4; bytes: the residues of the query and of the answer, twice. S learns nothing, A the shapes, Q the result.
    """
    query = net.fresh(net.Q, encrypt, x)
    at_A = query.send(net.Q, net.S, "query").send(net.S, net.A, "query_forwarded")
    answer = net.fresh(net.A, evaluate, at_A)
    return compute(decrypt, answer.send(net.A, net.S, "answer").send(net.S, net.Q, "answer_forwarded").at("Q"))


@protocol(
    "ckks_chain",
    "sectorch/ckks/tensor/explain.py",
    [
        Message("chain", "A", "S", "", shows="which of a few chains holds the model's values"),
        Message("chain_forwarded", "S", "Q", "", shows="which of a few chains holds the model's values"),
    ],
)
def tell_chain(net: Net, wanted: Located) -> Located:
    """The depth and the integer bits that Q's keys are to have, from A to Q: int64 [2].

    The depth follows from the architecture; the bits, or one level more, from the largest sums of A's weights
    (`explain.LADDER`). Rounds 2, 32 bytes, once for the keys.
    """
    return wanted.send(net.A, net.S, "chain").send(net.S, net.Q, "chain_forwarded").at("Q")


def on_shapes(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and floating-point buffers are shapes: what is public of it."""
    tensors = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return copy.deepcopy(model, {id(t): _meta(t) for t in tensors})


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    blank = torch.empty_like(tensor, device="meta")
    return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


def parts(
    model: nn.Module, keys: Keys | PublicKeys, x: torch.Tensor, bound: float = VALUE_BOUND
) -> tuple[Callable, Callable, Callable]:
    """What `ask` takes for a query of x's shape and dtype: encrypt, evaluate, decrypt.

    Args:
        model: A's, with its weights; at the others its architecture on shapes (`torch.device("meta")`).
        keys: Q's; at the others the public half.

    Raises:
        UnsupportedOpError: which operations the model makes of its input depends on its weights.
        SectorchError: as the model run on encrypted values.
    """
    public = keys.public if isinstance(keys, Keys) else keys
    like = torch.empty_like(x, device="meta")
    query = encrypt(like, public, bound=bound)
    try:
        form = _answered(on_shapes(model), encrypt(like, public, bound=None))
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, SectorchError):
            raise
        raise UnsupportedOpError(
            f"what the model does depends on its weights' values ({error}); Q works out on shapes what it is sent. "
            f"Multiply by a weight's tensor, not by a Python number made of it"
        ) from None

    def encrypted(values: torch.Tensor) -> torch.Tensor:
        return encrypt(values, keys, bound=bound).cipher.data

    def evaluated(residues: torch.Tensor) -> torch.Tensor:
        return form.cipher.data if residues.is_meta else _answered(model, _of(query, residues)).cipher.data

    def decrypted(residues: torch.Tensor) -> torch.Tensor:
        if residues.is_meta:
            return torch.empty(form.full_shape, dtype=form.float_dtype, device="meta")
        if not isinstance(keys, Keys):
            raise MissingKeyError("an answer is decrypted with the secret key, and these are the public ones")
        return _of(form, residues).decrypt(keys.secret)

    return encrypted, evaluated, decrypted


class CKKSModule(nn.Module):
    """Called with Q's plain tensor [batch, ...], gives the plain result, as Q decrypts it; with a CKKSTensor, a
    CKKSTensor.

    A knows bounds on its values, layer by layer, from the weights; the answer carries none of them. For keys made on
    the first call A tells Q which of four chains the model needs (`tell_chain`).

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

    model: nn.Module
    keys: Keys | None

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
            keys = self.keys
            if keys is None:
                chain = self._check(self.explain(x[: 1 << 14]))
                wanted = torch.tensor([chain.depth, chain.integer_bits])
                with self.session.operation(self.party) as net:
                    told = net.read(tell_chain(net, net.own(net.A, wanted, Phase.SETUP, "chain")), net.Q)
                depth, bits = told.tolist()
                keys = self.__dict__["keys"] = keygen(depth, slots=min(len(x), 1 << 14), integer_bits=bits)
        self._check(self.explain(x[: keys.parameters.slots]))
        return torch.cat([self._query(part, keys) for part in x.split(keys.parameters.slots)])

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

    def _query(self, x: torch.Tensor, keys: Keys) -> torch.Tensor:
        times, sizes = [time.perf_counter()], []

        def timed(part: Callable) -> Callable:
            def run(values: torch.Tensor) -> torch.Tensor:
                result = part(values)
                times.append(time.perf_counter())
                sizes.append(result.nbytes)
                return result

            return run

        with self.session.operation(self.party) as net:
            own = map(timed, parts(self.model, keys, x, self.bound))
            y = net.read(ask(net, net.own(net.Q, x), *own), net.Q)
        encrypting, evaluating, decrypting = (b - a for a, b in itertools.pairwise(times))
        self.queries.append(Query(encrypting, evaluating, decrypting, sizes[0], sizes[1]))
        return y


def _answered(model: nn.Module, query: CKKSTensor) -> CKKSTensor:
    with torch.no_grad():
        return rerandomised(model(query))


def _of(form: CKKSTensor, residues: torch.Tensor) -> CKKSTensor:
    """The residues as ciphertexts of this form."""
    return CKKSTensor(replace(form.cipher, data=residues), form.batch, form.row_shape, form.float_dtype)
