"""`sectorch.secure(model)` and its kin: `reference` without parties, `program` as a value, and calibration."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..choreography import Party
from ..choreography.ledger import Profile, sole_observer
from ..choreography.program.trace import Program
from ..config import LEAST_FRAC_BITS, WeightNeed, reason_of, scheme_fields, scheme_of
from ..errors import ArgumentError, DtypeError, FixedPointRangeError, LeakyProtocolWarning, TrainingModeError
from ..ring import HEADROOM_BITS
from ..session import Session, default_session
from ..tensor import Scheme
from .graph import Trace, function_of, op_name, place_of
from .graph_cache import GraphCache, plain
from .inputs import Inputs
from .module import SecureModule
from .weights import check_model, copy_model, device_of, dtype_of, refuse_unused

if TYPE_CHECKING:
    from ..ckks import CKKSModule, Keys


# Calibration: a number format from the values that a model has on typical inputs.


MARGIN_BITS = 3
"""log2 of the factor by which values may exceed those of the calibration batch."""


@scheme_fields
def calibrated_scheme(
    model: nn.Module,
    batch: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any],
    scheme: Scheme | Literal["lan", "wan"] | None = None,
) -> Scheme:
    """The scheme with the most fraction bits, up to its own, that holds all values of a plain run with a margin, and
    the model's weights.

    The limit of activations is the largest one seen times 2^`MARGIN_BITS`. An input that exceeds it ends in
    `RangeExceededError`: calibrate on data like that of the queries. Without range checks comparisons rely on the
    limit, and an input that exceeds it gives a wrong result. A limit that the scheme names stays.

    Args:
        model: as in `secure`.
        batch: typical inputs, as the model is called with them: a tensor, `Inputs(...)` of several, or the dict or list
            that is its only argument.
        scheme: as in `secure`; its `frac_bits` are the most that are chosen.

    Raises:
        FixedPointRangeError: naming the layer whose values cannot fit, or with it the weight that leaves no room.
        ArgumentError: the module runs operation by operation, since it changes from call to call.
        SectorchError: the forward asks for what cannot be computed on secrets.
    """
    scheme = scheme_of("calibrate", scheme)
    if isinstance(batch, Iterator | torch.utils.data.DataLoader):
        raise ArgumentError(
            f"calibration takes one batch, as the model is called with it, got {type(batch).__name__}: "
            f"next(iter(batches)) gives its first, and where that has labels too, [0] of it the inputs"
        )
    several = isinstance(batch, list | tuple)
    batch = Inputs.of(batch)
    if not all(x.numel() for x in batch.tensors):
        raise ArgumentError(f"calibration looks at typical inputs, and these are empty: {batch!r}")
    try:
        program = record_program(model, batch)
    except TypeError as error:
        if not several:
            raise
        raise ArgumentError(
            "calibration takes one batch, as the model is called with it, and this model takes no list of tensors: "
            "torch.cat(batches) makes one batch of several"
        ) from error
    if program is None:
        raise ArgumentError(
            "calibration needs values that are the same in each call, and this module changes itself or draws random "
            "numbers; name frac_bits instead"
        )
    largest, at = ranges(program, batch)
    limit_bits = max(1, math.ceil(math.log2(max(largest, 2.0**-20)))) + MARGIN_BITS
    hidden = any(op_name(node) in _HIDE_VALUES for node in program.graph.nodes)
    # A layer's sum has 2 f fraction bits, six more where averages add them, and one for a difference of two values.
    fitting = (HEADROOM_BITS - 1 - limit_bits - 6) // 2
    if fitting < LEAST_FRAC_BITS:
        raise FixedPointRangeError(
            f"{at} reaches magnitude {largest:.4g}, which leaves {fitting} fraction bits; normalise the model there"
        )
    if scheme.limit_bits is not None:
        limit_bits = scheme.limit_bits
    elif hidden:
        limit_bits = None
    made = replace(scheme, frac_bits=min(scheme.frac_bits, fitting), limit_bits=limit_bits)
    needs = weights_needs(model, batch, made)
    held = made.holding(needs)
    if held is None:
        raise FixedPointRangeError(
            f"no number format of {LEAST_FRAC_BITS} fraction bits or more holds both: {at} reaches magnitude "
            f"{largest:.4g}, and there is no room, {reason_of(needs)}; normalise the model at one of the two"
        )
    return held


def weights_needs(model: nn.Module, batch: Inputs, scheme: Scheme) -> list[WeightNeed]:
    """The number formats that the weights need, including those that graph passes make."""
    try:
        with sole_observer(Profile()):
            session = Session(device=batch.tensors[0].device)
            return SecureModule(model, session, session.answering[0], scheme, None).needs(batch)
    except FixedPointRangeError as error:
        return list(error.needs)


_HIDE_VALUES = (
    "lstm", "lstm_cell", "gru", "gru_cell", "rnn_tanh", "rnn_tanh_cell", "rnn_relu", "rnn_relu_cell",
    "multi_head_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Functions with activations inside, which the run does not show: they leave the limit open."""


