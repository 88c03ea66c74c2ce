"""Errors between the processes of parties, and about the files of a party. None of them reveals a secret."""

from __future__ import annotations

from .base import SectorchError
from .protocols import MaterialError


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
