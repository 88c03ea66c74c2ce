"""One querying party asks a panel of answering parties: steps 1 to 3 of CaPC (3.2) on a batch of queries.

    panel = Panel([Voter("hospital-b", model_b), Voter("hospital-c", model_c)], classes=10, sample=images[:1])
    labels = panel.ask(images, GNMax(7.5)).labels        # all that Q learns; -1 where Confident-GNMax does not answer

The privacy guardian PG is the server S of the star. What Q and A say to each other goes through it under pads of their
pair key. Sums are mod 2^64.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from ...choreography import Located, Message, Net, Party, Phase, protocol
from ...choreography.roles import STAR
from ...ckks import CKKSTensor, LocatedCKKSTensor, LocatedKeys, choose, explain, keygen, to_shares
from ...ckks.convert import finest_scale
from ...ckks.module import send_keys
from ...ckks.scheme.keys import Keys, PublicKeys
from ...dp import GNMax, Mechanism
from ...dp.mechanisms import Drawn
from ...errors import FederationError, NetworkError
from ...federated.outcome import first_and_later
from ...federated.parties import Parties
from ...federated.watch import Estimate
from ...nn.module import secure
from ...session import S, Session
from ...tensor import Scheme, SharedTensor, share_tensor
from ...tensor.holders import collect, one_hot_argmax
from .algorithm import label
from .settings import Settings, TooFewVotersError, Vote
from .votes import plain_ballot, whole_numbers

# The messages of CaPC that are its own; the rest is the secure inference and the garbled circuits.


@protocol(
    "capc_encrypted_query",
    "CaPC, step 1a",
    [Message("query", "Q", "S", "encrypted"), Message("query_forwarded", "S", "A", "encrypted")],
)
def encrypted_query(net: Net, queries: LocatedCKKSTensor) -> LocatedCKKSTensor:
    """Q's queries go to A under Q's own key.

    Rounds 2; bytes: the residues of the ciphertexts, twice. S and A learn the shape.
    """
    return queries.to(net.A, "query")


@protocol(
    "capc_open_query",
    "docs/capc.md",
    [
        Message("query", "Q", "S", "pad of k_QA"),
        Message("query_open", "S", "A", "pad of k_QA, which A knows", "the query, in plain"),
    ],
)
def open_query(net: Net, queries: Located) -> Located:
    """The route for models that cannot be evaluated on secrets: A SEES THE QUERIES, float64, and votes in plain.

    Rounds 2, bytes 16 per element. S receives uniform values.
    """
    pad = net.common(net.Q, net.A, queries.shape, "pad")
    sealed = (queries.view(torch.int64) ^ pad).send(net.Q, net.S, "query").send(net.S, net.A, "query_open")
    return (sealed.at("A") ^ pad).view(torch.float64)


LOGIT_BOUND_BITS = 10
"""Encrypted logits are declared to be below 2^10, whatever the largest sums of a voter's weights would allow."""
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

    `labels` [N] int64 is what Q learns, -1 where a query was not answered; [N, classes] in shares of Q and S if nothing
    was opened. `voters` is how many votes were counted,
    `lost` who was lost on the way. `seconds` of step 1a, of 1b and 1c, and of 2 and 3. `votes` is None but in a
    simulation in the clear.
    """

    labels: Any = field(repr=False)
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
        vote: step 1c, "argmax" or a function; see `Settings`. The noise must cover what one ballot gives (`moved`).
        ballot_votes: with "open", where a ballot is in the clear at its party, one with more votes is refused.
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
        self, voters: Sequence[Voter], classes: int, *, inference: str = "mpc", argmax: str = "yao",
        vote: str | Vote = "argmax", ballot_votes: int | None = None, frac_bits: int = 20,
        sample: torch.Tensor | None = None, batch: int = 64, session: Session | None = None,
    ):  # fmt: skip
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
            raise FederationError(f"in a federation the inference is mpc, got {inference!r}")
        self.voters, self.classes, self.inference = list(voters), classes, inference
        self.vote, self.ballot_votes = vote, ballot_votes
        self.argmax: Any = argmax
        self.scheme = Scheme(frac_bits)
        self.party = {voter.name: party for voter, party in zip(voters, self.session.answering, strict=True)}
        self.lost: list[str] = []
        self.seconds: dict[str, float] = {}
        self._secured: dict[str, Any] = {}
        self._sent: dict[str, PublicKeys] = {}
        self._keys = self._keygen(sample, batch) if inference == "ckks" else None

    def ask(
        self, queries: torch.Tensor, mechanism: Mechanism, least: int = 1, drawn: Drawn | None = None,
        opened: bool = True,
    ) -> Answer:  # fmt: skip
        """Labels of the queries by noisy vote. Q learns the labels and nothing else, the others nothing.

        Args:
            queries: [N, ...] of Q.
            mechanism: its noise is drawn by the privacy guardian alone, so that it does not depend on who votes. With
                `ConfidentGNMax` Q learns for each query whether it is answered, and the label if it is.
            least: votes that an answer needs. A party that is lost before its share reaches the guardian does not vote,
                in this batch and later ones; the guardian and Q leave it out of both sums. In a federation that
                ends the session for all.
            drawn: the guardian's noise, where it has drawn it for these queries before (`mechanism.draw`).
            opened: whether Q learns the labels; see `NoisyMax.release`.

        Bytes: those of the inference, of `one_hot_argmax` and of `collect` for each party, and of `reveal_argmax`. The
        label is that of the plain mechanism with the same noise, but where a model's two largest logits differ by less
        than 2^-15 and the error of the secure inference.

        Raises:
            TooFewVotersError: fewer votes than `least`; no noise was drawn and nothing revealed.
            NetworkError: the querying party or the guardian was lost.
        """
        self.seconds, start = {"infer": 0.0, "onehot": 0.0}, time.perf_counter()
        labels = label(self, queries, mechanism, least, drawn, opened)
        seconds = {**self.seconds, "argmax": time.perf_counter() - start - sum(self.seconds.values())}
        return Answer(labels, len(self.voters) - len(self.lost), list(self.lost), seconds)

    @property
    def there(self) -> list[Voter]:
        """The voters that were not lost."""
        return [voter for voter in self.voters if voter.name not in self.lost]

    @property
    def helper(self) -> Party:
        """The answering party that deals in step 3 on shares."""
        return self.party[self.there[0].name]

    @contextmanager
    def unless_lost(self, voter: Voter) -> Iterator[None]:
        """A block that ends where the voter is lost, who then votes no more."""
        try:
            yield
        except NetworkError:
            if not self.session.complete:
                raise
            self.lost.append(voter.name)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[step] += time.perf_counter() - start

    def check_votes(self, count: int, least: int) -> None:
        """Raises:
        TooFewVotersError: fewer ballots than an answer needs.
        """
        if count < max(1, least):
            raise TooFewVotersError(
                f"{count} of {len(self.voters)} answering parties voted and an answer needs {least}; lost: "
                f"{', '.join(self.lost)}; nothing was revealed; ask again when they are back"
            )

    def logits(self, voter: Voter, queries: torch.Tensor) -> SharedTensor:
        """Step 1a: [N, classes] in shares of A and S; the ballots, where A sees the queries."""
        with self.timed("infer"):
            party = self.party[voter.name]
            if self.inference == "open":
                with self.session.call(party) as net:
                    plain = net.read(open_query(net, net.own(net.Q, queries.double())), party)
                seen = plain.to(queries.dtype)
                votes = plain_ballot(self.vote, voter.name, voter.model, seen, self.classes, self.ballot_votes)
                return share_tensor(votes, session=self.session, party=party, scheme=self.scheme, owner=party)
            if self._keys is not None:
                with torch.no_grad():
                    answered = voter.model(self._query(self._keys, voter.name, queries))
                logits = to_shares(
                    answered.bounded(2.0**LOGIT_BOUND_BITS), self._keys.secret, session=self.session, party=party,
                    scheme=self.scheme,
                )  # fmt: skip
            else:
                if voter.name not in self._secured:
                    self._secured[voter.name] = secure(voter.model, self.scheme, session=self.session, party=party)
                secured = self._secured[voter.name]
                shared = share_tensor(queries.detach(), session=self.session, party=party, scheme=secured.scheme)
                logits = secured(shared)
            if tuple(logits.shape) != (len(queries), self.classes):
                raise FederationError(
                    f"{voter.name}'s model gives {tuple(logits.shape)} for {len(queries)} queries, but {self.classes} "
                    f"classes need {(len(queries), self.classes)}"
                )
            return logits

    def ballot(self, voter: Voter, logits: SharedTensor) -> SharedTensor:
        """Steps 1b and 1c, and the first half of 2: [N, classes], whole numbers in shares of Q and S.

        Whether a value left its range is nobody's to know: it would be told without noise.
        """
        with self.timed("onehot"):
            if self.inference == "open":
                return collect([logits])
            logits = logits.unchecked()
            if not callable(self.vote):
                return collect([one_hot_argmax(logits, engine=self.argmax, frac_bits=KEPT_BITS)])
            return collect([whole_numbers(self.vote(logits, voter.name), logits.shape).unchecked()])

    def _query(self, keys: Keys, name: str, queries: torch.Tensor) -> CKKSTensor:
        """The queries at A, encrypted under Q's keys, which A gets with the first of them."""
        public, Q, party = keys.public, self.session.Q, self.party[name]
        if name not in self._sent:
            setup = self.session.setup(party)
            message = setup.own(Q, public.message(), Phase.SETUP, "keys")
            self._sent[name] = PublicKeys.from_message(public.parameters, setup.read(send_keys(setup, message), party))
        with self.session.call(party) as net:
            own = LocatedKeys(net, Q, public.parameters, keys, {party: self._sent[name]})
            return net.read(encrypted_query(net, own.encrypt(net.own(Q, queries))).content, party)

    def _keygen(self, sample: torch.Tensor | None, batch: int) -> Keys:
        if sample is None:
            raise FederationError("inference='ckks' makes its keys for a model and a shape: name sample, one image")
        depth = 1
        for voter in self.voters:
            report = explain(voter.model, sample, None)
            if report.problem:
                raise FederationError(f"{voter.name}'s model cannot be evaluated under encryption: {report.problem}")
            depth = max(depth, report.depth or 0)
        depth += SPARE_LEVELS
        # A long chain has room for a finer scale than the shares have bits for.
        scale_bits = min(choose(depth, slots=batch).scale_bits, finest_scale(self.scheme.frac_bits))
        return keygen(depth, slots=batch, scale_bits=scale_bits)


