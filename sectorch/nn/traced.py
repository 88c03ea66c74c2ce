"""`sectorch.program(model, x)`: what all parties do in a prediction, as a value to read, compare and sign."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DtypeError
from ..runtime.generated import spelled
from ..runtime.ledger import Observer, alone
from ..runtime.program import Program, Tracing
from ..session import Session
from ..tensor import Opening
from .dry import revealed, shared_input
from .secure import SecureModule, secure
from .trace import marked, run


def program(model: nn.Module, x: torch.Tensor) -> Program:
    """The program of a prediction on inputs of x's shape and type; x's content is not looked at.

    It is traced on shapes, in a session of its own in which nobody is present: weights and queries are names in it.
    `program(model, x).party("S").code` is the Python that S runs, `messages` all that is sent, `draw()` a picture of
    it, and `digest` what parties compare who want to be sure that they run the same.

    Args:
        model: an ordinary module (with the default number format), or what `secure` made of it.
        x: a tensor, or a meta tensor.

    Raises:
        DtypeError: x is no tensor.
        ArgumentError: the module runs operation by operation, and may do something else in each call.
        SectorchError: what `secure` refuses, with layer and line.
    """
    if not isinstance(x, torch.Tensor):
        raise DtypeError(f"program() takes a torch tensor, got {type(x).__name__}")
    secured = model if isinstance(model, SecureModule) else secure(model)
    x = torch.empty_like(x, device="meta")
    trace = secured.program(x)
    if trace is None:
        raise ArgumentError(f"there is no one program: the module runs operation by operation, {secured.extra_repr()}")
    with alone(Observer()):
        session = Session(dry=True)
        party = session.answering[0]
        setup = session.setup(party)
        setup.recording = before = Tracing(setup.call)
        weights = secured.bind(session, party)[1].of(trace)
        with session.call(party) as net:
            net.recording = call = Tracing(net.call, before)
            outputs = revealed(run(trace, weights, shared_input(x, session, secured.scheme), marked(call)))
    leaves, form = pytree.tree_flatten(outputs, is_leaf=lambda y: isinstance(y, Opening))
    said = ["learned" if isinstance(y, Opening) else spelled(y) for y in leaves]
    return call.program(f"{form} {said}")
