"""One querying party asks a panel of answering parties: steps 1 to 3 of CaPC (3.2) on a batch of queries.

    panel = Panel([Voter("hospital-b", model_b), Voter("hospital-c", model_c)], classes=10, sample=images[:1])
    labels = panel.ask(images, GNMax(7.5)).labels        # all that Q learns; -1 where Confident-GNMax does not answer

The privacy guardian PG is the server S of the star. What Q and A say to each other goes through it under pads of their
pair key. Sums are mod 2^64.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...choreography import Located, Message, Net, Party, Phase, leaf, protocol, with_shapes
from ...choreography.located import compute
from ...ckks import CKKSTensor, choose, encrypt, explain, keygen, to_shares
from ...ckks.convert import finest_scale, random_words
from ...ckks.module import received_ciphertexts, send_keys
from ...ckks.scheme.ciphertext import residues
from ...ckks.scheme.keys import Keys, PublicKeys
from ...ckks.scheme.seal import VALUE_BOUND
from ...ckks.tensor.ckks_tensor import blank_encryption
from ...dp import ConfidentGNMax, Mechanism
from ...dp.mechanisms import Drawn
from ...errors import NetworkError
from ...federated.errors import FederationError
from ...federated.training import answer_of
from ...garbled import (
    argmax_confident,
    argmax_confident_shares,
    argmax_noisy,
    argmax_noisy_shares,
    argmax_onehot,
    argmax_onehot_shares,
    correlate,
)
from ...mpc.star.shares import Shares
from ...nn.secure import secure
from ...session import Session
from ...tensor import Scheme, SharedTensor, share_tensor
from .settings import TooFewVotersError

# The messages of CaPC that are its own; the rest is the secure inference and the garbled circuits.


@protocol(
    "capc_mask",
    "CaPC, step 1b",
    [Message("masked_half", "A", "S", "r_hat of A"), Message("masked", "S", "Q", "r_hat of A")],
)
def mask(net: Net, logits: Shares) -> tuple[Located, Located]:
    """Logits in shares of A and S become r_hat at A and r - r_hat at Q.

    A draws r_hat alone and fresh. (S's half as it is would not do: Q deals the correlations of the secure inference and
    knows their masks, so that half would show Q the weights.)

    Args:
        logits: int64 [N, classes].

    Returns:
        (at A, at Q), int64 [N, classes].

    Rounds 2, bytes 16 per element. S and Q receive uniform ring elements; neither knows r_hat.
    """
    A, S, Q = net.A, net.S, net.Q
    r_hat = net.fresh(A, _uniform, logits.shape)
    half = (logits.A - r_hat).send(A, S, "masked_half")
    return r_hat, (half + logits.S).send(S, Q, "masked")


@with_shapes(lambda shape: torch.empty(shape, dtype=torch.int64, device="meta"))
def _uniform(shape: torch.Size) -> torch.Tensor:
    """int64 values that only the caller has."""
    return random_words(shape.numel()).view(shape)


@protocol(
    "capc_encrypted_query",
    "CaPC, step 1a",
    [Message("query", "Q", "S", "encrypted"), Message("query_forwarded", "S", "A", "encrypted")],
)
def encrypted_query(net: Net, queries: Located, encrypt: Callable[[torch.Tensor], torch.Tensor]) -> Located:
    """Q's queries go to A under Q's own key.

    Args:
        encrypt: from queries to residues.

    Rounds 2; bytes: the residues of the ciphertexts, twice. S and A learn the shape.
    """
    sealed = net.fresh(net.Q, encrypt, queries)
    return sealed.send(net.Q, net.S, "query").send(net.S, net.A, "query_forwarded").at("A")


@protocol("capc_to_guardian", "CaPC, step 2", [Message("s_hat", "A", "S", "s of Q")])
def to_guardian(net: Net, s_hat: Located) -> Located:
    """A's share of its vote goes to the privacy guardian.

    Rounds 1, bytes 8 per element. Uniform to S, which lacks Q's share.
    """
    return s_hat.send(net.A, net.S, "s_hat")


@protocol(
    "capc_open_query",
    "docs/capc.md",
    [
        Message("query", "Q", "S", "pad of k_QA"),
        Message("query_open", "S", "A", "pad of k_QA, which A knows", "the query, in plain"),
        Message("s", "A", "S", "pad of k_QA"),
        Message("s_at_Q", "S", "Q", "s_hat of A"),
    ],
)
def open_vote(net: Net, queries: Located, answer: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Located, Located]:
    """The route for models that cannot be evaluated on secrets: A sees the queries and votes in plain, in shares.

    Args:
        queries: float64 [N, ...] at Q.
        answer: from such queries to one-hot votes, int64 [N, classes]. Its attribute `shapes`, if it has one, gives
            the votes' shape from that of the queries (`located.compute`).

    Returns:
        (s at Q, s_hat at A).

    Rounds 4. A LEARNS THE QUERIES. Q and S receive uniform values, as in step 1c.
    """
    A, S, Q = net.A, net.S, net.Q
    pad = net.common(Q, A, queries.shape, "pad")
    sealed = (queries.view(torch.int64) ^ pad).send(Q, S, "query").send(S, A, "query_open")
    votes = compute(answer, (sealed.at("A") ^ pad).view(torch.float64))
    s_hat = net.fresh(A, _uniform, votes.shape)
    cover = net.common(Q, A, votes.shape, "cover")
    s = ((votes - s_hat) ^ cover).send(A, S, "s").send(S, Q, "s_at_Q")
    return s.at("Q") ^ cover, s_hat


LOGIT_BOUND_BITS = 10
"""Encrypted logits are declared to be below 2^10, whatever the largest sums of a voter's weights would allow."""
LOGIT_BITS = 32
KEPT_BITS = 16
"""Fraction bits of the logits that the argmax looks at; 32 in all, so logits may reach 2^15 in magnitude."""
SPARE_LEVELS = 2
"""Of a CKKS chain, after the network: what is left has to hold the statistical mask of the conversion."""


