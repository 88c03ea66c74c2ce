"""CKKS homomorphic encryption behind ordinary torch operations. SEAL (through TenSEAL) does the cryptography.

keys = sectorch.ckks.keygen(depth=5); e = sectorch.ckks.encrypt(x, keys.public); y = model(e); y.decrypt(keys.secret)
"""

from . import layers as layers
from . import structure as structure
from .arithmetic import inner as inner
from .arithmetic import polynomial as polynomial
from .convert import from_shares as from_shares
from .convert import to_shares as to_shares
from .errors import KeyMismatchError as KeyMismatchError
from .errors import LevelError as LevelError
from .errors import MemoryBudgetError as MemoryBudgetError
from .errors import MissingKeyError as MissingKeyError
from .errors import ScaleError as ScaleError
from .errors import SecurityLevelError as SecurityLevelError
from .errors import SerialisationError as SerialisationError
from .errors import SlotError as SlotError
from .explain import Report as Report
from .explain import explain as explain
from .flood import flood_distance as flood_distance
from .keys import Keys as Keys
from .keys import OwnerKeys as OwnerKeys
from .keys import PublicKeys as PublicKeys
from .keys import SecretKey as SecretKey
from .keys import keygen as keygen
from .matrices import EncryptedMatrix as EncryptedMatrix
from .matrices import MatrixProduct as MatrixProduct
from .matrices import MatrixReducing as MatrixReducing
from .matrices import MatrixSquaring as MatrixSquaring
from .memory import memory_limit as memory_limit
from .module import CKKSModule as CKKSModule
from .parameters import Parameters as Parameters
from .parameters import choose as choose
from .rerandomise import rerandomised as rerandomised
from .table import supported_ops as supported_ops
from .tensor import CKKSTensor as CKKSTensor
from .tensor import encrypt as encrypt
from .tensor import load as load
from .workers import set_workers as set_workers
