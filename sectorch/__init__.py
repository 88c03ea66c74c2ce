"""sectorch: secure tensors for PyTorch.

    secure_model = sectorch.secure(model)      # any nn.Module made of the supported ops, in eval mode
    logits = secure_model(images)              # what the querying party learns

See README.md for the parties and what they learn.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .signal_handling import interruptible, is_command

with interruptible(is_command()):
    from . import errors as errors
    from . import ops as ops
    from .choreography.ledger import Profile as profile
    from .choreography.roles import Roles as Roles
    from .config import Link as Link
    from .nn.explain import diff as diff
    from .nn.explain import explain as explain
    from .nn.generation import Generation as Generation
    from .nn.generation import generate as generate
    from .nn.inputs import Inputs as Inputs
    from .nn.inputs import public as public
    from .nn.module import SecureModule as SecureModule
    from .nn.module import program as program
    from .nn.module import reference as reference
    from .nn.module import secure as secure
    from .ops.registry import register_op as register_op
    from .ops.structure import shuffle as shuffle
    from .secure_sum import PairwiseMasks as PairwiseMasks
    from .secure_sum import SecureSum as SecureSum
    from .secure_sum import secure_sum as secure_sum
    from .session import Session as Session
    from .tensor import PrivateTensor as PrivateTensor
    from .tensor import Scheme as Scheme
    from .tensor import SharedTensor as SharedTensor
    from .tensor import share_tensor as share
    from .tensor.aggregation import aggregate as aggregate
    from .tensor.aggregation import announced as announced
    from .tensor.holders import collect as collect
    from .tensor.holders import draw as draw
    from .tensor.holders import one_hot_argmax as one_hot_argmax
    from .tensor.holders import reshare as reshare
    from .tensor.holders import reveal_argmax as reveal_argmax
    from .tensor.table import supported_ops as supported_ops
    from .training.checkpoints import Checkpoints as Checkpoints
    from .training.programs import step as step
    from .training.tensor import DifferentiableTensor as DifferentiableTensor
    from .training.tensor import shared as shared

if TYPE_CHECKING:
    from . import choreography as choreography
    from . import ckks as ckks
    from . import data as data
    from . import dp as dp
    from . import estimators as estimators
    from . import federated as federated
    from . import garbled as garbled
    from . import network as network
    from . import nn as nn
    from . import protocols as protocols
    from . import testing as testing
    from .ckks import encrypt as encrypt

__all__ = [
    "Checkpoints",
    "DifferentiableTensor",
    "Generation",
    "Inputs",
    "Link",
    "PairwiseMasks",
    "PrivateTensor",
    "Roles",
    "Scheme",
    "SecureModule",
    "SecureSum",
    "Session",
    "SharedTensor",
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
    "explain",
    "federated",
    "garbled",
    "generate",
    "network",
    "nn",
    "one_hot_argmax",
    "profile",
    "program",
    "protocols",
    "public",
    "reference",
    "register_op",
    "reshare",
    "reveal_argmax",
    "secure",
    "secure_sum",
    "share",
    "shared",
    "shuffle",
    "step",
    "supported_ops",
    "testing",
]

__version__ = "0.2.0"

_LATER = ("ckks", "data", "dp", "estimators", "federated", "garbled", "network", "protocols", "testing")
_ON_DEMAND = {"encrypt": ".ckks"} | {name: f".{name}" for name in _LATER}
"""Names whose modules bring much with them (SEAL, numba, scipy): loaded when they are asked for."""


def __getattr__(name: str):
    if name not in _ON_DEMAND:
        way = f"; it is sectorch.errors.{name}" if hasattr(errors, name) else ""
        raise AttributeError(f"module 'sectorch' has no attribute '{name}'{way}")
    module = import_module(_ON_DEMAND[name], __name__)
    return module.encrypt if name == "encrypt" else module


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
