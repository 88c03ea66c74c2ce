"""The handlers behind the dispatch table, by kind. Importing this package fills the table and plugs it in."""

from ..tensor import dispatch as dispatch
from . import activation as activation
from . import arithmetic as arithmetic
from . import attention as attention
from . import combined as combined
from . import compare as compare
from . import joining as joining
from . import linear as linear
from . import lookup as lookup
from . import losses as losses
from . import normalization as normalization
from . import order as order
from . import places as places
from . import pooling as pooling
from . import powers as powers
from . import ranks as ranks
from . import recurrent as recurrent
from . import reduction as reduction
from . import resample as resample
from . import rounding as rounding
from . import smooth as smooth
from . import special as special
from . import structure as structure
from . import trigonometry as trigonometry
from . import volumes as volumes
