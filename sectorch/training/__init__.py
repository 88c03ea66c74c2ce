"""Training on shares: torch's own autograd and optimisers over tensors that nobody knows. See docs/training.md."""

from . import decompositions as decompositions
from . import elementwise as elementwise
from . import indexing as indexing
from . import layers as layers
from . import losses as losses
from .decompositions import NO_GRADIENT as NO_GRADIENT
from .programs import step as step
from .tensor import DifferentiableTensor as DifferentiableTensor
from .tensor import shared as shared
