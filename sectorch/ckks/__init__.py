"""CKKS homomorphic encryption behind ordinary torch operations. SEAL (through TenSEAL) does the cryptography.

keys = sectorch.ckks.keygen(depth=5); e = sectorch.ckks.encrypt(x, keys.public); y = model(e); y.decrypt(keys.secret)
"""

from ..deprecation import renamed_names
from ..errors import (
    DisaggregationError,
    KeyMismatchError,
    LevelError,
    MemoryBudgetError,
    MissingKeyError,
    ScaleError,
    SecurityLevelError,
    SerialisationError,
    SlotError,
)
from .convert import from_shares, to_shares
from .exchange import (
    BatchSums,
    LocatedCKKSTensor,
    LocatedKeys,
    ciphertext_messages,
    flood_bits_for,
    sum_batch,
    sum_noise,
)
from .linalg import EncryptedMatrix, MatrixProduct, MatrixReducing, MatrixSquaring
from .module import CKKSModule, Report, explain
from .releases import LinearMeter, ReleaseLedger
from .scheme.ciphertext import memory_limit
from .scheme.encryption import flood_distance
from .scheme.keys import Keys, OwnerKeys, PublicKeys, SecretKey, keygen
from .scheme.seal import Parameters, choose
from .tensor.ckks_tensor import CKKSTensor, encrypt, load, rerandomise, supported_ops
from .tensor.layers import inner, polynomial

__getattr__ = renamed_names(__name__, rerandomised="rerandomise")

__all__ = [
    "BatchSums",
    "CKKSModule",
    "CKKSTensor",
    "DisaggregationError",
    "EncryptedMatrix",
    "KeyMismatchError",
    "Keys",
    "LevelError",
    "LinearMeter",
    "LocatedCKKSTensor",
    "LocatedKeys",
    "MatrixProduct",
    "MatrixReducing",
    "MatrixSquaring",
    "MemoryBudgetError",
    "MissingKeyError",
    "OwnerKeys",
    "Parameters",
    "PublicKeys",
    "ReleaseLedger",
    "Report",
    "ScaleError",
    "SecretKey",
    "SecurityLevelError",
    "SerialisationError",
    "SlotError",
    "choose",
    "ciphertext_messages",
    "encrypt",
    "explain",
    "flood_bits_for",
    "flood_distance",
    "from_shares",
    "inner",
    "keygen",
    "load",
    "memory_limit",
    "polynomial",
    "rerandomise",
    "sum_batch",
    "sum_noise",
    "supported_ops",
    "to_shares",
]
