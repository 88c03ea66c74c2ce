"""sectorch: secure tensors for PyTorch.

    secure_model = sectorch.secure(model)      # any nn.Module made of the supported ops, in eval mode
    logits = secure_model(images)              # what the querying party learns

See README.md for the parties and what they learn.
"""

from . import errors as errors
from . import ops as ops
from .session import Session as Session
from .tensor import PrivateTensor as PrivateTensor
from .tensor import SharedTensor as SharedTensor
from .tensor import share_tensor as share
