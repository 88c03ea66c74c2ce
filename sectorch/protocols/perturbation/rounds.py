"""The rounds of a server and its clients: who computes what, and which message of `perturbation/messages.py` follows.

Once:        public keys of the clients up, all of them down (for masks)
Each round:  the noisy model down; in the paper's cross-entropy exchange a request and a reply a batch; the update up
Double masks: who sent an update down, an opening up

The same program runs with all parties in this process or with one in each (`sectorch.choreography.run.party`). What a
message shows is in docs/perturbation.md. Source: section III; Bonawitz et al. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...choreography import Located, Net, Party
from ...choreography.located import compute
from ...errors import ArgumentError, MisplacedValueError, NetworkError
from ...session import Session
from .errors import DroppedClientError, WeightError
from .masks import ClientMasks, Opening, neighbours
from .messages import (
    PAIR,
    ROUND_BYTES,
    SERVER,
    Key,
    Reply,
    Request,
    Update,
    exchange,
    roles_of,
    send_begun,
    send_cohort,
    send_key,
    send_masked,
    send_model,
    send_opening,
    send_plain,
    send_survivors,
)
from .scheme import Batch, ClientRound, Recovered, Scheme

KEY_BYTES = 32
"""Of a public key, and of a seed."""


@dataclass(frozen=True)
class Alone:
    """What one party does. The others know the shapes of its result, and None stands for what is no tensor."""

    f: Callable
    result: Any

    def __call__(self, *values: Any) -> Any:
        return self.f(*values)

    def shapes(self, *_: Any) -> Any:
        return self.result


def _bytes(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _party(client: int) -> Party:
    return Party(f"C{client}", f"C{client}")


class Federation:
    """A server and its clients, who train one scheme's model.

    Args:
        scheme: made from the same model at every party.
        clients: how many; C0, C1, ... of the session.
        masked: whether the server sees only the sum of the updates. One client alone has nobody to hide behind.
        double: masks that survive a client that drops out (`masks.py`).
        degree: with how many others a client shares masks, even; None for all. What a few withstand: `graph.py`.
        session: of `roles_of(clients)`; all parties in this process unless given.

    Making it exchanges the clients' public keys. Between two rounds a client draws its mask of the next. The local
    session protects nothing: see `sectorch.Session`.

    Raises:
        ArgumentError: a session of other roles, or no client. MaskError: no such degree.
        KeyAgreementError: a key is not a point of the curve.
    """

    def __init__(
        self,
        scheme: Scheme,
        clients: int,
        *,
        masked: bool = True,
        double: bool = False,
        degree: int | None = None,
        session: Session | None = None,
    ):
        if clients < 1:
            raise ArgumentError(f"a federation has at least one client, got {clients}")
        roles = roles_of(clients)
        self.session = session or Session(roles=roles)
        if self.session.roles != roles:
            raise ArgumentError(
                f"a federation of {clients} has the roles {roles}; the session's are {self.session.roles}"
            )
        self.scheme, self.clients = scheme, clients
        self.masked, self.double = masked and clients > 1, double and masked and clients > 1
        self._blank = scheme.blank()
        self._degree, self._near = degree, neighbours(range(clients), degree, self.session.runtime.session)
        self._masks: list[ClientMasks | None] = [None] * clients
        self._lost: list[str] = []
        if self.masked:
            self._join()

    def __repr__(self) -> str:
        return f"Federation({self.clients} clients)"

    def begin(self, done: int) -> int:
        """How many rounds were finished before, as the server, who has the model, says; `done` counts where it is."""
        with self.session.call() as net:
            serves = self.session.present(net.Server)
            begun = net.own(net.Server, torch.tensor([done], device=None if serves else "meta"))
            for client in range(self.clients):
                with self._pair(net, client):
                    told = net.read(send_begun(net, begun), net.Client)
                    done = done if told.is_meta else int(told)
        return done

    def round(
        self,
        state: Mapping[str, torch.Tensor] | None,
        batches: Sequence[Batch | list[Batch]],
        weights: Sequence[float],
    ) -> Recovered | None:
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
        shares = [weight / sum(weights) for weight in weights]
        sizes = [self.scheme.sizes(batch) for batch in batches]
        self._lost.clear()
        with self.session.call() as net:
            key, models = self._send_models(net, state)
            updates = {}
            for client, model in models.items():
                with self._met(net, client):
                    updates[client] = self._stepped(net, client, key, model, batches[client], sizes[client], shares)
            openings = self._opened(net, key, models, sorted(updates)) if self.double else []
            found = self._recovered(net, key, updates, openings, list(map(sum, sizes)), weights)
            if self.masked:
                self._prepare(net, models)
            return found

    def _prepare(self, net: Net, models: Mapping[int, Located]) -> None:
        """Every client draws its mask of the next round, while the server is busy or waits."""
        for client, model in models.items():

            def prepared(data: torch.Tensor, client: int = client) -> None:
                self.scheme.prepare(self._blank.unpacked(data, self.scheme.device), self._own_masks(client))

            with self._pair(net, client):
                net.fresh(net.Client, Alone(prepared, None), model)

    def _send_models(self, net: Net, state: Mapping[str, torch.Tensor] | None) -> tuple[Located, dict[int, Located]]:
        """The server noises the model and sends it to every client; its key, and what each client has."""

        def perturbed(state: Mapping[str, torch.Tensor]) -> tuple:
            noisy, key = self.scheme.perturb(state)
            return noisy.packed(), key

        true, models = net.own(net.Server, state, name="state"), {}
        model, key = net.fresh(net.Server, Alone(perturbed, (_bytes(self._blank.nbytes), None)), true)
        for client in range(self.clients):
            with self._met(net, client):
                models[client] = send_model(net, model)
        return key, models

    def _stepped(
        self, net: Net, client: int, key: Located, model: Located, batch: Any, sizes: list[int], shares: list[float]
    ) -> Located:
        """One client's work on the model; its update at the server."""
        scheme, outputs, masks = self.scheme, self.scheme.plan.outputs, self._masks[client]

        def begun(data: torch.Tensor) -> ClientRound:
            return scheme.begin(self._blank.unpacked(data, scheme.device), batch)

        def worked(data: torch.Tensor) -> torch.Tensor:
            step = begun(data)
            for _ in sizes:
                step.ask()
                step.take(None)
            return ended(step)

        def answered(key: Key, data: torch.Tensor) -> torch.Tensor:
            return scheme.answer(key, Request.unpacked(data, key.round, outputs)).packed()

        def told(step: ClientRound, data: torch.Tensor) -> None:
            step.take(Reply.unpacked(data, step.noisy.round, outputs, scheme.device))

        def ended(step: ClientRound) -> torch.Tensor:
            return scheme.update(step.noisy, *step.done(), masks=masks, share=shares[client]).packed()

        if scheme.exchange == "paper":
            step = net.fresh(net.Client, Alone(begun, None), model)
            for size in sizes:
                asked = Alone(lambda step: step.ask().packed(), _bytes(Request.size(size, outputs)))
                reply = Alone(answered, _bytes(Reply.size(size, outputs)))
                reply = exchange(net, net.fresh(net.Client, asked, step), reply, key)
                net.fresh(net.Client, Alone(told, None), step, reply)
            update = net.fresh(net.Client, Alone(ended, self._update_shape()), step)
        else:
            update = net.fresh(net.Client, Alone(worked, self._update_shape()), model)
        return send_masked(net, update) if self.masked else send_plain(net, update)

    def _recovered(
        self,
        net: Net,
        key: Located,
        updates: Mapping[int, Located],
        openings: Sequence[Located],
        samples: Sequence[int],
        weights: Sequence[float],
    ) -> Recovered | None:
        """The server recovers the gradient from the updates that came."""
        came = sorted(updates)

        def recovered(key: Key, *sent: torch.Tensor) -> Recovered:
            known = [self._update(key, k, data, samples[k], weights) for k, data in zip(came, sent, strict=False)]
            opened = [
                Opening(client, key.round, seeds[0], dict(zip(self._dropped(client, came), seeds[1:], strict=True)))
                for client, seeds in zip(came, map(_seeds, sent[len(came) :]), strict=False)
            ]
            return self.scheme.recover(key, known, [weights[client] for client in came], opened)

        try:
            result = net.fresh(net.Server, Alone(recovered, None), key, *(updates[k] for k in came), *openings)
        except DroppedClientError as error:
            raise DroppedClientError("; ".join([str(error), *self._lost])) from error
        return net.read(result, net.Server)

    def _join(self) -> None:
        """Every client gets every public key, and agrees a secret with each other client."""
        for client in range(self.clients):
            if self.session.present(_party(client)):
                self._masks[client] = ClientMasks(client, self.double, self._degree)
        with self.session.call() as net:
            publics = []
            for client, masks in enumerate(self._masks):
                with self._pair(net, client):
                    public = net.fresh(net.Client, Alone(lambda masks=masks: _tensor(masks.public), _bytes(KEY_BYTES)))
                    publics.append(send_key(net, public).at("Server"))
            every = compute(torch.cat, publics)
            for client in range(self.clients):

                def joined(keys: torch.Tensor, client: int = client) -> None:
                    self._own_masks(client).join(dict(enumerate(_seeds(keys))), self.session.runtime.session)

                with self._pair(net, client):
                    net.fresh(net.Client, Alone(joined, None), send_cohort(net, every))

    def _own_masks(self, client: int) -> ClientMasks:
        masks = self._masks[client]
        if masks is None:
            raise MisplacedValueError(f"client {client} is in another process, and so are its masks")
        return masks

    def _opened(self, net: Net, key: Located, models: Mapping[int, Located], came: list[int]) -> list[Located]:
        """The survivors, who are told who survived, open their masks of this round."""
        marks = Alone(lambda key: torch.tensor([k in came for k in range(self.clients)]).byte(), _bytes(self.clients))
        marks, told = net.fresh(net.Server, marks, key), []
        for client in came:
            with self._pair(net, client):
                told.append(net.read(send_survivors(net, marks), net.Client))
        if not self.session.present(SERVER):
            came = next(marks for marks in told if not marks.is_meta).nonzero().flatten().tolist()
        openings = []
        for client in came:

            def opened(data: torch.Tensor, client: int = client) -> torch.Tensor:
                opening = self._own_masks(client).open(bytes(data[-ROUND_BYTES:].tolist()), came)
                return _tensor(b"".join((opening.own, *(seed for _, seed in sorted(opening.pairs.items())))))

            size = KEY_BYTES * (1 + len(self._dropped(client, came)))
            with self._pair(net, client):
                opening = net.fresh(net.Client, Alone(opened, _bytes(size)), models[client])
                openings.append(send_opening(net, opening))
        return openings

    def _dropped(self, client: int, came: Sequence[int]) -> list[int]:
        """Whom a client shared masks with and who sent nothing, in order."""
        return [peer for peer in self._near[client] if peer not in came]

    def _update_shape(self) -> torch.Tensor:
        terms, trained, statistics = self.scheme.counts
        count = terms * trained + statistics
        return _bytes(count, torch.int64) if self.masked else _bytes(count * self._blank.dtype.itemsize)

    def _update(self, key: Key, client: int, data: torch.Tensor, samples: int, weights: Sequence[float]) -> Update:
        """What the server takes a client's message for."""
        terms, trained, _ = self.scheme.counts
        numbers = data if self.masked else data.view(self._blank.dtype)
        rows, statistics = numbers[: terms * trained].view(terms, trained), numbers[terms * trained :]
        if not self.masked:
            return Update(key.round, rows.to(self.scheme.device), statistics.to(self.scheme.device), samples)
        share = weights[client] / sum(weights)
        cohort, near = tuple(range(self.clients)), self._near[client]
        return Update(key.round, rows, statistics, samples, share, client, cohort, self.double, near)

    def _pair(self, net: Net, client: int) -> AbstractContextManager[None]:
        """Inside, the server and this client are the two of a protocol."""
        return net.playing(PAIR, Server=SERVER, Client=_party(client))

    @contextmanager
    def _met(self, net: Net, client: int) -> Iterator[None]:
        """The same; the server goes on where the edge to the client breaks."""
        try:
            with self._pair(net, client):
                yield
        except NetworkError as error:
            if not self.session.present(SERVER):
                raise
            self._lost.append(f"C{client}: {error}")


def _seeds(data: torch.Tensor) -> list[bytes]:
    return [bytes(part.tolist()) for part in data.split(KEY_BYTES)]
