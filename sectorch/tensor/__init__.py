"""Tensors whose values are secret, and the table that sends torch functions to their handlers."""

from .private import PrivateTensor as PrivateTensor
from .private import private_tensor as private_tensor
from .secret import SecretTensor as SecretTensor
from .shared import ComplexShared as ComplexShared
from .shared import Scheme as Scheme
from .shared import SharedTensor as SharedTensor
from .shared import share_tensor as share_tensor
from .shared import unwrap_openings as unwrap_openings
