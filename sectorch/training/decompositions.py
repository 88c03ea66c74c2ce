"""Operators of aten without an own row: a function of SharedTensors, or torch's composition of other operators.

A forward operator mostly has the name of a torch function that SharedTensors compute. A backward operator is mostly a
formula of other operators that torch knows (`torch._decomp`); these are looked up in the table of gradients again.
"""

from __future__ import annotations

import inspect
import math
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
from ..ops.losses import variances
from ..tensor.table import COMPOSED, SHARES, Context, as_sectorch_error, positional, rename_keywords, row_of
from .autograd_values import Cell
from .elementwise import content
from .operations import GRADIENTS
from .tensor import FUNCTIONS, REFUSED, REPLACED, REVEALED, WITHOUT_ROW, DifferentiableTensor

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
    "fill_diagonal": "x.masked_fill(torch.eye(n, dtype=torch.bool), value) has one",
    "i0e": "its derivative is made of torch.special.i1e, which is not supported; keep it out of what is trained",
    "setitem": "torch.where, torch.cat and torch.index_put write out of place",
    **dict.fromkeys(
        ("adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices"), "call it without return_indices"
    ),
    **dict.fromkeys(
        ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "ihfft", "rfft", "rfft2", "rfftn", "stft", "istft",
         "complex", "view_as_complex", "view_as_real", "imag", "polar"),
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
            if p in REPLACED and p.grad is None:
                raise ArgumentError(
                    f"the optimiser has a plain parameter of shape {tuple(p.shape)} of a model that is shared now, to "
                    f"which no gradient comes; make it after sectorch.shared(model)"
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
    "quantile", "cosine_embedding_loss", "embedding_bag",
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


# Functions of which torch has a kernel forward and backward, written as other functions.


def _composition(*functions: Any) -> Callable[[Callable], Callable]:
    """Declares a composition of these functions, which takes their arguments."""

    def register(made: Callable) -> Callable:
        FUNCTIONS.update(dict.fromkeys(functions, made))
        return made

    return register


def _reduced(loss: Any, reduction: str) -> Any:
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@_composition(F.gaussian_nll_loss)
def gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool = False, eps: float = 1e-6,
                      reduction: str = "mean") -> Any:  # fmt: skip
    """Half of log v + (x - y)^2 / v. As in torch the gradient passes the lower limit of v; of a negative v the
    logarithm leaves its range."""
    var = variances(input, target, var)
    if isinstance(var, DifferentiableTensor):
        with torch.no_grad():
            change = var.clamp_min(max(eps, 2.0**-16)) + var.clamp_max(0.0) - var
        var = var + change
    else:
        var = torch.as_tensor(var, dtype=input.dtype)
        if bool((var < 0).any()):
            raise ArgumentError("gaussian_nll_loss: a variance is not negative, and one is")
        var = var.clamp(min=eps)
    difference = input - target
    loss = (torch.log(var) + difference * (difference / var)) * 0.5
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


@_composition(F.multilabel_margin_loss)
def multilabel_margin_loss(input: Any, target: torch.Tensor, size_average: Any = None, reduce: Any = None,
                           reduction: str = "mean") -> Any:  # fmt: skip
    """Public targets: of each row the classes before the first -1, each of which shall exceed all others by one."""
    if isinstance(target, DifferentiableTensor) or size_average is not None or reduce is not None:
        raise UnsupportedOpError("multilabel_margin_loss takes public targets and reduction=; give these")
    x, y = (input, target) if input.dim() == 2 else (input.unsqueeze(0), target.unsqueeze(0))
    named = (y >= 0).cumprod(-1)
    times = torch.zeros(x.shape).scatter_add(-1, y.clamp_min(0), named.to(torch.float32))
    pairs = times.unsqueeze(-1) * (times == 0).unsqueeze(-2)
    loss = (torch.relu(1 - x.unsqueeze(-1) + x.unsqueeze(-2)) * pairs).sum((-2, -1)) / x.shape[-1]
    return _reduced(loss if input.dim() == 2 else loss[0], reduction)