def record_program(model: nn.Module, batch: Inputs) -> Trace | None:
    """The program of a module for a batch of this shape; None where the module runs operation by operation."""
    module, given = copy_model(model)
    shapes = Session(dry=True, device=batch.tensors[0].device)
    programs = GraphCache(module, Scheme(), dtype_of(model), shapes, shapes.answering[0], given)
    return programs.of(batch.meta())


def ranges(program: Trace, batch: Inputs) -> tuple[float, str]:
    """The largest magnitude of any value of a plain run, and the layer that gives it."""
    largest, at = max(float(x.abs().max()) for x in batch.tensors), "the input"

    def watch(node, compute, args, kwargs):
        nonlocal largest, at
        y = compute(*args, **kwargs)
        if isinstance(y, torch.Tensor) and y.is_floating_point() and y.numel():
            seen = float(y.abs().max())
            if not math.isfinite(seen):
                raise FixedPointRangeError(f"{place_of(node)} gives a value that is not finite on the batch")
            if seen > largest:
                largest, at = seen, place_of(node)
        return y

    plain(program, batch.wide(), step=watch)
    return largest, at


# Exported programs as modules of torch functions, which `secure` and `sectorch convert` take.


_TRAINS = {"dropout.default": 2, "feature_dropout.default": 2, "alpha_dropout.default": 2, "batch_norm.default": 5}
"""The place of the argument that says whether an operation is in training mode."""


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    end = None if end is None or end >= 1 << 62 else end
    return x[(slice(None),) * (dim % x.dim()) + (slice(start, end, step),)]


def _size(x: torch.Tensor, dim: int) -> int:
    return x.size(dim)


def _same(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def _to(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    return x if dtype is None else x.to(dtype)


def _index(x: torch.Tensor, indices: list) -> Any:
    return x[tuple(slice(None) if i is None else i for i in indices)]


_SPECIAL: dict[str, Callable] = {
    "index": _index, "slice": _slice, "sym_size": _size, "_to_copy": _to, "alias": _same, "lift_fresh_copy": _same,
    "_assert_tensor_metadata": lambda *_, **__: None,
    "dropout_": torch.dropout,
    "hardswish_": F.hardswish, "hardsigmoid_": F.hardsigmoid, "silu_": F.silu, "mish_": F.mish, "relu6_": F.relu6,
    "upsample_nearest2d": lambda x, size=None, scale=None: F.interpolate(x, size, scale),
    "upsample_bilinear2d": lambda x, size=None, corners=False, scale=None: F.interpolate(
        x, size, scale, "bilinear", corners
    ),
    "max_pool2d": F.max_pool2d, "max_pool1d": F.max_pool1d, "adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "embedding": torch.embedding,
}  # fmt: skip
"""ATen operations for which torch has no function of the same name and arguments."""


def module_or_exported(model: nn.Module | torch.export.ExportedProgram) -> nn.Module:
    """The module itself; for an exported program, or its `module()`, a module of torch functions.

    The module of an exported program is recognised by its `eval`, which torch replaces by a method that raises.

    Raises:
        TrainingModeError: the model was exported in training mode.
    """
    exported = isinstance(model, torch.export.ExportedProgram)
    return module_of(model) if exported or (isinstance(model, fx.GraphModule) and "eval" in vars(model)) else model


def module_of(exported: torch.export.ExportedProgram | nn.Module) -> fx.GraphModule:
    """An exported program, or its `module()`, as a module of torch functions with the same arguments.

    The guards of the export, which check what torch assumed of its inputs, are left out: a secure call checks shapes.

    Raises:
        TrainingModeError: the model was exported in training mode.
    """
    made: Any = exported.module() if isinstance(exported, torch.export.ExportedProgram) else exported
    graph = copy.deepcopy(made.graph)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_module" and not node.users:
            graph.erase_node(node)
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _refuse_trained(node)
            base = node.target._schema.name.rpartition("::")[2]
            node.target = _SPECIAL.get(base) or function_of(node.target)
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "layout", "pin_memory")}
    return fx.GraphModule(made, graph).eval()


