"""A module that runs operation by operation, by its own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import SectorchError
from ..tensor.compiling import compiling
from ..tensor.dispatch import METADATA
from ..tensor.views import strided
from .huggingface import without_caches
from .inputs import Inputs
from .nodes import name_of
from .where import Place, layers_refusals, raise_located
from .written import Written, defined


class Watched(TorchFunctionMode):
    """Names layer and line in every error of an operation inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.written = Written(strided, (*module.parameters(), *module.buffers()))
        self.layers = {id(layer): name for name, layer in module.named_modules()}

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.written.swapped((args, kwargs or {}), func)
        if func in METADATA:
            return func(*args, **kwargs)
        try:
            args = self.written.taken(func, args)
            return self.written.made(func, defined(func, args, kwargs))
        except SectorchError as error:
            raise_located(error, Place.now(self.layers).text(name_of(func)))


def watched(module: nn.Module, inputs: Inputs) -> Any:
    """The module's own call, with its hooks and its attributes."""
    watching = Watched(module)
    with compiling(module), layers_refusals(watching.layers), watching:
        return watching.written.swapped(without_caches(inputs.called(module)))
