"""The base class of all exceptions of sectorch."""

from __future__ import annotations


class SectorchError(Exception):
    """The base class of all errors that sectorch raises.

    Attributes:
        place: the layer and line of the model whose step raised it; empty where it was no step of a model.
        layer: the same, where the text begins with it.

    What to do:
        Read the entry of the class that was raised. Catch this one to tell errors of sectorch from others; a failed
        call has changed no state, so the same object can be used again.
    """

    place: str = ""
    layer: str = ""