@dataclass(frozen=True)
class Voter:
    """An answering party: its name, and its trained model in evaluation mode (or a fitted scikit-learn classifier)."""

    name: str
    model: Any = field(repr=False)


@dataclass
class Answer:
    """What came of a batch of queries.

    `labels` [N] int64 is what Q learns, -1 where a query was not answered. `voters` is how many votes were counted,
    `lost` who was lost on the way.
    `votes` is None but in a simulation in the clear.
    """

    labels: torch.Tensor = field(repr=False)
    voters: int
    lost: list[str]
    seconds: dict[str, float]
    votes: list[list[int]] | None = field(repr=False, default=None)

    def as_dict(self) -> dict:
        """Without the labels, for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "labels"}


class Panel:
    """The answering parties of one querying party, with the keys and the masked weights of their session.

    Args:
        voters: at least one, with different names. Q is not among them.
        classes: of every model.
        inference: step 1a, "mpc", "ckks" or "open"; see `Settings`.
        argmax: steps 1c and 3, "yao" or "shares".
        frac_bits: fraction bits of the secure inference.
        sample: one image, for its shape; "ckks" needs it.
        batch: the most queries that are asked at once; "ckks" makes its keys for it.
        session: of Q, S and the voters in their order; one of its own, with all of them in this process, unless given.
            Of a voter elsewhere the model is on the meta device, and so are queries where Q is elsewhere; there the
            inference is "mpc".

    Raises:
        FederationError: a choice that does not exist, a model that the inference cannot take.
        SectorchError: what `sectorch.secure` and `sectorch.ckks.keygen` raise on models.
    """

    def __init__(
        self,
        voters: Sequence[Voter],
        classes: int,
        *,
        inference: str = "mpc",
        argmax: str = "yao",
        frac_bits: int = 20,
        sample: torch.Tensor | None = None,
        batch: int = 64,
        session: Session | None = None,
    ):
        if inference not in ("mpc", "ckks", "open") or argmax not in ("yao", "shares"):
            raise FederationError(
                f"inference is mpc, ckks or open and argmax yao or shares, got {inference!r}, {argmax!r}"
            )
        if not voters or len({voter.name for voter in voters}) < len(voters):
            raise FederationError(f"a panel needs voters of different names, got {[voter.name for voter in voters]}")
        for voter in voters:
            if inference != "open" and not isinstance(voter.model, nn.Module):
                raise FederationError(
                    f"{voter.name}'s {type(voter.model).__name__} cannot be evaluated on secrets; use inference='open'"
                    f", which shows the queries to the answering party"
                )
        self.session = session or Session(answering=len(voters))
        if not self.session.complete and inference != "mpc":
            raise FederationError(f"among parties apart the inference is mpc, got {inference!r}")
        self.classes, self.inference, self.argmax = classes, inference, argmax
        self.scheme = Scheme(frac_bits)
        self.members = dict(zip(self.session.answering, voters, strict=True))
        self.lost: list[str] = []
        self._pairs: dict[Party, Any] = {}
        self._secured: dict[Party, Any] = {}
        self._sent: dict[Party, PublicKeys] = {}
        self._keys = self._keygen(voters, sample, batch) if inference == "ckks" else None

    def ask(self, queries: torch.Tensor, mechanism: Mechanism, least: int = 1, drawn: Drawn | None = None) -> Answer:
        """Labels of the queries by noisy vote. Q learns the labels and nothing else, the others nothing.

        Args:
            queries: [N, ...] of Q.
            mechanism: its noise is drawn by the privacy guardian alone, so that it does not depend on who votes. With
                `ConfidentGNMax` Q learns for each query whether it is answered, and the label if it is.
            least: votes that an answer needs. A party that is lost before its share reaches the guardian does not vote,
                in this batch and later ones; the guardian and Q leave it out of both sums. Among parties apart that
                ends the session for all.
            drawn: the guardian's noise, where it has drawn it for these queries before (`mechanism.draw`).

        Bytes: those of the inference, 16 per logit for step 1b, `argmax_onehot` per query and party, 8 per class for
        step 2, `argmax_noisy` (`argmax_confident`) per query. The label is that of the plain mechanism with the same
        noise, but where a model's two largest logits differ by less than 2^-15 and the error of the secure inference.

        Raises:
            TooFewVotersError: fewer votes than `least`; no noise was drawn and nothing revealed.
            NetworkError: the querying party or the guardian was lost.
        """
        spent: dict[str, float] = {"infer": 0.0, "onehot": 0.0, "argmax": 0.0}
        at_Q, at_S, nets = [], [], []
        for party, voter in self.members.items():
            if voter.name in self.lost:
                continue
            try:
                s, s_hat = self._vote(party, voter, queries, spent)
            except NetworkError:
                if not self.session.complete:
                    raise
                self.lost.append(voter.name)
                continue
            at_Q.append(s)
            at_S.append(s_hat)
            nets.append(party)
        if len(at_Q) < max(1, least):
            raise TooFewVotersError(
                f"{len(at_Q)} of {len(self.members)} answering parties voted and an answer needs {least}; lost: "
                f"{', '.join(self.lost)}; nothing was revealed; ask again when they are back"
            )
        start = time.perf_counter()
        with self.session.call(nets[0]) as net:
            drawn = drawn or self._drawn(mechanism, len(queries))
            votes = _sum(*at_S), _sum(*(s.at("Q") for s in at_Q))
            label = self._label(net, mechanism, *votes, len(at_Q), drawn)
            labels = net.read(label, net.Q)
        spent["argmax"] += time.perf_counter() - start
        return Answer(labels, len(at_Q), list(self.lost), spent)

    def _drawn(self, mechanism: Mechanism, count: int) -> Drawn:
        """Fresh noise at the guardian; elsewhere its shape."""
        if self.session.present(self.session.S):
            return mechanism.draw(count, self.classes)
        shapes = (
            ((count,), (count, self.classes)) if isinstance(mechanism, ConfidentGNMax) else ((count, self.classes),)
        )
        return tuple(torch.empty(shape, dtype=torch.int64, device="meta") for shape in shapes)

    def _label(
        self, net: Net, mechanism: Mechanism, votes_S: Located, votes_Q: Located, voters: int, drawn: Drawn
    ) -> Located:
        """Steps 2 and 3: S adds the noise to its half of the counts, and Q gets the label."""
        S = self.session.S
        # Room for every noise that is drawn but with probability e^-48; beyond, the sum would wrap around, which makes
        # another label and takes nothing from its privacy.
        if not isinstance(mechanism, ConfidentGNMax):
            bits = (mechanism.noise.span + voters).bit_length() + 1
            total = _sum(net.own(S, drawn[0]), votes_S)
            if self.argmax == "yao":
                return argmax_noisy(net, self._pair(S), total, votes_Q, bits=bits)
            return argmax_noisy_shares(net, total, votes_Q, bits=bits)
        answer = mechanism.answer.noise
        bits = (max(answer.span, mechanism.noise.span + mechanism.threshold) + voters).bit_length() + 1
        noise = (drawn[0] - mechanism.threshold).unsqueeze(1).expand(votes_Q.shape)
        checked = _sum(net.own(S, noise), votes_S)
        total = _sum(net.own(S, drawn[1]), votes_S)
        if self.argmax == "yao":
            return argmax_confident(net, self._pair(S), checked, total, votes_Q, bits=bits)
        return argmax_confident_shares(net, checked, total, votes_Q, bits=bits)

    def _vote(self, party: Party, voter: Voter, queries: torch.Tensor, spent: dict) -> tuple[Located, Located]:
        """Steps 1 and 2 of one answering party: s at Q, and s_hat, arrived at the guardian."""
        start = time.perf_counter()
        if self.inference == "open":
            with self.session.call(party) as net:
                plain = net.own(net.Q, queries.double())
                s, s_hat = open_vote(net, plain, self._answering(voter, queries.dtype))
                spent["infer"] += time.perf_counter() - start
                return s, to_guardian(net, s_hat)
        logits = self._logits(party, voter, queries)
        inferred = time.perf_counter()
        spent["infer"] += inferred - start
        drop = max(0, logits.scale_bits - KEPT_BITS)
        with self.session.call(party) as net:
            if not isinstance(logits.shares, Shares):
                raise FederationError(
                    "logits of a reference session are in nobody's shares, and a vote is taken on shares"
                )
            r_hat, masked = mask(net, logits.shares)
            if self.argmax == "yao":
                s, s_hat = argmax_onehot(net, self._pair(party), r_hat, masked, drop=drop, bits=LOGIT_BITS)
            else:
                s, s_hat = argmax_onehot_shares(net, r_hat, masked, drop=drop, bits=LOGIT_BITS)
            sent = to_guardian(net, s_hat)
        spent["onehot"] += time.perf_counter() - inferred
        return s, sent

    def _logits(self, party: Party, voter: Voter, queries: torch.Tensor) -> SharedTensor:
        """Step 1a: [N, classes] in shares of A and S."""
        if self._keys is not None:
            with torch.no_grad():
                answered = voter.model(self._query(self._keys, party, queries))
            logits = to_shares(
                answered.bounded(2.0**LOGIT_BOUND_BITS), self._keys.secret, session=self.session, party=party,
                scheme=self.scheme,
            )  # fmt: skip
        else:
            if party not in self._secured:
                self._secured[party] = secure(
                    voter.model, Scheme(frac_bits=self.scheme.frac_bits), session=self.session, party=party
                )
            secured = self._secured[party]
            logits = secured(share_tensor(queries.detach(), session=self.session, party=party, scheme=secured.scheme))
        if tuple(logits.shape) != (len(queries), self.classes):
            raise FederationError(
                f"{voter.name}'s model gives {tuple(logits.shape)} for {len(queries)} queries, but {self.classes} "
                f"classes need {(len(queries), self.classes)}"
            )
        return logits

    def _query(self, keys: Keys, party: Party, queries: torch.Tensor) -> CKKSTensor:
        """The queries at A, encrypted under Q's keys, which A gets with the first of them."""
        public, Q = keys.public, self.session.Q
        if party not in self._sent:
            setup = self.session.setup(party)
            message = setup.own(Q, public.message(), Phase.SETUP, "keys")
            self._sent[party] = PublicKeys.from_message(public.parameters, setup.read(send_keys(setup, message), party))
        with self.session.call(party) as net:
            sealed = encrypted_query(net, net.own(Q, queries), lambda x: residues(encrypt(x, keys).cipher))
            form = blank_encryption(queries, public.parameters, VALUE_BOUND)
            return received_ciphertexts(form, net.read(sealed, party), self._sent[party])

    def _answering(self, voter: Voter, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """From queries in float64 to one-hot votes."""

        @with_shapes(lambda queries: queries.new_empty((len(queries), self.classes), dtype=torch.int64))
        def answer(queries: torch.Tensor) -> torch.Tensor:
            return self._one_hot(voter, queries.to(dtype))

        return answer

    def _one_hot(self, voter: Voter, images: torch.Tensor) -> torch.Tensor:
        answers = answer_of(voter.model, images)
        if int(answers.max()) >= self.classes or int(answers.min()) < 0:
            raise FederationError(f"{voter.name}'s model names a class outside of 0..{self.classes - 1}")
        return F.one_hot(answers, self.classes)

    def _pair(self, garbler: Party) -> Any:
        """Base oblivious transfers, once a session and garbler."""
        if garbler not in self._pairs:
            party = self.session.answering[0] if garbler == self.session.S else garbler
            self._pairs[garbler] = correlate(self.session.setup(party), garbler)
        return self._pairs[garbler]

    def _keygen(self, voters: Sequence[Voter], sample: torch.Tensor | None, batch: int):
        if sample is None:
            raise FederationError("inference='ckks' makes its keys for a model and a shape: name sample, one image")
        reports = [explain(voter.model, sample, None) for voter in voters]
        for voter, report in zip(voters, reports, strict=True):
            if report.problem:
                raise FederationError(f"{voter.name}'s model cannot be evaluated under encryption: {report.problem}")
        depths = [report.depth for report in reports if report.depth is not None]
        depth = max([1, *depths]) + SPARE_LEVELS
        # A long chain has room for a finer scale than the shares have bits for.
        scale_bits = min(choose(depth, slots=batch).scale_bits, finest_scale(self.scheme.frac_bits))
        return keygen(depth, slots=batch, scale_bits=scale_bits)


class SimulatedPanel(Panel):
    """The same votes and the same mechanism in the clear: for learning curves. Protects nothing, sends nothing."""

    def __init__(self, voters: Sequence[Voter], classes: int):
        if not voters:
            raise FederationError("a panel needs at least one voter, got none")
        self.classes, self.voters = classes, list(voters)

    def ask(self, queries: torch.Tensor, mechanism: Mechanism, least: int = 1, drawn: Drawn | None = None) -> Answer:
        if len(self.voters) < least:
            raise TooFewVotersError(f"{len(self.voters)} answering parties, and an answer needs {least}")
        start = time.perf_counter()
        votes = self.votes(queries)
        inferred = time.perf_counter()
        labels = mechanism.labelled(votes, drawn or mechanism.draw(*votes.shape))
        seconds = {"infer": inferred - start, "onehot": 0.0, "argmax": time.perf_counter() - inferred}
        return Answer(labels, len(self.voters), [], seconds, votes.tolist())

    def votes(self, queries: torch.Tensor) -> torch.Tensor:
        """The counts, [N, classes]."""
        return torch.stack([self._one_hot(voter, queries) for voter in self.voters]).sum(0)


@leaf
def _sum(*values: torch.Tensor) -> torch.Tensor:
    return torch.stack(values).sum(0)
