"""All exceptions and warnings of sectorch; the exceptions are one tree under `SectorchError`.

Each also derives from the built-in that a PyTorch user would expect (`TypeError`, `ValueError`, `RuntimeError`), so
`except ValueError` works as it does with torch. No message carries a share, a key or a secret value; a message about a
value outside its range names the largest magnitude at the party that owns it, and never leaves that party.

Each docstring says when the error is raised, gives an example of its text, and says what to do. docs/errors.md is
generated from them, and from those of `sectorch.estimators`, `tables` and the papers.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AbortedError", "ArchitectureError", "ArgumentError", "BudgetExhaustedError", "BudgetFileError", "BudgetInUseError",
    "BusyError", "CaptureWarning", "ChannelScaleError", "CheckpointError", "CorruptedCiphertextError", "DataError",
    "DatasetMissingError", "DeadlockError", "DimensionError", "DisaggregationError", "DisagreementError",
    "DroppedClientError", "DtypeError", "FalseDealingError", "FederationError", "FixedPointRangeError", "FrameError",
    "IdentityError", "KeyAgreementError", "KeyMismatchError", "LeakyProtocolWarning", "LevelError", "MaskError",
    "MaterialError", "MemoryBudgetError", "MisplacedValueError", "MissingKeyError", "NetworkError", "NonFiniteError",
    "PartitionError", "PeerLostError", "PlotError", "PrecisionError", "PrecisionWarning", "PrivacyError",
    "ProgramError", "QuotaError", "QuotaFileError", "RangeExceededError", "ReceiptError", "ReceiptsInUseError",
    "RefusedError", "ScaleError", "SecretAccessError", "SecretBranchError", "SectorchError", "SecurityLevelError",
    "SelectionError", "SerialisationError", "SessionMismatchError", "SessionOverError", "ShapeError", "SlotError",
    "StoreFullError", "StoreInUseError", "StreamReuseError", "TooLongError", "TopologyError", "TrainingModeError",
    "UndeclaredMessageError", "UnknownModelError", "UnsupportedDeviceError", "UnsupportedOpError", "VersionError",
    "WorkerError",
]  # fmt: skip

# The root.


class SectorchError(Exception):
    """The base class of all errors that sectorch raises.

    Attributes:
        place: the layer and line of the model whose step raised it; empty where it was no step of a model.
        layer: the same, where the text begins with it.

    What to do:
        Read the entry of the class that was raised. Catch this one to tell errors of sectorch from others; a failed
        call has changed no state, so the same object can be used again.
    """

    place: str = ""
    layer: str = ""


# Models, inputs and operations.
#
# They are raised before anything is sent.


class UnsupportedOpError(SectorchError, NotImplementedError):
    """The operation, or this form of it, is not in the dispatch table. Nothing was computed.

    It is no TypeError: Python's operators take that for "try the other operand", and go on.

    Example:
        torch.erfinv(SharedTensor(2, 3)) is not supported on secret tensors; nearest supported: erf.
        sectorch.supported_ops() lists all

    What to do:
        Take one of the operations that the text names, or write the function by supported ones (docs/ops.md). A
        function of one variable can be registered: `sectorch.register_op(f, domain=..., error=...)`. For a whole
        model, `sectorch.testing.check_module(model, x)` names every such line at once.
    """


class SecretAccessError(SectorchError, TypeError):
    """Code asked a secret tensor for its values: `.numpy()`, `.item()`, `float()`, `bool()`, pickling, ...

    Example:
        Tensor.numpy would take the content out of a SharedTensor; use .reveal(), which gives a SharedTensor's value
        to the querying party, and torch.where to choose by a secret

    What to do:
        Where the value may be known to Q, call `.reveal()`. Where it is used for a choice, write `torch.where(c, a,
        b)` in place of `if c:`. Where it is for a log or a file, keep it until after `.reveal()`.
    """


class UnsupportedDeviceError(SectorchError, RuntimeError):
    """A tensor is on a device that has no exact integer kernel.

    Example:
        ring products run on the CPU or on CUDA, got tensors on mps; move the model and the input to one of the two

    What to do:
        `model.cpu()` and `x.cpu()`, or `.cuda()` for both.
    """


class FixedPointRangeError(SectorchError, ValueError):
    """A value that its owner can check (an input, a weight) does not fit the range of the fixed-point numbers.

    Example:
        the input reaches magnitude 5000, and activations are below 4096 with 20 fraction bits; scale it down, or take
        Scheme(frac_bits=19, limit_bits=13); secure(model, calibrate=batch) chooses a format by typical inputs

    What to do:
        Scale the input or the layer that the text names (normalisation does), or trade fraction bits for range:
        `secure(model, Scheme(frac_bits=16))`. `secure(model, calibrate=batch)` chooses both from typical inputs and the
        weights. A scheme that names neither takes a format that holds the weights by itself.
    """

    needs: tuple = ()
    """The number formats that the weights need (`config.WeightNeed`); known to their owner alone."""


class PrecisionError(SectorchError, ValueError):
    """A model loses digits in fixed point, and its owner asked for an error in that case (`strict=True`, `answer`).

    Example:
        layer 'head' (Linear) at model.py:12: with 20 fraction bits the result is off by 0.012 of 0.03 on numbers that
        were drawn. Weights or constants there are small beside the last place, 2^-20: divide the input of that layer by
        a power of two and multiply its weights by it; or answer with it as it is: sectorch answer --imprecise,
        answer(imprecise=True), or in an [[accept]] of a federation imprecise = true

    What to do:
        Scale what the text names: `self.head(x / 256)` with `head.weight` times 256 is the same function and keeps
        eight more bits. `sectorch.diff(model, x)` shows the error of each layer for an input. Without
        `strict=True`, and with `sectorch answer --imprecise`, it is a `PrecisionWarning`.
    """


class RangeExceededError(SectorchError, ArithmeticError):
    """A secret value left the range in which results are correct. There is no result, and nobody learned which value.

    Example:
        a value between input and result left the range in which results are right, so there is no result (which value
        it was, nobody learned). If a value is too large: scale the input down, or choose a format for such inputs,
        secure(model, calibrate=batch) or Scheme(frac_bits=..., limit_bits=...)

    What to do:
        Q looks whether its input is unlike the others (a wrong unit, an outlier). If ordinary inputs do it, the
        model's owner calibrates: `secure(model, calibrate=batch)`, or a `Scheme` of fewer fraction bits or a larger
        `limit_bits`. A logarithm, root or quotient of what may be zero needs a guard, as in plain torch: `log(x +
        1e-12)`; that of an inverse has to keep the result in range. `sectorch.diff(model, x)`
        shows the first layer at which secure and plain differ.
    """


class NonFiniteError(SectorchError, ValueError):
    """A tensor holds NaN or infinity, which fixed point cannot encode.

    Example:
        the input holds 1 NaN and 0 infinite entries of 12

    What to do:
        Look for the first step that makes them in plain (`torch.isfinite(x).all()`). For missing values, put a number
        there and give a mask as a second input.
    """


class DtypeError(SectorchError, TypeError):
    """The operation does not take tensors of this dtype or layout.

    Example:
        the input has dtype torch.complex64; sectorch takes real floating-point or integer tensors

    What to do:
        Convert it where the text says: `x.to(torch.float32)`, `x.to_dense()`, `torch.view_as_real(x)`.
    """


class ChannelScaleError(SectorchError, TypeError):
    """The channels of a network cannot be scaled by positive numbers (`sectorch.nn.channels`); names layer and reason.

    Example:
        parameters that no layer of the graph uses: extra; remove them

    What to do:
        Replace the layer that the text names: ReLU in place of smooth activations, no branches on values, a parameter
        of its own for each layer.
    """


class ShapeError(SectorchError, RuntimeError):
    """Shapes do not fit together. Where torch has an error text for it, this is that text.

    Example:
        aggregate() needs equal shapes, got [(1, 2), (1, 3)]

    What to do:
        Run the same lines on plain tensors of these shapes: they fail there too. Where a model is served, ask with
        the shape that the text names.
    """


class DimensionError(SectorchError, IndexError):
    """A tensor has no such dimension or index. Where torch has an error text for it, this is that text.

    Example:
        index out of range in self: a table of 10 rows, indices from 3 to 12

    What to do:
        Count dimensions from 0, or from -1 at the end. Indices that are secret are looked at by their owner alone,
        who gets this error: they have to be below the number of rows of the table.
    """


class ArgumentError(SectorchError, ValueError):
    """An argument, an option or a setting has a value that is not allowed.

    Example:
        chunk must be at least one row, got 0

    What to do:
        The text says what was expected. `help(function)` and the API reference list all arguments, and `sectorch
        COMMAND --help` all options.
    """


class TrainingModeError(SectorchError, RuntimeError):
    """`secure()`, or a function that serves a model, was given a module in training mode.

    Example:
        the model is in training mode (Dropout); call model.eval() first

    What to do:
        `model.eval()` before. A secure module does not train: train the plain one and make it secure again.
    """


class ProgramError(SectorchError, ValueError):
    """A model description is malformed, too large, or uses an operation outside the closed list.

    Example:
        a tensor of shape [100000, 100000] is too large: a model has tensors of at most 16777216 elements

    What to do:
        The model's owner makes the file anew (`sectorch convert`, `sectorch.network.save_model`) with this version,
        or rewrites the line that has no description. Whoever only received it should not try to mend it: it may have
        been made to do harm, and nothing of it was run.
    """


# Protocols and sessions.
#
# About values, messages, keys and prepared material.


class MisplacedValueError(SectorchError, RuntimeError):
    """No party holds all the inputs of a computation.

    Example:
        nobody holds all that mul takes: (4, 3) at Q; (3,) at A; send it there

    What to do:
        In a protocol, send the value before (`c.send(Q, A, "label")`), or compute where all operands are: the owners
        of a result are those who hold all of them.
    """


class TopologyError(SectorchError, RuntimeError):
    """A message is addressed to a party to which there is no channel. In the star, clients are connected to S only.

    Example:
        no channel from Q to A; the roles are Q A S with edges A-S Q-S

    What to do:
        Send it by way of S, under a mask that S does not know; or give the protocol roles that have this edge
        (`Roles`).
    """


class UndeclaredMessageError(SectorchError, RuntimeError):
    """A protocol sent something that its declaration does not list. It did not leave.

    Example:
        protocol 'sum' sent 'masked', which it does not declare; it declares no message

    What to do:
        Add a `Message` to the protocol's `@protocol(...)`, with what hides it from its receiver, or send it under the
        label, and along the edge, that is declared.
    """


class SecretBranchError(SectorchError, TypeError):
    """Python control flow asked for the truth value, the length or the items of a located value, or code copied one.

    Example:
        a located value cannot be copied or pickled

    What to do:
        Write the choice as arithmetic (`sectorch.mpc.star.select`): a program is the same for all values. Lengths and
        shapes are public: ask `x.shape`.
    """


class SessionMismatchError(SectorchError, RuntimeError):
    """An operation has operands of two sessions, or of two answering parties.

    Example:
        tensors of two sessions cannot meet: their shares have different keys

    What to do:
        Share the input for the model that takes it: `sectorch.share(x, session=m.session, party=m.party)`. Results of
        several answering parties are added by `sectorch.aggregate`.
    """


class StreamReuseError(SectorchError, RuntimeError):
    """Random material would be used a second time, which would reveal the difference of the two values that it masks.

    Example:
        draw 3 of 'share' in call 7 was made already

    What to do:
        Do not copy, pickle or rewind a session or its keys. Open a new `Session` where the text says that counters
        are used up. If no code of yours did either, please report it.
    """


class MaterialError(SectorchError, RuntimeError):
    """Prepared offline material is missing, was used before, or belongs to another program.

    Example:
        the material of call 4 was used already; prepare it again

    What to do:
        Prepare again, for this model, these shapes and these arguments: `secure_model.preprocess(...)`, or `sectorch
        query --prepare`. Material is used once.
    """


class KeyAgreementError(SectorchError, RuntimeError):
    """The parties could not agree on the pair keys of a session, or received an invalid key.

    Example:
        the peer's X25519 public key is not valid

    What to do:
        Open a new session. If it comes again, take it for an attack or a damaged link: compare the fingerprints of
        the identity keys (`sectorch keys show`) over another channel.
    """


class FalseDealingError(SectorchError, RuntimeError):
    """The dealer has dealt other values than the program says. It received nothing that depends on the model.

    With audited dealing, `evidence` holds what the dealer promised and signed (docs/audited.md). With verified dealing
    there is none (docs/verified.md).

    Example:
        Q has dealt something else in call 7 than it promised

    What to do:
        Both ends on the same version of sectorch? Then the asking party runs something else than sectorch: keep the
        evidence, and answer it no more. If nobody cheats, please report it.
    """

    def __init__(self, text: str, evidence: Any = None):
        super().__init__(text)
        self.evidence = evidence


class FalseServerError(SectorchError, RuntimeError):
    """The server has computed, sent or stated something else than the program says.

    Where it has signed what it sent, `evidence` holds that, at the answering party (docs/decoys.md).

    Example:
        S has not signed what it states of call 7

    What to do:
        All parties on the same version of sectorch? Then the server runs something else than sectorch: keep the
        evidence, and use another server. Results of the session before this may be wrong. If nobody cheats, please
        report it.
    """

    def __init__(self, text: str, evidence: Any = None):
        super().__init__(text)
        self.evidence = evidence


class OtherAnswerError(SectorchError, RuntimeError):
    """A question whose answer is known was answered otherwise.

    Either the answering party has computed with another model, or the server has computed wrongly. Which of them it
    was, decoys tell: they find the server (docs/decoys.md).

    Example:
        one question was asked twice and answered with other bits: A has not computed with one model, or S wrongly

    What to do:
        Use no result since the last one that was checked. Compare the model's version in the receipts; ask an auditor
        to whom the answering party opens it.
    """


class DecoyError(SectorchError, RuntimeError):
    """What a client says of a decoy does not fit the call: nothing can be checked, and nobody is accused.

    Example:
        in call 7 Q has sent S something else than its streams and the made-up input give

    What to do:
        The asking party runs something else than sectorch, or another version of it.
    """


class MaskError(SectorchError, RuntimeError):
    """The pairwise masks of clients cannot cancel: a client is missing, twice or unknown, or a mask was used before.

    Example:
        this round was masked already; a second update needs a new noisy model

    What to do:
        Sum again, with all clients and fresh masks (perturbed models: with a new noisy model): a mask that is used
        twice shows a difference of updates.
    """


class DroppedClientError(MaskError):
    """A client's masked tensor is missing, so the masks of the others do not cancel.

    Example:
        no client sent an update

    What to do:
        Sum new values without the missing client, or let the others open what it left: `drop_outs=True`, in perturbed
        models `double=True`.
    """


# Parties as processes.
#
# Errors between them, and about the files of a party. None of them reveals a secret.


class NetworkError(SectorchError, ConnectionError):
    """The base class of errors between the processes of parties. Nothing was revealed.

    Example:
        the parties did not come up in 60 s

    What to do:
        Most errors are of a kind below, which says more. Catch this one to ask again later: a query that failed has
        revealed nothing, and asking again is a new query.
    """


class FrameError(NetworkError):
    """A frame is malformed, or is not the one that the protocol expects next.

    Example:
        S sent a frame that does not belong here (wrong shape): expected relu/c_S (64,) in call 3; both sides must run
        the same version on the same model

    What to do:
        Let all parties run the same version of sectorch on the same model file, and look for something in between
        that speaks another protocol (an HTTP proxy, a load balancer). Otherwise the peer does not follow the
        protocol.
    """


class PeerLostError(NetworkError):
    """The process of a party died, hangs, closed the connection, or was never started.

    Example:
        the server has not replied for 60 s

    What to do:
        Check whether that party's process runs and listens (`sectorch models` asks the server), and read its log. Then
        ask again: the query has no result, and a program among parties continues from its folder. On a slow link,
        raise `--patience`.
    """


class AbortedError(NetworkError):
    """Another party stopped the session; the text is its reason.

    Example:
        'hospital-b' was stopped

    What to do:
        Read its reason, and that party's log. Run again when it is up.
    """


class IdentityError(NetworkError, PermissionError):
    """A certificate, a long-term identity key or a file of identities is not the expected one.

    Attributes:
        told: the text that the other parties get; the error's own text is for this party's user.

    Example:
        the federation file names the key SHA256:abc for 'north', and this one is SHA256:def: somebody may stand in
        between

    What to do:
        Do not trust the new key because it is there. Ask the party over another channel for its fingerprint
        (`sectorch keys show`), and only then `sectorch keys pin NAME FINGERPRINT`, or mend the federation file. Of a
        certificate that has ended, have a new one issued.
    """

    def __init__(self, text: str, told: str | None = None):
        super().__init__(text)
        self.told = told


class UnknownModelError(NetworkError, LookupError):
    """No answering party of that name is connected.

    Example:
        no model 'hospital-c' is connected; there are: hospital-a, hospital-b. A party that has just been started
        compiles first, which can take a minute: if 'hospital-c' was, ask again

    What to do:
        Take a name of `sectorch models`, or have its owner start `sectorch answer` with it. Right after its start, ask
        again: it compiles before it answers, once on a machine, for up to a minute.
    """


class RefusedError(NetworkError):
    """A party refuses a request: its number format, its version, or a program that the party has not accepted.

    The log of that party says more.

    Example:
        'hospital-b' answers with range checks only: leave range_check=False out

    What to do:
        Ask for what it accepts, as the text says, or ask its operator to accept this (for programs among parties: its
        own file of what it accepts, docs/federation.md).
    """


class DisagreementError(NetworkError):
    """The parties have not run the same computation: a public number, a shape or a setting differs at one of them.

    Example:
        'A' has computed with another public number, shape or setting than this party (a learning rate, a batch's rows,
        a seed): nothing was revealed; run the same program with the same settings at all parties

    What to do:
        Compare the programs and their settings, and versions of torch and sectorch, at all parties; draw what is
        random and public (batches, dropout, `torch.manual_seed`) from a seed that the program names. Then run it again.
        Do not catch it: where a program goes on after it, the other parties wait, in a federation until `run_seconds`.
    """


class DeadlockError(NetworkError):
    """Parties of a federation wait for each other in a circle, each in another session, so that no session can begin.

    It is raised at all of them, and at those that wait with them, as soon as the circle is closed. It can happen when a
    party was lost and started again: that party begins with its first session, while the others are at a later one.

    Example:
        these parties wait in a circle, and none of them will come: 'north' waits for 'south' in 'second', 'south' waits
        for 'north' in 'first'; start all of them again. A program that opens one session after another holds one that
        all are in meanwhile, and then this cannot be

    What to do:
        Start all of them again. Have a program that opens one session after another hold one that all parties are in
        meanwhile: then whoever is lost ends it for all (docs/federation.md).
    """


class VersionError(NetworkError):
    """The other side speaks no version of the protocol that this side speaks; the text names both.

    Example:
        the server speaks protocol 4 (sectorch 0.2.0), and 'alice' speaks protocol 5 (sectorch 0.3.0): install the same
        release at both

    What to do:
        Install the release of the other side, or the other side this one. Dialling again does not help, so an answering
        party ends with it.
    """


class BusyError(NetworkError):
    """A party has as many requests as it accepts, or is running this one already.

    Example:
        8 calls wait for the server, 4 of them of 'alice'; ask again in a moment

    What to do:
        Ask again later, with fewer sessions or fewer rows at once. Its operator can raise the limit that the text
        names (`sectorch server --help`).
    """


class QuotaError(NetworkError):
    """A client has reached a limit of what a party answers; the text names the limit, and when it ends.

    Example:
        hospital-b lets this client ask 'tagger' for 1000 rows in all; 990 are used, and 32 more asked for; they do
        not become free again: ask its owner for more

    What to do:
        Wait until the time in the text, ask for fewer rows, or ask the model's owner for more. The limit is there
        because answers tell about the model (docs/not-promised.md).
    """


class QuotaFileError(SectorchError, RuntimeError):
    """The file that counts the use of limits cannot be read or written. A query that cannot be counted is not served.

    Example:
        cannot keep what is used in used.db: No space left on device

    What to do:
        The party's operator makes room, or puts the file's rights right (mode 600, its own user). A file of another
        party is not taken: name this party's own. Without the file, counts begin anew, which is the operator's to
        decide.
    """


class SessionOverError(NetworkError):
    """Another party ended the session between two calls: it was idle, or asked for an older version of the model.

    Example:
        nothing was asked for 600 s, and the session is over; asking again opens another

    What to do:
        Ask again: that opens a new session. Material that was prepared in the old one is lost unless it is in a store.
    """


class StoreFullError(MaterialError):
    """Offline material does not fit the disk budget of a party; the text says how many calls fit.

    Example:
        a prepared call takes 12.5 MB and 10.0 of 2000.0 MB are free in the store: 0 more fit

    What to do:
        Prepare as many as fit, use what is there first, or give that party's store more room (`--store-budget`, at
        its own start).
    """


class StoreInUseError(MaterialError):
    """Another process uses the folder of offline material.

    Example:
        the store material is in use by another process; name another --store

    What to do:
        One process, one folder: name another, or end the other process. A process that was killed leaves no lock.
    """


class ReceiptError(SectorchError, RuntimeError):
    """A receipt cannot be written, so the query is not served; or a file of receipts is damaged.

    Example:
        no receipt can be written (No space left on device), and what has none is not served

    What to do:
        At a party: make room on the disk; the next query is served. In an audit: the text names the first wrong line.
        Compare the head that was noted elsewhere, and the other parties' files (`--against`), and ask the party whose
        file it is; keep the file as it is.
    """


class ReceiptsInUseError(ReceiptError):
    """Another process uses the file of receipts.

    Example:
        the receipts b/receipts.jsonl are in use by another process; name another file, one for each party

    What to do:
        Name a file of its own for each party and process, or end the other process. One that was killed leaves no
        lock.
    """


# Runs of every kind.
#
# About run folders, ciphertexts and plots.


class CheckpointError(SectorchError, RuntimeError):
    """A run folder belongs to another run, or cannot be read.

    Example:
        runs/a holds another run, which differs in seed, rounds; name another folder or remove that one

    What to do:
        Name another folder (`--out`), or give the settings with which the folder was begun. Where a file is damaged,
        remove what the text names: finished rounds that are whole are kept.
    """


class CorruptedCiphertextError(SectorchError, RuntimeError):
    """Ciphertexts differ from those that were sent, or decrypt to numbers that no honest computation gives.

    Example:
        gradients arrived damaged: they do not have the digest that they were sent with; ask for them again

    What to do:
        Run again from the folder: what was damaged was not counted. If it comes again, a link or a machine damages
        data, or a party does not follow the protocol; or the model's values leave the number format: scale the inputs
        down.
    """


class PlotError(SectorchError, ImportError):
    """A plot needs matplotlib, which is not installed.

    Example:
        a plot needs matplotlib, which is not installed: pip install 'sectorch[plots]', or leave plots out
        (--no-plots)

    What to do:
        `pip install 'sectorch[plots]'`, or leave them out.
    """


# Homomorphic encryption.


class SecurityLevelError(SectorchError, ValueError):
    """Parameters below 128-bit security, by SEAL's own table and check.

    Example:
        a modulus of 240 bits at degree 8192 is weaker than 128 bits of security; 218 bits is SEAL's limit: take a
        larger degree or a smaller depth

    What to do:
        Let `ckks.keygen(depth=...)` choose: it takes the smallest ring that is secure. A smaller depth, or fewer scale
        bits, needs a smaller modulus. Weaker parameters cannot be had.
    """


class LevelError(SectorchError, RuntimeError):
    """The modulus chain has no prime left for an operation.

    Example:
        square needs one more level, and the modulus chain (depth 3) is used up. Make keys with a larger depth
        (sectorch.ckks.explain(model, x) says which), fold layers, or lower a polynomial's degree

    What to do:
        Make keys with the depth that `ckks.explain(model, x)` names, or make the network shallower.
    """


class ScaleError(SectorchError, ValueError):
    """A value or a weight does not fit the scale and the modulus that a ciphertext has left.

    Example:
        the tensor was encrypted with bound=None; declare one with e.bounded(...) before it is shared

    What to do:
        Declare a bound (`e.bounded(...)`), scale weights or inputs, or make keys with more depth or another
        `scale_bits`, as the text says.
    """


class SlotError(SectorchError, ValueError):
    """More samples than slots, or two tensors whose slots hold different batches.

    Example:
        a batch of 9000 does not fit 8192 slots; keygen(depth, slots=9000) or cut it

    What to do:
        Cut the batch, or make keys with as many slots. Two tensors meet when they hold the same batch.
    """


class KeyMismatchError(SectorchError, RuntimeError):
    """A key, a ciphertext or a file of other parameters, or of another key set.

    Example:
        two tensors under different keys cannot meet; encrypt both under one public key

    What to do:
        Encrypt all that meets under one public key, and decrypt with the secret key that was made with it. The first
        letters of a key's identity stand in the text.
    """


class MissingKeyError(SectorchError, RuntimeError):
    """An operation needs a key that this holder was not given.

    Example:
        decrypt() needs the secret key, which is not here: decrypt(keys.secret)

    What to do:
        Decrypt at the key's holder. Keys for products and for rotations are made with the key pair: `ckks.keygen(...,
        rotations=steps)`.
    """


class MemoryBudgetError(SectorchError, MemoryError):
    """An operation or a run would take more memory than allowed; refused before it starts, with the estimate.

    Example:
        the run would take about 9.5 GiB of ciphertexts, more than the 4.0 GiB allowed; use a smaller input or network,
        or sectorch.ckks.memory_limit(bytes)

    What to do:
        Use a smaller input, network or depth; a smaller batch does not help, since each element is a ciphertext
        whatever the batch. Or allow more: `ckks.memory_limit(bytes)`.
    """


class SerialisationError(SectorchError, ValueError):
    """Bytes that are not what they should be: wrong magic, length, shape, parameters, or a residue beyond its prime.

    Example:
        weights.ckks is damaged: its length does not fit its head

    What to do:
        Have it sent or saved again. If the sender's file is whole, compare the versions of sectorch.
    """


class DisaggregationError(SectorchError, RuntimeError):
    """One more release would let the receiver take an aggregate apart. Nothing was released.

    Example:
        north releases no aggregate over 3 samples of south; at least 8 are needed

    What to do:
        Ask over more samples, for fewer numbers, or with more noise, as the text says. Allowing more (`leakage=`) is
        for the owner of the logits to decide.
    """


# Privacy budgets.


class PrivacyError(SectorchError, ValueError):
    """A budget, a scale or a count outside its range, or one that no mechanism can serve.

    Example:
        epsilon must be above 0 and finite, got -1.0

    What to do:
        Correct the number that the text names. Where no mechanism serves, ask fewer queries, allow a larger epsilon,
        or find more voters.
    """


class BudgetExhaustedError(SectorchError, RuntimeError):
    """One more query would overrun a budget. It was not asked, and nothing was spent.

    Example:
        epsilon 4.0 of 4.0 is spent (delta 1e-05), and the next step would bring it to 4.2; ask no more, or start with
        a larger budget or more noise

    What to do:
        Stop: a budget that is spent stays spent. Only the people whose data it protects can agree to a larger one.
    """


class BudgetFileError(SectorchError, RuntimeError):
    """A budget on disk that is damaged, missing, of another limit, or that cannot be written.

    Example:
        there is no budget alice.json; put it back, or name an epsilon to start it with if it is a new one

    What to do:
        Put back the newest copy that lacks no charge. A budget that begins anew forgets what was spent: do so only for
        new data.
    """


class BudgetInUseError(BudgetFileError):
    """A budget on disk that another run has.

    Example:
        the budget alice.json is in use by another run; wait until it ends

    What to do:
        Wait for the other run, or end it. A process that was killed leaves no lock.
    """


# Data.


class DataError(SectorchError, ValueError):
    """Images, labels or an option of this package that do not fit.

    Example:
        a pool needs at least one image, got 0

    What to do:
        Correct what the text names: the name of a data set, a shape, or a count.
    """


class DatasetMissingError(SectorchError, FileNotFoundError):
    """A data set that is not on disk; the message says where it was looked for and how to get it.

    Example:
        ham10000 is not on disk: looked for HAM10000_metadata.csv in data and data/ham10000; get it from
        https://doi.org/10.7910/DVN/DBW86T, or name another folder (--data-root)

    What to do:
        Get it by the command or from the address in the text; sectorch downloads nothing by itself. `digits` is there
        without a file.
    """


class PartitionError(DataError):
    """A partition that gives some client nothing useful.

    Example:
        with alpha 0.01, 100 draws left some client with less than half of 50 samples; take a larger alpha, fewer
        clients or more samples each

    What to do:
        Take a larger alpha, fewer clients, or more samples.
    """


class SelectionError(DataError):
    """More queries than the pool holds, or a strategy that lacks what it needs.

    Example:
        500 queries of a pool of 300: ask for at least one and at most 300

    What to do:
        Ask for fewer queries or make a larger pool; strategies by uncertainty need the client's own predictions.
    """


# The papers' experiments.


class FederationError(SectorchError, ValueError):
    """Settings, participants or data that cannot make a run.

    Example:
        a federation makes one run at a time: one seed, one value, no controls

    What to do:
        Correct the option that the text names; `--help` lists all. Nothing has been trained.
    """


class ArchitectureError(FederationError):
    """An architecture that is not known, or that does not fit its owner's samples.

    Example:
        there is no architecture resnet9; there are cnn, lenet, vgg7

    What to do:
        Take one of the names in the text, or a model whose classes and input fit its owner's samples.
    """


class TooLongError(FederationError):
    """A run whose estimate is over the limit, and that nobody agreed to.

    Example:
        this run takes about 9 hours; ask for less, or agree to it with --yes

    What to do:
        Agree with `--yes`, or ask for fewer clients, queries, rounds or seeds.
    """


class WorkerError(SectorchError, RuntimeError):
    """A worker process ended in the middle, or what spreads the work is not installed.

    Example:
        a worker process ended in the middle; run again from the folder

    What to do:
        Run the same command again: it goes on from the folder. If the machine killed the worker, it lacked memory: use
        fewer processes.
    """


# Warnings.
#
# The result is correct, and the user should know something about it.


class LeakyProtocolWarning(UserWarning):
    """The chosen protocol reveals more than the result to a party (docs/paper-mode.md).

    Example:
        relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same thing
        often enough, its value); relu='exact' shows nothing and sends fewer bytes

    What to do:
        Leave the choice out: the default shows nothing more. To measure the paper's own protocol, filter the warning
        in that one place (`warnings.catch_warnings`).
    """


class CaptureWarning(UserWarning):
    """A graph pass, or the recorded graph of a module, differs from the module, and is not used.

    Example:
        the graph pass fold changes what Net computes, so that no pass is applied; the results are right and cost
        more; please report this

    What to do:
        Nothing needs to be done. Please report it, with the model's code: it is a defect here.
    """


class PrecisionWarning(UserWarning):
    """A model's weights lose digits in fixed point, as its owner found on its own numbers before a call.

    Example:
        layer 'head' (Linear) at model.py:12: with 20 fraction bits the result is off by 0.012 of 0.03 on numbers that
        were drawn. Weights or constants there are small beside the last place, 2^-20: divide the input of that layer by
        a power of two and multiply its weights by it;
        secure(model, strict=True) refuses such a model

    What to do:
        Scale what the text names: `self.head(x / 256)` with `head.weight` times 256 is the same function and keeps
        eight more bits. `sectorch.diff(model, x)` shows the error of each layer for an input. With
        `strict=True` it is a PrecisionError.
    """
