"""Tensors whose values are secret, and the table that sends torch functions to their handlers."""

from .secret import PrivateTensor as PrivateTensor
from .secret import SecretTensor as SecretTensor
from .secret import private_tensor as private_tensor
from .shared import ComplexShared as ComplexShared
from .shared import Scheme as Scheme
from .shared import SharedTensor as SharedTensor
from .shared import share_tensor as share_tensor
from .shared import unwrap_openings as unwrap_openings
