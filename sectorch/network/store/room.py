"""Whose material goes when a store is full: what nobody came back for, and what is more than a client's share.

A client may use all of a store that no other needs. When another one needs room, first what has not been touched for
`UNUSED` seconds goes, the oldest first; then, as long as who asks has less than its share, the oldest session's of who
has most. What goes is void at all parties: it cannot be used without this half, and the others hear of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..log import write

log = logging.getLogger("sectorch.store")
UNUSED = 7 * 86400.0
"""Seconds after which a client counts as one that does not come back for what was prepared."""


class Shelf(Protocol):
    """A session's material (`store.Shelf`)."""

    binding: dict
    folder: Path

    def __len__(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    def drop(self) -> None: ...


class Store(Protocol):
    """All of a party's (`store.Store`)."""

    budget: int
    evicted: Callable[[Any], None]

    def shelves(self) -> Sequence[Any]: ...


def room(store: Store, client: object) -> int:
    """Bytes that a client can still have."""
    sizes = _sizes(store)
    stale = sum(shelf.bytes for shelf in store.shelves() if _stale(shelf, client))
    return max(0, store.budget - sizes.total() + stale, _share(store, sizes, client) - sizes[client])


def make(store: Store, client: object, size: int) -> None:
    """See that so many bytes are free, as far as others' material may go for it."""
    while (sizes := _sizes(store)).total() + size > store.budget:
        others = [s for s in store.shelves() if len(s) and s.binding.get("client") != client]
        going = [s for s in others if _stale(s, client)]
        if not going and sizes[client] + size <= _share(store, sizes, client):
            most = max((sizes[s.binding.get("client")] for s in others), default=0)
            going = [s for s in others if sizes[s.binding.get("client")] == most]
        if not going:
            return
        shelf = min(going, key=_touched)
        facts = {"client": shelf.binding.get("client"), "model": shelf.binding.get("model"), "for_client": client}
        write(log, "evicted", calls=len(shelf), **facts)
        shelf.drop()
        store.evicted(shelf)


def _sizes(store: Store) -> Counter:
    sizes: Counter = Counter()
    for shelf in store.shelves():
        if count := shelf.bytes:
            sizes[shelf.binding.get("client")] += count
    return sizes


def _share(store: Store, sizes: Counter, client: object) -> int:
    return store.budget // len({*sizes, client})


def _stale(shelf: Shelf, client: object) -> bool:
    return len(shelf) > 0 and shelf.binding.get("client") != client and time.time() - _touched(shelf) > UNUSED


def _touched(shelf: Shelf) -> float:
    """When a piece of it was last made or used: that changes the folder."""
    try:
        return shelf.folder.stat().st_mtime
    except OSError:
        return 0.0
