"""Operators of aten without an own row: a function of SharedTensors, or torch's composition of other operators.

A forward operator mostly has the name of a torch function that SharedTensors compute. A backward operator is mostly a
formula of other operators that torch knows (`torch._decomp`); these are looked up in the table of gradients again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, SectorchError, UnsupportedOpError
from ..tensor.table import COMPOSED, SHARES, Context, as_sectorch_error, positional, rename_keywords, row_of
from .autograd_values import Cell
from .elementwise import content
from .operations import GRADIENTS
from .tensor import FUNCTIONS, REFUSED, REVEALED, WITHOUT_ROW, DifferentiableTensor

PLACES = ((torch, ""), (F, ""), (torch.linalg, "linalg_"), (torch.special, "special_"), (torch.Tensor, ""))
"""Modules that may have a torch function with the name of an operator, and the prefix of the operator's name."""

NAMES: dict[str, Any] = {
    "_adaptive_avg_pool2d": F.adaptive_avg_pool2d,
    "_adaptive_avg_pool3d": F.adaptive_avg_pool3d,
    "_unsafe_masked_index": None,
}
"""Operators whose function has another name, or (None) that have no function although a name is the same."""


REDUCTIONS = ("none", "mean", "sum")
"""The names that functions have for the numbers of operators."""


@cache
def operation_by_name(func: Any) -> Callable | None:
    """The torch function with an operator's name, if SharedTensors compute it and it takes the operator's arguments."""
    name = func._schema.name.split("::")[1]
    if not func._schema.name.startswith("aten::") or func._schema.is_mutable or "backward" in name:
        return None
    if name in NAMES:
        return NAMES[name]
    for module, prefix in PLACES:
        found = getattr(module, name[len(prefix) :], None) if name.startswith(prefix) else None
        if found is not None and row_of(found) is not None and _named(func, found) is not None:
            return found
    return None


def _named(func: Any, function: Callable) -> tuple[str, ...] | None:
    """The names of an operator's arguments, if the function has them too; a builtin takes them by position."""
    names = tuple(argument.name for argument in func._schema.arguments)
    if not isinstance(function, FunctionType):
        return names
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
        return None
    known = tuple(parameters)
    if "_overload" in function.__qualname__ or len(known) < len(names):  # of several functions by a flag
        return None
    same = all(n in known or i == 0 for i, n in enumerate(names))
    return (known[0], *names[1:]) if same else None


