"""Several answering parties asked at once: Q learns the sum of their results and no summand (PrivHFL, Figure 5)."""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...errors import ArgumentError, RangeExceededError
from ...nn.calls import called
from ...tensor import Scheme
from ..messages import Aggregate, Close
from ..names import model_name
from .opened import Asker, Opened, check_values, open_session, run
from .unanswered import Unanswered


class RemoteGroup:
    """The models of several answering parties as one: call it with a plain tensor, get the sum of their results.

    Q sends its input to each of them in shares of its own; every answering party returns its result under a mask that
    only Q knows, S adds them up, and Q takes the masks off the sum (Pi_Agg). An answering party learns that it is one
    of so many; S and Q know which. Rounds and bytes as for one model, times their number, and 2 rounds for the sum.
    Raises on a call what a `RemoteModel` does.
    """

    def __init__(self, connection: Asker, names: list[str], scheme: Scheme):
        names = [model_name(name, "a model's name") for name in names]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ArgumentError(
                f"a sum is over two or more different models, got {names}; ask a single one by .model()"
            )
        self.connection, self.names = connection, names
        self._scheme = scheme
        self._lock = threading.Lock()
        self._unanswered = Unanswered()
        self._opened: Opened | None = None
        self.served = self._open().party.served

    def __repr__(self) -> str:
        return f"RemoteGroup({', '.join(self.names)}; {'; or '.join(call.said for call in self.served.calls)})"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The sum of the predictions for a call, which every one of the models takes."""
        inputs = called(self.served, args, kwargs)
        check_values(inputs, self._scheme)
        with self._lock:
            opened = self._open()
            sums, beyond = [], None
            at_once = opened.party.rows_at_once(inputs)
            for piece in inputs.split(at_once) if at_once else [inputs]:
                try:
                    with self._unanswered.name(piece) as query:
                        work = lambda piece=piece: opened.party.aggregate(piece)
                        sums.append(run(opened, Aggregate, piece, work, query=query))
                except RangeExceededError as error:
                    beyond = error  # all pieces are asked for, so that nobody learns of it
                except BaseException:
                    self._opened = None
                    raise
            if beyond is not None:
                raise beyond
        return torch.cat(sums)

    def close(self) -> None:
        """End the session."""
        if self._opened is not None:
            self._opened.channel.tell(Close())
            self._opened.channel.close()
            self._opened.party.close()
            self._opened = None

    def _open(self) -> Opened:
        if self._opened is not None and self._opened.channel.ended:
            self._opened.party.close()
            self._opened.channel.close()
            self._opened = None
        if self._opened is None:
            self._opened = open_session(self.connection, self.names, self._scheme)
        return self._opened