class SimulatedPanel(Panel):
    """The same votes and the same mechanism in the clear: for learning curves. Protects nothing, sends nothing."""

    def __init__(
        self, voters: Sequence[Voter], classes: int, vote: str | Vote = "argmax", ballot_votes: int | None = None
    ):  # fmt: skip
        if not voters:
            raise FederationError("a panel needs at least one voter, got none")
        self.voters, self.classes, self.vote, self.ballot_votes = list(voters), classes, vote, ballot_votes

    def ask(
        self, queries: torch.Tensor, mechanism: Mechanism, least: int = 1, drawn: Drawn | None = None,
        opened: bool = True,
    ) -> Answer:  # fmt: skip
        if not opened:
            raise FederationError("a vote in the clear has no labels in shares")
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
        most = self.ballot_votes
        ballots = [plain_ballot(self.vote, v.name, v.model, queries, self.classes, most) for v in self.voters]
        return torch.stack(ballots).sum(0)


@dataclass
class Sitting:
    """A querying party and those who answer it: their session lasts for all its questions, until the block's end."""

    asker: str
    how: Settings
    classes: int
    agreed: str

    def __post_init__(self) -> None:
        self._stack, self._panel = ExitStack(), None
        self._costs: dict[str, tuple[Estimate, Estimate]] = {}

    def __enter__(self) -> Sitting:
        return self

    def __exit__(self, *error: Any) -> None:
        self._panel = None
        self._stack.__exit__(*error)

    def panel(self, parties: Parties, sample: torch.Tensor, names: Sequence[str], models: Sequence[Any]) -> Panel:
        """The panel of these voters, opened with the first question."""
        if self._panel is None:
            voters = [Voter(*pair) for pair in zip(names, models, strict=True)]
            if self.how.inference == "simulated":
                self._panel = SimulatedPanel(voters, self.classes, self.how.vote, self.how.ballot_votes)
            else:
                cast = {"Q": self.asker, "A": list(names), "S": S.name}
                session = parties.session(STAR, cast, label=f"capc {self.asker}", agreed=self.agreed)
                self._panel = self._opened(voters, sample, self._stack.enter_context(session))
        return self._panel

    def _opened(self, voters: Sequence[Voter], sample: torch.Tensor, session: Session | None = None) -> Panel:
        how = self.how
        return Panel(
            voters, self.classes, inference=how.inference, argmax=how.argmax, vote=how.vote,
            ballot_votes=how.ballot_votes, frac_bits=how.frac_bits, sample=sample, batch=how.chunk, session=session,
        )  # fmt: skip

    def cost(self, images: torch.Tensor, names: Sequence[str], models: Sequence[Any]) -> Estimate:
        """What a question takes, measured with one model of each architecture on black images.

        A part of a question's time does not grow with its images, so as many are measured, but of ciphertexts four.
        """
        rows = min(4, len(images)) if self.how.inference == "ckks" else len(images)
        total, black = Estimate(0.0), torch.zeros((rows, *images.shape[1:]), dtype=images.dtype)
        for name, model in zip(names, models, strict=True):
            if self.how.inference == "simulated" or not isinstance(model, nn.Module):
                continue
            if str(model) not in self._costs:
                panel = self._opened([Voter(name, copy.deepcopy(model).eval())], black[:1])
                self._costs[str(model)] = first_and_later(lambda panel=panel: panel.ask(black, GNMax(1.0)))
                total += self._costs[str(model)][0]
            total += self._costs[str(model)][1] * (len(images) / rows)
        return total
