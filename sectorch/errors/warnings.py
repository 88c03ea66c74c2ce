"""Warnings: the result is correct, and the user should know something about it."""

from __future__ import annotations


class LeakyProtocolWarning(UserWarning):
    """The chosen protocol reveals more than the result to a party (docs/paper-mode.md).

    Example:
        relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same thing
        often enough, its value); relu='exact' shows nothing and sends fewer bytes

    What to do:
        Leave the choice out: the default shows nothing more. To measure the paper's own protocol, filter the warning
        in that one place (`warnings.catch_warnings`).
    """


class CaptureWarning(UserWarning):
    """A graph pass, or the recorded graph of a module, differs from the module, and is not used.

    Example:
        the graph pass fold changes what Net computes, so that no pass is applied; the results are right and cost
        more; please report this

    What to do:
        Nothing needs to be done. Please report it, with the model's code: it is a defect here.
    """


class PrecisionWarning(UserWarning):
    """A model's weights lose digits in fixed point, as its owner found on its own numbers before a call.

    Example:
        layer 'head' (Linear) at model.py:12: with 20 fraction bits the result is off by 0.012 of 0.03 on numbers that
        were drawn. Weights or constants there are small beside the last place, 2^-20: divide the input of that layer by
        a power of two and multiply its weights by it;
        secure(model, strict=True) refuses such a model

    What to do:
        Scale what the text names: `self.head(x / 256)` with `head.weight` times 256 is the same function and keeps
        eight more bits. `sectorch.diff(model, x)` shows the error of each layer for an input. With
        `strict=True` it is a PrecisionError.
    """
