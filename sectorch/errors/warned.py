"""Warnings: the result is right, and something about it should be known."""

from __future__ import annotations


class LeakyProtocolWarning(UserWarning):
    """A protocol was chosen that shows a party more than the result. See docs/paper-mode.md.

    Example:
        relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same thing
        often enough, its value); relu='exact' shows nothing and sends fewer bytes

    What to do:
        Leave the choice out: the default shows nothing more. To measure the paper's own protocol, filter the warning
        in that one place (`warnings.catch_warnings`).
    """


class CaptureWarning(UserWarning):
    """A graph pass, or the recording of a module, did not compute what the module does, and is not used.

    Example:
        the graph pass fold changes what Net computes, so that no pass is applied; the results are right and cost
        more; please report this

    What to do:
        Nothing needs to be done. Please report it, with the model's code: it is a defect here.
    """
