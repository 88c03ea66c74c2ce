"""sectorch: secure tensors for PyTorch.

    secure_model = sectorch.secure(model)      # any nn.Module made of the supported ops, in eval mode
    logits = secure_model(images)              # what the querying party learns

See README.md for the parties and what they learn.
"""

from . import ckks as ckks
from . import errors as errors
from . import ops as ops
from . import protocols as protocols
from .ckks import encrypt as encrypt
from .nn.explain import diff as diff
from .nn.explain import explain as explain
from .nn.secure import SecureModule as SecureModule
from .nn.secure import secure as secure
from .runtime.ledger import Profile as profile
from .session import Session as Session
from .table import supported_ops as supported_ops
from .tensor import PrivateTensor as PrivateTensor
from .tensor import Scheme as Scheme
from .tensor import SharedTensor as SharedTensor
from .tensor import aggregate as aggregate
from .tensor import share_tensor as share

__version__ = "0.1.0"
