"""What can be wrong with a privacy budget or a mechanism. No message carries a vote."""

from __future__ import annotations

from ..errors import SectorchError


class PrivacyError(SectorchError, ValueError):
    """A budget, a scale or a count outside its range, or one that no mechanism can serve.

    Example:
        epsilon must be above 0 and finite, got -1.0

    What to do:
        Correct the number that the text names. Where no mechanism serves, ask fewer queries, allow a larger epsilon,
        or find more voters.
    """


class BudgetExhaustedError(SectorchError, RuntimeError):
    """One more query would overrun a budget. It was not asked, and nothing was spent.

    Example:
        epsilon 4.0 of 4.0 is spent (delta 1e-05), and the next step would bring it to 4.2; ask no more, or start with
        a larger budget or more noise

    What to do:
        Stop: a budget that is spent stays spent. Only the people whose data it protects can agree to a larger one.
    """


class BudgetFileError(SectorchError, RuntimeError):
    """A budget on disk that is damaged, missing, of another limit, or that cannot be written.

    Example:
        there is no budget alice.json; put it back, or name an epsilon to start it with if it is a new one

    What to do:
        Put back the newest copy that lacks no charge. A budget that begins anew forgets what was spent: do so only for
        new data.
    """


class BudgetInUseError(BudgetFileError):
    """A budget on disk that another run has.

    Example:
        the budget alice.json is in use by another run; wait until it ends

    What to do:
        Wait for the other run, or end it. A process that was killed leaves no lock.
    """