@_composition(F.rrelu, torch.rrelu)
def rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    """In evaluation mode, in which the slope is the middle of its range."""
    if training:
        raise UnsupportedOpError("rrelu in training mode draws its slopes; call model.eval() first, or F.leaky_relu")
    return F.leaky_relu(input, (lower + upper) / 2, inplace)


@_composition(torch.sinc, torch.Tensor.sinc, torch.special.sinc)
def sinc(input: Any) -> Any:
    """A polynomial of pi x up to 1/4, and the quotient beyond."""
    near = (input.detach().abs() < 0.25).to(input.dtype)
    x = (input * near) ** 2
    value = x * 0
    for k in range(4, 0, -1):
        value = (value + (-1) ** k * math.pi ** (2 * k) / math.factorial(2 * k + 1)) * x
    far = input * (1 - near) + near * 0.25
    return (value + 1) * near + torch.sin(far * math.pi) / (far * math.pi) * (1 - near)


def _unpool(dims: int) -> Callable:
    def run(input: Any, indices: torch.Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
            output_size: Any = None) -> Any:  # fmt: skip
        sizes = lambda v: [v] * dims if isinstance(v, int) else list(v)
        kernel, padding = sizes(kernel_size), sizes(padding)
        stride = kernel if stride is None or stride == [] else sizes(stride)
        shape = F._unpool_output_size(  # pyright: ignore[reportAttributeAccessIssue]
            torch.empty(input.shape, device="meta"), kernel, stride, padding, output_size
        )
        empty = torch.zeros((*input.shape[:-dims], math.prod(shape)), dtype=input.dtype)
        return torch.scatter(empty, -1, indices.flatten(-dims), input.flatten(-dims)).unflatten(-1, tuple(shape))

    return run


for _dims, _unpool_function in enumerate((F.max_unpool1d, F.max_unpool2d, F.max_unpool3d), 1):
    FUNCTIONS[_unpool_function] = _unpool(_dims)


@_composition(torch.segment_reduce)
def segment_reduce(data: Any, reduce: str, *, lengths: Any = None, indices: Any = None, offsets: Any = None,
                   axis: int = 0, unsafe: bool = False, initial: float | None = None) -> Any:  # fmt: skip
    """Public lengths or offsets of segments of rows; `initial` is one more value of each, and that of an empty one."""
    if lengths is None and offsets is not None:
        lengths = offsets.diff(dim=-1)
    empty = {"sum": 0.0, "prod": 1.0}.get(reduce) if initial is None else initial
    if lengths is None or lengths.dim() != 1 or axis or (empty is None and bool((lengths < 1).any())):
        raise UnsupportedOpError(
            "segment_reduce takes lengths or offsets of segments of rows, and an initial value for empty ones; split "
            "other dimensions by torch.split"
        )

    def reduced(x: Any) -> Any:
        if not len(x):
            return x.sum(0) + empty
        if reduce in ("sum", "mean"):
            return (x.sum(0) + (initial or 0.0)) / (len(x) if reduce == "mean" else 1)
        if reduce == "prod":
            return x.prod(0) * (1.0 if initial is None else initial)
        found = x.amax(0) if reduce == "max" else x.amin(0)
        return found if initial is None else found.clamp(**{"min" if reduce == "max" else "max": initial})

    return torch.stack([reduced(part) for part in torch.split(data, lengths.tolist())])


@_composition(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
              torch.ops.aten._scaled_dot_product_flash_attention_for_cpu)  # fmt: skip
def flash_attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
                    attn_mask: Any = None, scale: float | None = None) -> tuple[Any, Any]:  # fmt: skip
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    found = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    return found, torch.logsumexp(scores.detach(), -1)


# Linear algebra.


@_composition(torch.logdet, torch.Tensor.logdet)
def logdet(input: Any) -> Any:
    """Of a determinant above zero; else the sign's logarithm leaves its range."""
    sign, size = torch.linalg.slogdet(input)
    return size + torch.log(sign.detach()) * 0


