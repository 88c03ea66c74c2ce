"""Z_2^64: fixed point, bit planes, exact products."""

from .words import FRAC_BITS as FRAC_BITS
from .words import HEADROOM_BITS as HEADROOM_BITS
from .words import check_encodable as check_encodable
from .words import decode as decode
from .words import encode as encode
from .words import logical_shift as logical_shift
from .words import range_limit as range_limit
from .words import reaches as reaches
from .words import rounded_shift as rounded_shift
from .words import sign_mask as sign_mask
from .words import signed as signed