def _refuse_trained(node: fx.Node) -> None:
    target: Any = node.target
    name = f"{target._schema.name.rpartition('::')[2]}.{target._overloadname}"
    place = _TRAINS.get(name)
    if place is not None and place < len(node.args) and node.args[place] is True:
        raise TrainingModeError(
            f"the model was exported in training mode ({name}); call model.eval() and export it anew"
        )


@overload
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: Literal["shares"] = "shares",
    keys: None = None,
) -> SecureModule: ...


@overload
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    backend: Literal["ckks"],
    keys: Keys | None = None,
) -> CKKSModule: ...


@scheme_fields
def secure(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    session: Session | None = None,
    party: Party | None = None,
    chunk: int | None = None,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    backend: str = "shares",
    keys: Keys | None = None,
) -> SecureModule | CKKSModule:
    """Wrap a module: its weights become A's secret, its inputs Q's, and only Q learns the result.

    The secure module is made of a copy: later changes of the model's weights, layers or hooks do not reach it.

    Args:
        model: any nn.Module made of supported operations (`sectorch.supported_ops()`), in evaluation mode, on the CPU
            or a CUDA device, where the session then computes as well; or what torch.export.export made of one.
        scheme: the number format, the range, and which protocols compute (`sectorch.Scheme`), or the network, "lan" or
            "wan", which stands for `Scheme(network=...)`; exact ReLU, fewest bytes
            and checked ranges unless named. Where it names no format, that is 20 fraction bits and activations below
            4096; or 16 to 19 bits, as many as the weights allow, from the first call on (`explain` says which, and
            why). All parties learn it.
        session: where it runs; the process's default session on the model's device unless named, with all parties in
            this process.
        party: the answering party of the session that owns the model; the first unless named.
        chunk: rows per piece of a batch; chosen by memory unless named.
        calibrate: a batch of typical inputs, as the model is called with it: a tensor, `Inputs(...)` of several, or the
            dict or list that is its only argument. The fraction bits (at most the scheme's) and, unless it is named,
            the range are chosen from the values it gives; see `sectorch.nn.secure`. The owner's check of precision
            looks at its first rows as well.
        strict: whether a model that loses digits in fixed point is refused on the first call of a form, by the owner's
            own check (`PrecisionError`), in place of a warning; the check runs the whole reference then.
        backend: "shares", or "ckks": Q encrypts under `keys` (`sectorch.ckks.keygen`), A evaluates the model in plain
            on ciphertexts, one message each way; for FHE-friendly modules (`sectorch.nn.fhe_friendly`).

    Raises:
        TrainingModeError: the model is not in evaluation mode.
        NonFiniteError, FixedPointRangeError: weights that do not fit; on a call, whose sums could leave the ring.
        ArgumentError: a choice that does not exist, or choices that do not go together; a party that is none of the
            session's answering ones. The model is never changed.

    Warns:
        LeakyProtocolWarning: for Scheme(relu="privhfl").
        DeprecationWarning: for fields of the scheme as keywords.
        PrecisionWarning: on the first call of a form, for weights that lose digits in fixed point.
    """
    model = module_or_exported(model)
    if backend not in ("shares", "ckks"):
        raise ArgumentError(f"backend must be 'shares' or 'ckks', got {backend!r}")
    if backend == "ckks":
        refuse_unused({"scheme": scheme is not None, "chunk": chunk is not None, "calibrate": calibrate is not None})
        refuse_unused({"strict": strict})
        from ..ckks import CKKSModule  # SEAL, which shares do without

        return CKKSModule(model, keys, session=session, party=party)
    scheme = scheme_of("secure", scheme)
    session = session or default_session(device_of(model))
    party = session.answering_party(party)
    if keys is not None:
        raise ArgumentError("keys: of backend='ckks', and not used by shares")
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated_scheme(model, calibrate, scheme)
    if chunk is not None and chunk < 1:
        raise ArgumentError(f"chunk must be at least one row, got {chunk}")
    typical = None if calibrate is None else Inputs.of(calibrate)
    secured = SecureModule(model, session, party, scheme, chunk, strict=strict, typical=typical)
    if scheme.relu == "privhfl":
        warnings.warn(
            "relu='privhfl' shows the querying party the sign and the size of every activation (and, asked the same "
            "thing often enough, its value); relu='exact' shows nothing and sends fewer bytes",
            LeakyProtocolWarning,
            stacklevel=3,
        )
    return secured


