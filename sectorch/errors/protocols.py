"""Errors of protocols and sessions: about values, messages, keys and prepared material."""

from __future__ import annotations

from typing import Any

from .base import SectorchError


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
