"""Every exception of sectorch, one tree under `SectorchError`.

Each also derives from the built-in that a PyTorch user would expect (`TypeError`, `ValueError`, `RuntimeError`), so
`except ValueError` works as it does with torch. No message carries a share, a key or a secret value; a message about a
value outside its range names the largest magnitude at the party that owns it, and never leaves that party.
"""


class SectorchError(Exception):
    """Base of everything that sectorch raises on purpose.

    Attributes:
        place: where in a model the step belongs that raised it, if it is a step of a model.
        layer: the same, where the text names it.
    """

    place: str = ""
    layer: str = ""


class MisplacedValueError(SectorchError, RuntimeError):
    """A computation was asked of a party that lacks one of its inputs."""


class TopologyError(SectorchError, RuntimeError):
    """A message between two parties that have no channel. Clients talk to the server S only."""


class UndeclaredMessageError(SectorchError, RuntimeError):
    """A protocol sent something that its declaration does not list."""


class SecretBranchError(SectorchError, TypeError):
    """Python control flow asked for the truth value, the length or the items of a located value."""


class SecretAccessError(SectorchError, TypeError):
    """Something asked a secret tensor for its values: `.numpy()`, `.item()`, `float()`, `bool()`, pickling, ..."""


class SessionMismatchError(SectorchError, RuntimeError):
    """Tensors of two sessions, or of two answering parties, met in one operation."""


class StreamReuseError(SectorchError, RuntimeError):
    """Random material was about to be used a second time."""


class MaterialError(SectorchError, RuntimeError):
    """Prepared offline material is missing, was used already, or belongs to another program."""


class StoreFullError(MaterialError):
    """Offline material does not fit the disk budget of a party; the text says how much does."""


class StoreInUseError(MaterialError):
    """Another process has the folder in which offline material is kept."""


class ReceiptError(SectorchError, RuntimeError):
    """A receipt that cannot be written, and what it is for is not served; or a file of receipts that is not whole."""


class ReceiptsInUseError(ReceiptError):
    """Another process has the file of receipts."""


class KeyAgreementError(SectorchError, RuntimeError):
    """The pair keys of a session could not be agreed."""


class NetworkError(SectorchError, ConnectionError):
    """Something between the parties' processes went wrong; nothing was revealed."""


class FrameError(NetworkError):
    """A frame that is malformed, or does not belong where it came."""


class PeerLostError(NetworkError):
    """A party's process died, hangs, or closed the connection."""


class AbortedError(NetworkError):
    """Another party stopped the session; the text is its reason."""


class IdentityError(NetworkError, PermissionError):
    """A certificate or a long-term identity key that is not the expected one.

    Attributes:
        told: what the other parties are told of it instead of the text, which is for this party's own user.
    """

    def __init__(self, text: str, told: str | None = None):
        super().__init__(text)
        self.told = told


class UnknownModelError(NetworkError, LookupError):
    """No answering party of that name is connected."""


class RefusedError(NetworkError):
    """An answering party does not answer in the number format that was asked for: its weights do not fit, or it insists
    on range checks. Its own log says more."""


class BusyError(NetworkError):
    """The server has as much to do as it takes on; asking again later helps."""


class QuotaError(NetworkError):
    """A client has used what a party lets it ask; the text says of which limit, and when it is free again."""


class QuotaFileError(SectorchError, RuntimeError):
    """What is used of a limit cannot be read or written, and what cannot be counted is not served."""


class SessionOverError(NetworkError):
    """A session that another party ended between two calls, as one that was idle; asking again opens a new one."""


class ProgramError(SectorchError, ValueError):
    """A model description that is malformed, or asks for something outside the closed list of operations."""


class UnsupportedOpError(SectorchError, NotImplementedError):
    """An operation, or a form of one, that the dispatch table lacks.

    Not a TypeError: Python's operators would take that for "try the other operand", and go on.
    """


class UnsupportedDeviceError(SectorchError, RuntimeError):
    """A tensor on a device for which there is no exact integer kernel."""


class FixedPointRangeError(SectorchError, ValueError):
    """A value does not fit the fixed-point ring."""


class RangeExceededError(SectorchError, ArithmeticError):
    """A secret value left the range in which results are right: there is no result, and nobody learned which value."""


class NonFiniteError(SectorchError, ValueError):
    """NaN or infinity where a number has to be encoded."""


class DtypeError(SectorchError, TypeError):
    """A tensor of a dtype that the operation does not take."""


class ShapeError(SectorchError, RuntimeError):
    """Shapes that do not fit, in torch's own words."""


class DimensionError(SectorchError, IndexError):
    """A dimension or index that a tensor lacks, in torch's own words."""


class ArgumentError(SectorchError, ValueError):
    """An argument value that the operation does not take."""


class TrainingModeError(SectorchError, RuntimeError):
    """`secure()` was given a module in training mode."""


class CheckpointError(SectorchError, RuntimeError):
    """A run folder that belongs to another run, or that cannot be read."""


class CorruptedCiphertextError(SectorchError, RuntimeError):
    """Ciphertexts that are not those that were sent, or a decryption that no honest computation gives."""


class PlotError(SectorchError, ImportError):
    """Plots were asked for and matplotlib is missing."""


class LeakyProtocolWarning(UserWarning):
    """A protocol was chosen that shows a party more than the result. See docs/paper-mode.md."""


class CaptureWarning(UserWarning):
    """A graph pass, or the recording of a module, did not compute what the module does, and is not used."""