@_composition(torch.linalg.cholesky, torch.cholesky, torch.Tensor.cholesky)
def cholesky(A: Any, upper: bool = False) -> Any:
    """Of the symmetric part, so that the gradient is symmetric as torch's; a pivot below zero leaves the range."""
    if not A.shape[-1]:
        raise UnsupportedOpError("a factorisation of a matrix without rows is not supported on shares; leave it out")
    rest, columns = (A + A.mT) / 2, []
    for k in range(A.shape[-1]):
        column = rest[..., :, 0] * torch.rsqrt(rest[..., 0, 0]).unsqueeze(-1)
        columns.append(F.pad(column, (k, 0)))
        tail = column[..., 1:]
        rest = rest[..., 1:, 1:] - tail.unsqueeze(-1) * tail.unsqueeze(-2)
    return torch.stack(columns, -2 if upper else -1)


def _none_failed(A: Any) -> torch.Tensor:
    """What tells of failures, which leave the range here."""
    return torch.zeros(A.shape[:-2], dtype=torch.int32)


@_composition(torch.linalg.cholesky_ex)
def cholesky_ex(A: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    return torch.return_types.linalg_cholesky_ex((cholesky(A, upper), _none_failed(A)))  # pyright: ignore[reportAttributeAccessIssue]


@_composition(torch.cholesky_inverse, torch.Tensor.cholesky_inverse)
def cholesky_inverse(L: Any, upper: bool = False) -> Any:
    """As in torch the other triangle is not read, and has a gradient as if it were."""
    L = L.mT if upper else L
    inverse = torch.linalg.inv(L + (L.tril() - L).detach())
    return inverse.mT @ inverse


@_composition(torch.linalg.solve_ex)
def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    return torch.return_types.linalg_solve_ex((solve(A, B, left=left), _none_failed(A)))  # pyright: ignore[reportAttributeAccessIssue]


@_composition(torch.linalg.tensorsolve)
def tensorsolve(A: Any, B: Any, dims: Any = None) -> Any:
    A = A if dims is None else A.movedim(tuple(dims), tuple(range(-len(dims), 0)))
    return solve(A.reshape(B.numel(), -1), B.flatten()).reshape(A.shape[B.dim() :])


@_composition(torch.lu_unpack)
def lu_unpack(LU_data: Any, LU_pivots: torch.Tensor, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """Public pivots."""
    rows, columns = LU_data.shape[-2:]
    least = min(rows, columns)
    P = torch.lu_unpack(torch.zeros(LU_data.shape), LU_pivots, False, unpack_pivots)[0]
    if not unpack_data:
        return torch.return_types.lu_unpack((P, torch.empty(0), torch.empty(0)))
    L, U = LU_data[..., :least].tril(-1) + torch.eye(rows, least), LU_data[..., :least, :].triu()
    return torch.return_types.lu_unpack((P, L, U))


@_composition(torch.special.erfcx)
def erfcx(input: Any) -> Any:
    """exp(x^2) erfc(x), from the logarithm of erfc."""
    return 2 * torch.exp(input**2 + torch.special.log_ndtr(-math.sqrt(2) * input))


class _LogNdtr(torch.autograd.Function):
    """log ndtr, whose derivative is exp(-x^2 / 2 - log ndtr(x)) / sqrt(2 pi)."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = torch.special.log_ndtr(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, y = ctx.saved_tensors
        return given[0] * torch.exp(-0.5 * x**2 - y - 0.5 * math.log(2 * math.pi))


@_composition(torch.special.log_ndtr)
def log_ndtr(input: Any) -> Any:
    if not isinstance(input, DifferentiableTensor) or not (torch.is_grad_enabled() and input.requires_grad):
        with torch._C.DisableTorchFunctionSubclass():
            return torch.special.log_ndtr(input)
    return _LogNdtr.apply(input)


@_composition(torch.linalg.lu_solve)
def lu_solve(LU: Any, pivots: torch.Tensor, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    """Public pivots: P L U X = B, or its transpose."""
    if not left:
        return lu_solve(LU, pivots, B.mT, adjoint=not adjoint).mT
    P, L, U = lu_unpack(LU, pivots)
    down, up = torch.linalg.solve_triangular, partial(torch.linalg.solve_triangular, upper=True)
    if adjoint:
        return P @ up(L.mT, down(U.mT, B, upper=False), unitriangular=True)
    return up(U, down(L, P.mT @ B, upper=False, unitriangular=True))


@_composition(torch.lu_solve, torch.Tensor.lu_solve)
def old_lu_solve(b: Any, LU_data: Any, LU_pivots: torch.Tensor) -> Any:
    return lu_solve(LU_data, LU_pivots, b)


def _reflected(A: Any, tau: Any, x: Any, transpose: bool = False) -> Any:
    """Q x, or Q^T x, for the product Q of the reflections I - tau v v^T, whose v are below the diagonal of A."""
    count = tau.shape[-1]
    for k in range(count) if transpose else range(count - 1, -1, -1):
        v = A[..., :, k : k + 1].tril(-k - 1) + torch.eye(A.shape[-2])[:, k : k + 1]
        x = x - tau[..., k, None, None] * v @ (v.mT @ x)
    return x


@_composition(torch.linalg.householder_product, torch.orgqr, torch.Tensor.orgqr)
def householder_product(A: Any, tau: Any) -> Any:
    return _reflected(A, tau, torch.eye(A.shape[-2], A.shape[-1]) + A * 0)


@_composition(torch.ormqr, torch.Tensor.ormqr)
def ormqr(input: Any, tau: Any, other: Any, left: bool = True, transpose: bool = False) -> Any:
    if left:
        return _reflected(input, tau, other, transpose)
    return _reflected(input, tau, other.mT, not transpose).mT


# Transforms of real spectra to real signals are products with public matrices.


def _spectrum_function(name: str, dims: int | None) -> Callable:
    """irfft, irfft2 and irfftn, and hfft and its like, whose angles have the other sign."""
    sign = 1 if name.startswith("i") else -1
    default = -1 if dims == 1 else (-2, -1) if dims == 2 else None

    def run(input: Any, s: Any = None, dim: Any = default, norm: str | None = None) -> Any:
        listed = lambda v: [v] if isinstance(v, int) else list(v)
        axes = listed(dim) if dim is not None else list(range(-input.dim() if s is None else -len(listed(s)), 0))
        sizes = [None if n == -1 else n for n in (listed(s) if s is not None else [-1] * len(axes))]
        whole, real, imaginary = 1, input, None
        for i, (axis, given) in enumerate(zip(axes, sizes, strict=True)):
            last = i == len(axes) - 1
            have = input.shape[axis]
            n = (2 * (have - 1) if last else have) if given is None else given
            used, whole = min(have, n // 2 + 1 if last else n), whole * n
            k, t = torch.arange(used), torch.arange(n)
            angle = (torch.outer(k, t) % n).double() * (2 * math.pi / n)
            weight = (2 - ((k == 0) | (2 * k == n)).double()).unsqueeze(-1) if last else 1.0
            cos, sin = (torch.cos(angle) * weight).float(), (sign * torch.sin(angle) * weight).float()
            along = lambda x, m, axis=axis, used=used: (x.movedim(axis, -1)[..., :used] @ m).movedim(-1, axis)
            first = along(real, cos) if imaginary is None else along(real, cos) - along(imaginary, sin)
            if not last:
                imaginary = along(real, sin) if imaginary is None else along(real, sin) + along(imaginary, cos)
            real = first
        scaled = {"ortho": whole**-0.5, "forward": 1.0 if sign == 1 else 1 / whole}
        scale = scaled.get(norm or "backward", 1 / whole if sign == 1 else 1.0)
        return real if scale == 1.0 else real * scale

    def one(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Any:
        return run(input, n, dim, norm)

    return one if dims == 1 else run


for _spectrum, _dims_of in (("irfft", 1), ("irfft2", 2), ("irfftn", None), ("hfft", 1), ("hfft2", 2), ("hfftn", None)):
    FUNCTIONS[getattr(torch.fft, _spectrum)] = _spectrum_function(_spectrum, _dims_of)
