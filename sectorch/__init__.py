"""sectorch: secure tensors for PyTorch.

    secure_model = sectorch.secure(model)      # any nn.Module made of the supported ops, in eval mode
    logits = secure_model(images)              # what the querying party learns

See README.md for the parties and what they learn.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .signal_handling import interruptible, is_command

with interruptible(is_command()):
    from . import errors
    from . import fitted_models as fitted_models
    from . import ops as ops
    from .choreography.ledger import Profile as profile
    from .choreography.roles import Roles
    from .config import Link
    from .nn.explain import diff, explain
    from .nn.generation import Generation, generate
    from .nn.inputs import Inputs, public
    from .nn.module import SecureModule, program, reference, secure
    from .ops.registry import register_op
    from .ops.structure import shuffle
    from .secure_sum import PairwiseMasks, SecureSum, secure_sum
    from .session import Session
    from .tensor import PrivateTensor, Scheme, SharedTensor
    from .tensor import share_tensor as share
    from .tensor.holders import aggregate, announced, collect, draw, one_hot_argmax, reshare, reveal_argmax
    from .tensor.table import supported_ops
    from .training.checkpoints import Checkpoints
    from .training.programs import step
    from .training.tensor import DifferentiableTensor, shared

if TYPE_CHECKING:
    from . import choreography, ckks, data, dp, estimators, federated, garbled, network, nn, protocols, tables, testing
    from .ckks import encrypt
    from .tables import (
        Column,
        Policy,
        Table,
        evaluate,
        join,
        owned,
        release,
    )

__all__ = [
    "Checkpoints",
    "Column",
    "DifferentiableTensor",
    "Generation",
    "Inputs",
    "Link",
    "PairwiseMasks",
    "Policy",
    "PrivateTensor",
    "Roles",
    "Scheme",
    "SecureModule",
    "SecureSum",
    "Session",
    "SharedTensor",
    "Table",
    "aggregate",
    "announced",
    "choreography",
    "ckks",
    "collect",
    "data",
    "diff",
    "dp",
    "draw",
    "encrypt",
    "errors",
    "estimators",
    "evaluate",
    "explain",
    "federated",
    "fitted_models",
    "garbled",
    "generate",
    "join",
    "network",
    "nn",
    "one_hot_argmax",
    "owned",
    "profile",
    "program",
    "protocols",
    "public",
    "reference",
    "register_op",
    "release",
    "reshare",
    "reveal_argmax",
    "secure",
    "secure_sum",
    "share",
    "shared",
    "shuffle",
    "step",
    "supported_ops",
    "tables",
    "testing",
]

__version__ = "0.2.0"

_LATER = ("ckks", "data", "dp", "estimators", "federated", "garbled", "network", "protocols", "tables", "testing")
_OF_TABLES = (
    "Column",
    "Policy",
    "Table",
    "evaluate",
    "join",
    "owned",
    "release",
)
_ON_DEMAND = {"encrypt": ".ckks"} | dict.fromkeys(_OF_TABLES, ".tables") | {name: f".{name}" for name in _LATER}
"""Names whose modules bring much with them (SEAL, numba, scipy, pandas): loaded when they are asked for."""


def __getattr__(name: str):
    if name not in _ON_DEMAND:
        way = f"; it is sectorch.errors.{name}" if hasattr(errors, name) else ""
        raise AttributeError(f"module 'sectorch' has no attribute '{name}'{way}")
    module = import_module(_ON_DEMAND[name], __name__)
    return module if name in _LATER else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
