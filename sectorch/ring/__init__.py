"""Z_2^64: fixed point, bit planes, exact products."""

from .fixed_point import FRAC_BITS as FRAC_BITS
from .fixed_point import HEADROOM_BITS as HEADROOM_BITS
from .fixed_point import as_signed as as_signed
from .fixed_point import check_encodable as check_encodable
from .fixed_point import decode as decode
from .fixed_point import encode as encode
from .fixed_point import logical_shift as logical_shift
from .fixed_point import range_limit as range_limit
from .fixed_point import reaches as reaches
from .fixed_point import rounded_shift as rounded_shift
from .fixed_point import sign_mask as sign_mask