@scheme_fields
def reference(
    model: nn.Module | torch.export.ExportedProgram,
    scheme: Scheme | Literal["lan", "wan"] | None = None,
    *,
    calibrate: torch.Tensor | Inputs | Mapping[str, Any] | Sequence[Any] | None = None,
    chunk: int | None = None,
) -> SecureModule:
    """The public fixed-point function that `secure(model)` computes, as a module: no parties, shares or randomness.

    Its results equal those of a secure run bit for bit: in one process or three, with network "lan" or "wan", prepared
    or not, in any batch and any piece of it. So "Q learns the result and nothing else" means that Q learns
    `reference(model)(x)`. It costs little more than the products of whole numbers, and protects nothing.

    Args:
        model: as in `secure`.
        scheme, calibrate: as in `secure`; `secure(...).scheme` is a secure module's.
        chunk: rows a piece of a batch; chosen by memory unless named.

    Smooth functions (series of a masked opening: `mpc/series.py`) are equal but for about one value in
    2^28 (with 20 fraction bits), which that module derives. Values beyond the range may differ. With relu="privhfl" the
    results are the same, and the secure run leaks.

    Raises:
        ArgumentError: no Scheme. SectorchError: what `secure` raises.
    """
    model = module_or_exported(model)
    scheme = scheme_of("reference", scheme)
    if calibrate is not None:
        check_model(model, device_of(model))
        scheme = calibrated_scheme(model, calibrate, scheme)
    session = Session(reference=True, device=device_of(model))
    return SecureModule(model, session, session.answering[0], scheme, chunk)


def program(model: nn.Module, x: torch.Tensor | Inputs) -> Program:
    """The program that `secure` runs for inputs of x's shape and type; x's content is not read.

    The program is traced on shapes, so it names weights and queries and holds none of them.
    `program(model, x).party("S").code` is the Python that S runs, `messages` lists all messages, `draw()` gives a
    picture, and parties compare `digest` to be sure that they run the same program.

    Args:
        model: an ordinary module (with the default number format), or what `secure` made of it.
        x: a tensor, or a meta tensor, or `Inputs(...)` of them.

    Raises:
        DtypeError: x is no tensor.
        ArgumentError: the module runs operation by operation, and may do something else in each call.
        SectorchError: what `secure` refuses, with layer and line.
    """
    if not isinstance(x, (torch.Tensor, Inputs)):
        raise DtypeError(f"program() takes a torch tensor, got {type(x).__name__}")
    return (model if isinstance(model, SecureModule) else secure(model)).choreography(x)
