"""All exceptions and warnings of sectorch; the exceptions are one tree under `SectorchError`.

Each also derives from the built-in that a PyTorch user would expect (`TypeError`, `ValueError`, `RuntimeError`), so
`except ValueError` works as it does with torch. No message carries a share, a key or a secret value; a message about a
value outside its range names the largest magnitude at the party that owns it, and never leaves that party.

Each docstring says when the error is raised, gives an example of its text, and says what to do. docs/errors.md is
generated from them, and from those of `sectorch.ckks`, `dp`, `data`, `federated` and the papers.
"""

from .base import SectorchError as SectorchError
from .network import AbortedError as AbortedError
from .network import BusyError as BusyError
from .network import DeadlockError as DeadlockError
from .network import DisagreementError as DisagreementError
from .network import FrameError as FrameError
from .network import IdentityError as IdentityError
from .network import NetworkError as NetworkError
from .network import PeerLostError as PeerLostError
from .network import QuotaError as QuotaError
from .network import QuotaFileError as QuotaFileError
from .network import ReceiptError as ReceiptError
from .network import ReceiptsInUseError as ReceiptsInUseError
from .network import RefusedError as RefusedError
from .network import SessionOverError as SessionOverError
from .network import StoreFullError as StoreFullError
from .network import StoreInUseError as StoreInUseError
from .network import UnknownModelError as UnknownModelError
from .protocols import DroppedClientError as DroppedClientError
from .protocols import FalseDealingError as FalseDealingError
from .protocols import KeyAgreementError as KeyAgreementError
from .protocols import MaskError as MaskError
from .protocols import MaterialError as MaterialError
from .protocols import MisplacedValueError as MisplacedValueError
from .protocols import SecretBranchError as SecretBranchError
from .protocols import SessionMismatchError as SessionMismatchError
from .protocols import StreamReuseError as StreamReuseError
from .protocols import TopologyError as TopologyError
from .protocols import UndeclaredMessageError as UndeclaredMessageError
from .runs import CheckpointError as CheckpointError
from .runs import CorruptedCiphertextError as CorruptedCiphertextError
from .runs import PlotError as PlotError
from .tensors import ArgumentError as ArgumentError
from .tensors import ChannelScaleError as ChannelScaleError
from .tensors import DimensionError as DimensionError
from .tensors import DtypeError as DtypeError
from .tensors import FixedPointRangeError as FixedPointRangeError
from .tensors import NonFiniteError as NonFiniteError
from .tensors import PrecisionError as PrecisionError
from .tensors import ProgramError as ProgramError
from .tensors import RangeExceededError as RangeExceededError
from .tensors import SecretAccessError as SecretAccessError
from .tensors import ShapeError as ShapeError
from .tensors import TrainingModeError as TrainingModeError
from .tensors import UnsupportedDeviceError as UnsupportedDeviceError
from .tensors import UnsupportedOpError as UnsupportedOpError
from .warnings import CaptureWarning as CaptureWarning
from .warnings import LeakyProtocolWarning as LeakyProtocolWarning
from .warnings import PrecisionWarning as PrecisionWarning

__all__ = [
    "AbortedError",
    "ArgumentError",
    "BusyError",
    "CaptureWarning",
    "ChannelScaleError",
    "CheckpointError",
    "CorruptedCiphertextError",
    "DeadlockError",
    "DimensionError",
    "DisagreementError",
    "DroppedClientError",
    "DtypeError",
    "FalseDealingError",
    "FixedPointRangeError",
    "FrameError",
    "IdentityError",
    "KeyAgreementError",
    "LeakyProtocolWarning",
    "MaskError",
    "MaterialError",
    "MisplacedValueError",
    "NetworkError",
    "NonFiniteError",
    "PeerLostError",
    "PlotError",
    "PrecisionError",
    "PrecisionWarning",
    "ProgramError",
    "QuotaError",
    "QuotaFileError",
    "RangeExceededError",
    "ReceiptError",
    "ReceiptsInUseError",
    "RefusedError",
    "SecretAccessError",
    "SecretBranchError",
    "SectorchError",
    "SessionMismatchError",
    "SessionOverError",
    "ShapeError",
    "StoreFullError",
    "StoreInUseError",
    "StreamReuseError",
    "TopologyError",
    "TrainingModeError",
    "UndeclaredMessageError",
    "UnknownModelError",
    "UnsupportedDeviceError",
    "UnsupportedOpError",
]
