"""Whether something draws torch's random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..choreography.kernels import spare


class Drawing(TorchDispatchMode):
    """Notices torch's random numbers, of this thread."""

    drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = True
        return func(*args, **(kwargs or {}))


spare(Drawing.__torch_dispatch__)
