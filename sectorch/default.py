"""The session that is used where none is named."""

from __future__ import annotations

import threading

import torch

from .session import Session

_default: dict[torch.device, Session] = {}
_DEFAULT = threading.Lock()


def default_session(device: torch.device | str = "cpu") -> Session:
    """The session of this process that `share` and `secure` use when none is named: one a device, made on first use."""
    device = torch.device(device)
    with _DEFAULT:  # tensors of two threads must be of one session to meet
        if device not in _default:
            _default[device] = Session(device=device)
        return _default[device]
