"""The root of the tree."""

from __future__ import annotations


class SectorchError(Exception):
    """Base of everything that sectorch raises on purpose.

    Attributes:
        place: where in a model the step belongs that raised it, if it is a step of a model.
        layer: the same, where the text names it.

    What to do:
        Read the class that came, and its entry. Catch this one to tell an error of sectorch from any other; a failed
        call has changed no state, so the same object can be used again.
    """

    place: str = ""
    layer: str = ""