def _row_of(func: Any, function: Callable) -> Callable:
    """A row that computes an operator by a function of SharedTensors."""
    names = _named(func, function) if isinstance(function, FunctionType) else None

    def handler(context: Context, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(content, (args, kwargs))
        if names is not None:
            args, kwargs = (), dict(zip(names, args, strict=False)) | kwargs
            if "reduction" in kwargs:
                kwargs["reduction"] = REDUCTIONS[kwargs["reduction"]]
        result = function(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    return handler


def without_row(func: Any) -> Callable | None:
    """Registers a row for an operator whose function SharedTensors have, and gives None; else its composition of other
    operators, or None."""
    function = operation_by_name(func)
    if function is not None:
        name = SHARES.row_of[function].name
        is_view = name in GRADIENTS.rows and GRADIENTS.rows[name].view  # the function computes a copy
        GRADIENTS.implements(f"{name}_copy" if is_view else name, func)(_row_of(func, function))
        return None
    if torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if func in decomposition_table:
        return decomposition_table[func]
    return func.decompose if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) else None


WITHOUT_ROW.append(without_row)


# Rows of SharedTensors' table that have no gradient on shares, with the way out; all others have one, or need none.
# `tests/training/test_training_table.py` checks this for every row.


_COMPLEX = "complex results are not followed; compute with a public matrix of sines and cosines, or without a gradient"

NO_GRADIENT = {
    **dict.fromkeys(
        ("chebyshev_polynomial_t", "chebyshev_polynomial_u"), "torch has none either; write P, Q = 2 * x * P - Q, P"
    ),
    "cholesky": "torch.linalg.inv and torch.linalg.slogdet have one",
    "embedding_bag": "sum F.embedding over the bag",
    "fill_diagonal": "x.masked_fill(torch.eye(n, dtype=torch.bool), value) has one",
    "gaussian_nll_loss": "write 0.5 * (torch.log(v) + (x - y) ** 2 / v)",
    "i0e": "its derivative is made of torch.special.i1e, which is not supported; keep it out of what is trained",
    "logdet": "take torch.linalg.slogdet(x).logabsdet",
    "rrelu": "F.leaky_relu has one",
    "max_unpool2d": "torch.zeros(n, c, h * w).scatter(2, indices.flatten(2), x.flatten(2)) has one",
    "setitem": "torch.where, torch.cat and torch.index_put write out of place",
    "sinc": "divide torch.sin by its argument, away from zero",
    **dict.fromkeys(
        ("adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices"), "call it without return_indices"
    ),
    **dict.fromkeys(
        ("fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2", "irfftn", "rfft",
         "rfft2", "rfftn", "stft", "istft", "complex", "view_as_complex", "view_as_real", "imag", "polar"),
        _COMPLEX,
    ),
}  # fmt: skip
"""For each such row, the way out."""

NOTHING_TO_FOLLOW = frozenset((
    "all", "any", "argmax", "argmin", "argsort", "bitwise_left_shift", "bitwise_right_shift", "bucketize",
    "constant_like", "count_nonzero", "eq",
    "floor_divide", "ge", "gt", "heaviside", "isclose", "isfinite", "isin", "le", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "ne", "one_hot", "requires_grad_", "searchsorted", "signbit",
))  # fmt: skip
"""Rows whose results are not differentiable, also in torch."""

for _name, _text in NO_GRADIENT.items():
    for _key in (*SHARES.rows[_name].keys, *SHARES.rows[_name].in_place):
        REFUSED[_key] = _text

REFUSED |= {
    F.multilabel_margin_loss: "F.multi_margin_loss and F.multilabel_soft_margin_loss have one",
    torch.matrix_exp: 'of parametrizations.orthogonal give orthogonal_map="cayley"',
    torch.linalg.matrix_exp: 'of parametrizations.orthogonal give orthogonal_map="cayley"',
}


# torch's optimisers on shared models.


REFUSED_OPTIMISERS = {
    "LBFGS": "LBFGS chooses its steps by numbers that it looks at, which are secret on shares; take SGD or Adam",
    "Adafactor": "Adafactor chooses its steps by numbers that it looks at, which are secret on shares; take Adam",
    "Muon": "Muon rounds to bfloat16, which shares have not; take SGD with momentum, or AdamW",
    "SparseAdam": "SparseAdam takes sparse gradients, which shares have not; take Adam",
}
"""torch's optimisers that cannot step on shares, and the way out."""


def _check_optimiser(optimiser: Optimizer, *_: Any) -> None:
    """Called before each step: refuses an optimiser that cannot step on shares, and switches `foreach` and `fused` off.

    An optimiser skips parameters without a gradient, so a step with revealed parameters would silently change nothing.
    A revealed value that is trained in plain requires a gradient, and is not refused.

    Raises:
        ArgumentError: a parameter is the revealed value of a shared one.
        UnsupportedOpError: the optimiser reads numbers, or needs an operation that shares do not have.
    """
    for group in optimiser.param_groups:
        for p in group["params"]:
            if p in REVEALED and not p.requires_grad:
                raise ArgumentError(
                    f"the optimiser has a revealed parameter of shape {tuple(p.shape)}, to which no gradient comes; "
                    f"give it the shared model's: {type(optimiser).__name__}(model.parameters(), ...)"
                )
        if any(isinstance(p, DifferentiableTensor) for p in group["params"]):
            for kind in type(optimiser).__mro__:
                if kind.__name__ in REFUSED_OPTIMISERS and kind.__module__.startswith("torch.optim"):
                    raise UnsupportedOpError(REFUSED_OPTIMISERS[kind.__name__])
            for option in ("capturable", "differentiable"):
                if group.get(option):
                    raise UnsupportedOpError(f"{option}=True is not supported on shares; leave {option} out")
            group.update({name: False for name in ("foreach", "fused") if group.get(name) is not None})


register_optimizer_step_pre_hook(_check_optimiser)


# The start of a backward pass. Gradients that a user gives get the bits and the limit of gradients.


BACKWARD: ContextVar[bool] = ContextVar("whether a backward pass over shares runs", default=False)

_engine_run_backward = torch.autograd._engine_run_backward  # pyright: ignore[reportPrivateImportUsage]  no other hook


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    """torch's backward pass; what a checkpoint computes again in it takes the same way as in the forward pass."""
    if not BACKWARD.get():
        return _engine_run_backward(*args, **kwargs)
    with torch._C._EnableTorchFunction():
        return _engine_run_backward(*args, **kwargs)


torch.autograd._engine_run_backward = _run_backward  # pyright: ignore[reportPrivateImportUsage]


def _gradient(given: Any, like: DifferentiableTensor) -> Any:
    """A shared tensor as a gradient, and a public one as shares. No message."""
    if isinstance(given, DifferentiableTensor):
        return DifferentiableTensor(Cell(given.cell.content, True, pool=given.cell.pool))
    if not isinstance(given, torch.Tensor):
        return given
    content: Any = like.cell.content
    return DifferentiableTensor(Cell(content.reshape(-1)[:0].sum() + given, True))


def _backward_from(func: Callable, place: int, name: str) -> Callable:
    """A function of torch's that starts a backward pass at its first argument; its gradients have this position and
    name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        like = next((v for v in pytree.tree_leaves(args[0]) if isinstance(v, DifferentiableTensor)), None)
        if like is not None:
            lifted = lambda v: pytree.tree_map(lambda g: _gradient(g, like), v)
            args = tuple(lifted(v) if i == place else v for i, v in enumerate(args))
            kwargs = {k: lifted(v) if k == name else v for k, v in kwargs.items()}
        token = BACKWARD.set(like is not None)
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        except SectorchError:
            raise
        except Exception as error:
            raise as_sectorch_error(func, error) from None
        finally:
            BACKWARD.reset(token)

    return run


for _func, _place, _start_name in (
    (torch.Tensor.backward, 1, "gradient"),
    (torch.autograd.backward, 1, "grad_tensors"),
    (torch.autograd.grad, 2, "grad_outputs"),
):
    FUNCTIONS[_func] = _backward_from(_func, _place, _start_name)


# Functions whose handlers for SharedTensors use torch functions alone: with gradients they are the same composition,
# and each of these functions has a row. A recurrent layer becomes its steps, and attention its products and its
# softmax.


ROWS = (
    "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention", "multi_head_attention",
    "conv3d", "conv_transpose3d", "max_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "bilinear", "cdist", "pdist", "multi_margin_loss", "det", "slogdet", "logcumsumexp", "xlog1py",
    "quantile", "cosine_embedding_loss",
)  # fmt: skip
"""Rows of SharedTensors' table whose handlers do not use the context that they are given."""


def _composed(function: Callable, handler: Callable, *args: Any, **kwargs: Any) -> Any:
    if function in COMPOSED and (made := COMPOSED[function](*args, **kwargs)) is not NotImplemented:
        return made
    args, kwargs = positional(function, handler, args, kwargs)
    return handler(None, *args, **rename_keywords(function, handler, len(args), kwargs))


for _composite_name in ROWS:
    for _composite_key in SHARES.rows[_composite_name].keys:
        FUNCTIONS.setdefault(_composite_key, partial(_composed, _composite_key, SHARES.handler[_composite_key]))
for _composite_key, _composition in COMPOSED.items():
    FUNCTIONS.setdefault(_composite_key, _composition)


def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    """A^-1 B, or B A^-1, by the inverse, which has a gradient."""
    inverse = torch.linalg.inv(A)
    vectors = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    if vectors and left:
        return (inverse @ B.unsqueeze(-1)).squeeze(-1)
    return inverse @ B if left else B @ inverse


FUNCTIONS[torch.linalg.solve] = solve
