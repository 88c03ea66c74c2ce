"""Errors about models, inputs and operations on tensors. They are raised before anything is sent."""

from __future__ import annotations

from .base import SectorchError


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
        index out of range: a table of 10 rows, indices to 12

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
