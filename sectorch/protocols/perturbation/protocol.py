"""The messages of a round, declared, and who sends which when: `Federation`.

Once:        public keys of the clients up, all of them down (`sectorch/secure_sum.py`)
Each round:  the noisy model down; in the paper's cross-entropy exchange a request and a reply a batch; the update up
Double masks: who sent an update down, an opening up

The same program runs with all parties in this process or with one in each. What a message shows is in
docs/perturbation.md. Source: section III.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...choreography import Located, Message, Net, Party, Roles, protocol
from ...errors import ArgumentError
from ...secure_sum import (
    NAME_BYTES,
    PAIR,
    PairwiseMasks,
    ServerAndClients,
    meta_bytes,
    of_shape,
    send_masked,
    star_roles,
)  # fmt: skip
from ...session import Session
from .algorithm import Key
from .errors import WeightError
from .messages import NoisyModel, Reply, Request, Update
from .scheme import Batch, ClientRound, Recovered, Scheme

SERVER = Party("Server", "Server")


def clients_of(count: int) -> list[str]:
    """The names of so many clients: C0, C1, ..."""
    return [f"C{client}" for client in range(count)]


def roles_of(clients: int) -> Roles:
    """The star of a server and so many clients."""
    return star_roles(clients_of(clients))


@protocol("perturbation_model", "III-A", [
    Message("model", "Server", "Client", "scales and additive noise of the server",
            "a model of the same function, and more (docs/perturbation.md)"),
], roles=PAIR)  # fmt: skip
def send_model(net: Net, model: Located) -> Located:
    """A round's noisy model, the same to each client: the model's bytes, 16 for each of its outputs, and 16."""
    return model.send(net.Server, net.Client, "model")


@protocol("perturbation_exchange", "III-B1 b, Eqs. 22 to 25", [
    Message("request", "Client", "Server", "lambda, which does not hide it", "the prediction of every sample"),
    Message("reply", "Server", "Client", "delta and xi, which do not hide it", "the prediction of every sample"),
], roles=PAIR)  # fmt: skip
def exchange(net: Net, request: Located, answer: Callable, key: Located) -> Located:
    """The paper's exchange for cross-entropy, of one batch. Rounds 2, bytes 8 B (n (n - 1) + 1) and 24 B n."""
    at_server = request.send(net.Client, net.Server, "request").at("Server")
    return net.fresh(net.Server, answer, key, at_server).send(net.Server, net.Client, "reply")


@protocol("perturbation_plain_update", "III-B", [
    Message("update", "Client", "Server", "", "the client's gradient"),
], roles=PAIR)  # fmt: skip
def send_plain(net: Net, update: Located) -> Located:
    """A client's terms and statistics without masks: the bytes of the model's floats."""
    return update.send(net.Client, net.Server, "update")


