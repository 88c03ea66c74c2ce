"""CKKS homomorphic encryption behind ordinary torch operations. SEAL (through TenSEAL) does the cryptography.

keys = sectorch.ckks.keygen(depth=5); e = sectorch.ckks.encrypt(x, keys.public); y = model(e); y.decrypt(keys.secret)
"""

from ..deprecation import renamed_names
from .convert import from_shares as from_shares
from .convert import to_shares as to_shares
from .errors import DisaggregationError as DisaggregationError
from .errors import KeyMismatchError as KeyMismatchError
from .errors import LevelError as LevelError
from .errors import MemoryBudgetError as MemoryBudgetError
from .errors import MissingKeyError as MissingKeyError
from .errors import ScaleError as ScaleError
from .errors import SecurityLevelError as SecurityLevelError
from .errors import SerialisationError as SerialisationError
from .errors import SlotError as SlotError
from .exchange import BatchSums as BatchSums
from .exchange import LocatedCKKSTensor as LocatedCKKSTensor
from .exchange import LocatedKeys as LocatedKeys
from .exchange import ciphertext_messages as ciphertext_messages
from .exchange import flood_bits_for as flood_bits_for
from .exchange import sum_batch as sum_batch
from .exchange import sum_noise as sum_noise
from .linalg import EncryptedMatrix as EncryptedMatrix
from .linalg import MatrixProduct as MatrixProduct
from .linalg import MatrixReducing as MatrixReducing
from .linalg import MatrixSquaring as MatrixSquaring
from .module import CKKSModule as CKKSModule
from .releases import LinearMeter as LinearMeter
from .releases import ReleaseLedger as ReleaseLedger
from .scheme.ciphertext import memory_limit as memory_limit
from .scheme.encryption import flood_distance as flood_distance
from .scheme.keys import Keys as Keys
from .scheme.keys import OwnerKeys as OwnerKeys
from .scheme.keys import PublicKeys as PublicKeys
from .scheme.keys import SecretKey as SecretKey
from .scheme.keys import keygen as keygen
from .scheme.seal import Parameters as Parameters
from .scheme.seal import choose as choose
from .tensor.ckks_tensor import CKKSTensor as CKKSTensor
from .tensor.ckks_tensor import encrypt as encrypt
from .tensor.ckks_tensor import load as load
from .tensor.ckks_tensor import rerandomise as rerandomise
from .tensor.ckks_tensor import supported_ops as supported_ops
from .tensor.explain import Report as Report
from .tensor.explain import explain as explain
from .tensor.layers import inner as inner
from .tensor.layers import polynomial as polynomial

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
