"""What perturbed-model federated learning refuses, by name."""

from __future__ import annotations

from ...errors import ChannelScaleError, SectorchError


class PerturbationError(SectorchError):
    """Base of the protocol's own errors. Masks that do not cancel and lost clients are errors of the secure sum.

    What to do:
        Catch this one for all that follow, and `sectorch.errors.MaskError` for those of the sum.
    """


class NotPerturbableError(PerturbationError, ChannelScaleError):
    """An architecture through which a positive channel scale cannot be carried. Names the layer and the reason.

    Example:
        '2' has no bias to take the noise; give it one, or noise_on='weights'

    What to do:
        Replace the layer that the text names: ReLU in place of smooth activations, no branches on values, a parameter
        of its own for each layer.
    """


class NoiseError(PerturbationError, ValueError):
    """Noise that is not positive, not finite, or too large for the cross-entropy exchange.

    Example:
        the spread of the channel scales has to be finite and above 1, got 0.5

    What to do:
        Use the defaults, or a spread above 1 and a positive, finite size of additive noise.
    """


class StateMismatchError(PerturbationError, ValueError):
    """Names, shapes or dtypes of a state dict or an update differ from the model's.

    Example:
        the state dict lacks conv1.weight

    What to do:
        Let client and server have the same architecture at the same version; take the weights from
        `model.state_dict()` in one dtype.
    """


class BatchMismatchError(PerturbationError, ValueError):
    """Inputs, targets and model outputs of a client's batch do not fit together.

    Example:
        inputs of shape [32, 1, 8, 8], targets of [31]

    What to do:
        Give a pair (inputs, targets) with as many rows each, and a body whose output fits the last layer.
    """


class NonFiniteGradientError(PerturbationError, ValueError):
    """NaN or infinity in a model, a client's terms or a recovered gradient.

    Example:
        the recovered gradient is not finite at conv1.weight

    What to do:
        Look for NaN in the batch, then lower the learning rate: as a rule the run has diverged. The round changed
        nothing.
    """


class StaleKeyError(PerturbationError, RuntimeError):
    """An update or a request was made for another round's noise than the key at hand.

    Example:
        update 2 was made on another round's noisy model; it has to be made again

    What to do:
        Fetch the current noisy model and make the update again. Noise is never used for two rounds.
    """


class WeightError(PerturbationError, ValueError):
    """Client weights that are not positive, not finite, or not those the updates were made with.

    Example:
        a weight N_k is a positive number, got 0

    What to do:
        Give each client the positive number of samples that was announced with the round.
    """


class ExchangeError(PerturbationError, RuntimeError):
    """The cross-entropy exchange needs the server and has no way to reach it, or its messages do not fit.

    Example:
        no batch is running: ask() comes before take()

    What to do:
        Pass `server=`, and for each batch ask, take the reply, and only then go on.
    """