class Federation:
    """A server and its clients, who train one scheme's model.

    Args:
        scheme: made from the same model at every party.
        clients: how many; C0, C1, ... of the session.
        masked: whether the server sees only the sum of the updates. One client alone has nobody to hide behind.
        double: masks that survive a client that drops out (`secure_sum.py`).
        degree: with how many others a client shares masks, even; None for all. What a few withstand: `secure_sum.py`.
        session: of `roles_of(clients)`; or one of each client with the server (`federated.parties.client_sessions`),
            which `double` needs in a federation, where a session ends for all when one of its parties is lost.
            All parties in this process unless given.

    Making it exchanges the clients' public keys. Between two rounds a client draws its mask of the next. The local
    session protects nothing: see `sectorch.Session`.

    Raises:
        ArgumentError: a session of other roles, or no client. MaskError: no such degree.
        KeyAgreementError: a key is not a point of the curve.
    """

    def __init__(
        self, scheme: Scheme, clients: int, *, masked: bool = True, double: bool = False, degree: int | None = None,
        session: Session | Mapping[str, Session | None] | None = None,
    ):  # fmt: skip
        if clients < 1:
            raise ArgumentError(f"a federation has at least one client, got {clients}")
        if scheme.private is not None and (not masked or clients < 2):
            raise ArgumentError(
                "a private sum is of two clients or more under masks: without, the server sees one share of the noise"
            )
        roles, names = roles_of(clients), clients_of(clients)
        self.session = session or Session(roles=roles)
        if isinstance(self.session, Session) and self.session.roles != roles:
            raise ArgumentError(
                f"a federation of {clients} has the roles {roles}; the session's are {self.session.roles}"
            )
        self.scheme, self.clients, self._blank = scheme, clients, scheme.blank()
        self._masks = None
        if masked and clients > 1:
            least = 2 if scheme.private is None else scheme.private.least
            self._masks = PairwiseMasks(self.session, names, drop_outs=double, degree=degree, least=least)
        self._star = self._masks or ServerAndClients(self.session, names)

    def __repr__(self) -> str:
        return f"Federation({self.clients} clients)"

    def round(
        self, state: Mapping[str, torch.Tensor] | None, batches: Sequence[Batch | list[Batch]],
        weights: Sequence[float],
    ) -> Recovered | None:  # fmt: skip
        """One round: the true gradient of the clients' weighted mean loss, at the server; None elsewhere.

        Args:
            state: the true weights, where the server is; None elsewhere.
            batches: of each client, one or several. Of clients who are not here their shapes (meta tensors).
            weights: N_k, known to everybody.

        Rounds 2, and 2 a batch in the paper's exchange; bytes: see the protocols above. The server goes on without a
        client whose edge breaks: with double masks the others' gradient is recovered, else the round is to be redone.

        Raises:
            WeightError: weights or batches for another number of clients, or no positive numbers.
            DroppedClientError: at the server: a client is missing, and its masks cannot be taken off.
        """
        if len(weights) != self.clients or len(batches) != self.clients:
            said = f"{len(weights)} and {len(batches)}"
            raise WeightError(f"{self.clients} clients have as many weights N_k and batches, got {said}")
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise WeightError(f"a weight N_k is a positive number, got {list(weights)}")
        scheme, masks, star = self.scheme, self._masks, self._star
        shares = [weight / sum(weights) for weight in weights]
        sizes = [scheme.sizes(batch) for batch in batches]
        drawn: list[tuple[NoisyModel, Key]] = []  # once, though each session's server has its own part of the program

        def perturbed(state: Mapping[str, torch.Tensor]) -> tuple:
            if not drawn:
                drawn.append(scheme.perturb(state))
            return drawn[0][0].packed(), drawn[0][1]

        star.lost.clear()
        with star.calls() as nets:
            here = {k: net for k, net in enumerate(nets) if net is not None}
            noised, models, sent = {}, {}, {}
            for net in dict.fromkeys(here.values()):
                shapes = of_shape(perturbed, (meta_bytes(self._blank.nbytes), None))
                noised[net] = net.fresh(SERVER, shapes, net.own(SERVER, state, name="state"))
            for k, net in here.items():
                with star.met(net, k):
                    models[k] = send_model(net, noised[net][0])
            for k, model in models.items():
                net = here[k]
                with star.met(net, k):
                    update = self._step(net, k, noised[net][1], model, batches[k], sizes[k], shares[k])
                    sent[k] = net.read((send_plain if masks is None else send_masked)(net, update), net.Server)
            came, openings = sorted(sent), []
            if masks is not None:
                names = {k: here[k].compute(lambda data: data[-NAME_BYTES:], (model,)) for k, model in models.items()}
                came, openings = masks.openings(nets, names, sent if star.serves else range(self.clients))

            def recovered(key: Key) -> Recovered:
                known = [self._update(key, k, sent[k], sum(sizes[k]), shares[k]) for k in came]
                opened = [] if masks is None else masks.opened(key.round, came, openings)
                return scheme.recover(key, known, [weights[k] for k in came], opened)

            net = next(here[k] for k in (came if star.serves else models) if k in here)
            found = net.fresh(SERVER, of_shape(recovered, None), noised[net][1])
            if masks is not None:
                self._prepare(masks, here, models)
            return net.read(found, SERVER)

    def _prepare(self, masks: PairwiseMasks, nets: Mapping[int, Net], models: Mapping[int, Located]) -> None:
        """Every client draws its mask of the next round, while the server is busy or waits."""
        for k, model in models.items():

            def prepare(data: torch.Tensor, k: int = k) -> None:
                self.scheme.prepare(self._blank.unpacked(data, self.scheme.device), masks.of(k))

            with self._star.pair(nets[k], k) as net:
                net.fresh(net.Client, of_shape(prepare, None), model)

    def _step(
        self, net: Net, client: int, key: Located, model: Located, batch: Any, sizes: list[int], share: float
    ) -> Located:
        """One client's work on the model: its update, at the client."""
        scheme, outputs = self.scheme, self.scheme.plan.outputs

        def begin(data: torch.Tensor) -> ClientRound:
            return scheme.begin(self._blank.unpacked(data, scheme.device), batch, share)

        def ask(step: ClientRound) -> torch.Tensor | None:
            return None if (request := step.ask()) is None else request.packed()

        def answer(key: Key, data: torch.Tensor) -> torch.Tensor:
            return scheme.answer(key, Request.unpacked(data, key.round, outputs)).packed()

        def take(step: ClientRound, data: torch.Tensor | None = None) -> None:
            step.take(None if data is None else Reply.unpacked(data, step.noisy.round, outputs, scheme.device))

        def end(step: ClientRound) -> torch.Tensor:
            masks = None if self._masks is None else self._masks.of(client)
            return scheme.update(step.noisy, *step.done(), masks=masks, share=share).packed()

        step = net.fresh(net.Client, of_shape(begin, None), model)
        for size in sizes:
            if scheme.exchange == "paper":
                request = net.fresh(net.Client, of_shape(ask, meta_bytes(Request.size(size, outputs))), step)
                reply = exchange(net, request, of_shape(answer, meta_bytes(Reply.size(size, outputs))), key)
                net.fresh(net.Client, of_shape(take, None), step, reply)
            else:
                net.fresh(net.Client, of_shape(ask, None), step)
                net.fresh(net.Client, of_shape(take, None), step)
        terms, trained, statistics = scheme.counts
        count = terms * trained + statistics
        plain = meta_bytes(count * self._blank.dtype.itemsize)
        return net.fresh(
            net.Client, of_shape(end, plain if self._masks is None else meta_bytes(count, torch.int64)), step
        )

    def _update(self, key: Key, client: int, data: torch.Tensor, samples: int, share: float) -> Update:
        """What the server takes a client's message for."""
        (terms, trained, _), masks = self.scheme.counts, self._masks
        numbers = data.view(self._blank.dtype).to(self.scheme.device) if masks is None else data
        parts = numbers[: terms * trained].view(terms, trained), numbers[terms * trained :]
        if masks is None:
            return Update(key.round, *parts, samples)
        cohort, near = tuple(range(self.clients)), masks.near[client]
        return Update(key.round, *parts, samples, share, client, cohort, masks.drop_outs, near)
