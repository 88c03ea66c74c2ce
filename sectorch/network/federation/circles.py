"""Parties that wait for each other in a circle: each for another one, which waits in another session.

A party that has one thread opens one session after another, and comes to none while it waits for the parties of one. It
says so when it asks to meet; of a party that does not, another thread may still come, and it is in no circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..names import readable

Key = tuple[str, tuple[str, ...]]
"""A label, and the names of the parties that meet under it."""


def circle(waits: Mapping[str, Key], there: Mapping[Key, set[str]]) -> list[str]:
    """Names of parties each of which waits for the next one, and the last one for the first; none if there is none.

    Args:
        waits: in what each party waits that does nothing else meanwhile. there: who has come to it.
    """
    over: set[str] = set()
    for first in waits:
        path = [first]
        while path:
            awaited = _next(path[-1], waits, there, over)
            if awaited is None:
                over.add(path.pop())
            elif awaited in path:
                return path[path.index(awaited) :]
            else:
                path.append(awaited)
    return []


def _next(name: str, waits: Mapping[str, Key], there: Mapping[Key, set[str]], over: set[str]) -> str | None:
    key = waits[name]
    return next((other for other in key[1] if other in waits and other not in there[key] and other not in over), None)


def said(found: list[str], waits: Mapping[str, Key], to: str) -> str:
    """What one party is told of a circle; the label of a session that it is not in is none of its business."""

    def hops() -> Iterator[str]:
        for name, awaited in zip(found, [*found[1:], found[0]], strict=True):
            label, names = waits[name]
            yield f"'{name}' waits for '{awaited}'" + (f" in '{readable(label)}'" if to in names else "")

    return (
        f"these parties wait in a circle, and none of them will come: {', '.join(hops())}; start all of them again. A "
        f"program that opens one session after another holds one that all are in meanwhile, and then this cannot be"
    )
