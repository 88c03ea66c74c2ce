"""Training on shares: torch's own autograd and optimisers over tensors that nobody knows. See docs/training.md."""

from . import convolutions as convolutions
from . import elementwise as elementwise
from . import layers as layers
from . import losses as losses
from . import moving as moving
from . import norms as norms
from . import optimisers as optimisers
from . import others as others
from . import pooling as pooling
from . import starts as starts
from . import views as views
from . import whole as whole
from .claims import NO_GRADIENT as NO_GRADIENT
from .model import shared as shared
from .programs import step as step
from .tensor import DifferentiableTensor as DifferentiableTensor
