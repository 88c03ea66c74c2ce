"""The handlers behind the dispatch table, by kind. Importing this package fills the table and plugs it in."""

from ..tensor import dispatch as dispatch
from . import activation as activation
from . import arithmetic as arithmetic
from . import compare as compare
from . import complex_numbers as complex_numbers
from . import composites as composites
from . import fourier as fourier
from . import indexing as indexing
from . import infinity as infinity
from . import linalg as linalg
from . import linear as linear
from . import losses as losses
from . import normalization as normalization
from . import order as order
from . import pooling as pooling
from . import reduction as reduction
from . import rounding as rounding
from . import sequences as sequences
from . import smooth as smooth
from . import structure as structure
