"""Who decrypts which layer, as data (SecSV, section 6.1.3, Proposition 6.8).

Layer l takes features that client i_l holds (i_1: the owners of the batch) and gives outputs that client i_(l+1)
decrypts and activates. Levels:

| level | against | rules | clients |
| --- | --- | --- | --- |
| `single-layer` | a client solving for one layer, for test data, membership, retraining | i_(l+1) is not i_l; the first and the last decrypting client own no sample of the batch; nobody decrypts for a model that is its own | 3 and more |
| `multi-layer` | and solving for several layers at once | besides, all decrypting clients are different and own no sample | L + 2 |

A model is someone's own when it is one client's local model; nobody owns an aggregated one.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .errors import RoutingError

LEVELS = ("multi-layer", "single-layer")
"""The stronger first."""


@dataclass(frozen=True)
class Route:
    """A batch and its way: the clients whose samples it holds, and who decrypts each layer's outputs."""

    owners: tuple[int, ...]
    clients: tuple[int, ...]

    def check(self, level: str, model_owner: int | None = None) -> None:
        """Hold the route against the rules of its level.

        Raises:
            RoutingError: naming the rule and the client.
        """
        first, last = self.clients[0], self.clients[-1]
        for client, which in ((first, "first"), (last, "last")):
            if client in self.owners:
                raise RoutingError(f"client {client} owns samples of the batch and may not decrypt its {which} outputs")
        if model_owner in self.clients:
            raise RoutingError(f"client {model_owner} owns the model under test and may not decrypt its outputs")
        for before, after in zip(self.clients, self.clients[1:], strict=False):
            if before == after:
                raise RoutingError(f"client {before} would hold both the input and the output of a layer")
        if level == "multi-layer":
            if len(set(self.clients)) < len(self.clients):
                raise RoutingError("at the multi-layer level all decrypting clients of a batch are different")
            if set(self.clients) & set(self.owners):
                raise RoutingError("at the multi-layer level no owner of the batch decrypts any of its outputs")


def plan(
    clients: Sequence[int],
    owners: Sequence[int],
    layers: int,
    level: str,
    *,
    members: Collection[int] = (),
    together: bool = True,
    turn: int = 0,
) -> list[Route]:
    """Routes that cover all owners of test samples, in as few batches as the level allows.

    Args:
        clients: all who may decrypt.
        owners: whose samples are to be tested.
        layers: L.
        level: one of `LEVELS`.
        members: whose local models are in the model. One alone is its owner. Of several, one that decrypts for this
            coalition and for the same without itself would learn its own model's outputs from the difference: clients
            outside the coalition come first where there are any.
        together: whether samples of several clients may share a batch (shares allow it, HESV's ciphertexts do not).
        turn: shifts who decrypts first, so that the work is spread.

    Raises:
        RoutingError: too few clients.
    """
    if level not in LEVELS:
        raise RoutingError(f"there is no routing level {level!r}; there are {', '.join(LEVELS)}")
    model_owner = next(iter(members)) if len(members) == 1 else None
    shift = lambda i: (i + turn) % len(clients)
    order = sorted(clients, key=lambda i: (i in members, shift(i)))
    # Members decrypt nothing or come last: in the largest batch they cost no further client.
    left = sorted(owners, key=lambda i: (i not in members, shift(i)))
    routes = []
    while left:
        for size in range(len(left) if together else 1, 0, -1):
            found = _way(order, left[:size], layers, level, model_owner)
            if found:
                break
        else:
            raise RoutingError(_refusal(len(clients), layers, level))
        routes.append(Route(tuple(sorted(left[:size])), found))
        left = left[size:]
    for route in routes:
        route.check(level, model_owner)
    return routes


def strongest(clients: int, layers: int) -> str:
    """The strongest level that so many clients allow.

    Raises:
        RoutingError: none does.
    """
    for level in LEVELS:
        if feasible(clients, layers, level):
            return level
    raise RoutingError(_refusal(clients, layers, LEVELS[-1]))


def feasible(clients: int, layers: int, level: str) -> bool:
    """Whether a batch of one owner and the model of another client can be routed."""
    return clients >= 2 and bool(_way(range(clients), [0], layers, level, 1))


def require(clients: int, layers: int, level: str) -> None:
    """Raises:
    RoutingError: too few clients for the level; the weaker one is offered where it would do.
    """
    if level not in LEVELS:
        raise RoutingError(f"there is no routing level {level!r}; there are {', '.join(LEVELS)}")
    if not feasible(clients, layers, level):
        raise RoutingError(_refusal(clients, layers, level))


def _refusal(clients: int, layers: int, level: str) -> str:
    least = next(n for n in range(2, layers + 4) if feasible(n, layers, level))
    text = f"{layers} layers at the {level} level need {least} clients (Proposition 6.8), and there are {clients}"
    weaker = [name for name in LEVELS[LEVELS.index(level) + 1 :] if feasible(clients, layers, name)]
    if weaker:
        return f"{text}; level '{weaker[0]}' (routing='{weaker[0]}', --routing {weaker[0]}) takes {clients}"
    return f"{text}; bring more clients, or a model with fewer layers"


def _way(clients, batch, layers: int, level: str, model_owner: int | None) -> tuple[int, ...] | None:
    """Decrypting clients of the layers, found layer by layer; None if there are none."""
    may = [i for i in clients if i != model_owner]
    outside = [i for i in may if i not in batch]
    if level == "multi-layer":
        return tuple(outside[:layers]) if len(outside) >= layers else None

    def extend(way: tuple[int, ...]) -> tuple[int, ...] | None:
        if len(way) == layers:
            return way
        edge = len(way) in (0, layers - 1)
        for client in outside if edge else [*outside, *(i for i in may if i in batch)]:
            longer = extend((*way, client)) if not way or client != way[-1] else None
            if longer:
                return longer
        return None

    return extend(())
