"""Compiled loops: how numba compiles them, how intrinsics write vectors of words, and how loops use torch's threads.

numba keeps a compiled loop on the disk beside its module, or in the user's cache folder (or `NUMBA_CACHE_DIR`) where
the module's folder cannot be written. Loops that were compiled ahead into the first two are read from there where they
cannot be written any more, as in an image (`sectorch warm --into`). numba compiles a loop again for another kind of
processor, and at each start where nothing can be written. A compiled loop releases the interpreter's lock.
"""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import config, extending, njit, types
from numba.core import cgutils
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

_compile_and_cache: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, cache=True, error_model="numpy")
_compile: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, error_model="numpy")
inlined: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, inline="always", error_model="numpy")


@lru_cache(1)
def warm() -> None:
    """Let numba load its types and functions now, once; otherwise the first call of a loop waits for that."""
    with global_compiler_lock:  # numba reads them from a generator, which two threads may not use at once
        contexts: tuple[Any, ...] = cpu_target.typing_context, cpu_target.target_context
        for context in contexts:
            context.refresh()


def _in_folder(locator: Any) -> Any:
    """A numba locator of compiled loops that takes a folder as it is; the original one wants to write into it."""

    def ensure(self: Any) -> None:
        if not os.path.isdir(self.get_cache_path()):
            raise FileNotFoundError(self.get_cache_path())

    return type(f"{locator.__name__}AsIs", (locator,), {"ensure_cache_path": ensure})


class _FoldersAsTheyAre(CompileResultCacheImpl):
    _locator_classes = [_in_folder(locator) for locator in CompileResultCacheImpl._locator_classes[:2]]


class _LoopsOfAnImage(FunctionCache):
    """Compiled loops in a folder that cannot be written."""

    _impl_class = _FoldersAsTheyAre

    @property
    def found(self) -> bool:
        index = os.path.join(self.cache_path, self._impl.filename_base + ".nbi")
        return os.path.exists(index) and not os.access(self.cache_path, os.W_OK)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Nothing is kept."""


def compiled(loop: Callable) -> Callable[..., Any]:
    """A decorator: the loop becomes machine code when it is first called."""
    with suppress(RuntimeError):  # neither folder exists
        kept = _LoopsOfAnImage(loop)
        if kept.found:
            ready = _compile(loop)
            ready._cache = kept  # type: ignore[attr-defined]
            return ready
    try:
        return _compile_and_cache(loop)
    except RuntimeError:  # no folder that can be written, as on a read-only root file system
        return _compile(loop)


def intrinsic(define: Callable) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: compiled loops call it without the context that its definition takes."""
    return extending.intrinsic(define)


@intrinsic
def borrow_array(context, x):
    """A view of a loop's argument without a reference count; the loop's caller keeps the array alive.

    To count the references of a slice takes as long as to combine some vectors.
    """

    def generate(context, builder, signature, values):
        view = cgutils.create_struct_proxy(signature.return_type)(context, builder, value=values[0])
        view.meminfo, view.parent = (cgutils.get_null_value(v.type) for v in (view.meminfo, view.parent))
        return view._getvalue()

    return x(x), generate


# What intrinsics are written with. A line is a vector of eight words, as long as a line of the cache.


LINE_WORDS = 8
VOID, BYTE, INDEX, WORD = ir.VoidType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
LINE, LINE_BYTES = ir.VectorType(WORD, LINE_WORDS), ir.VectorType(BYTE, 8 * LINE_WORDS)


def has_bit_vectors() -> bool:
    """Whether the processor multiplies polynomials and matrices of bits in vectors, and loops are compiled for it.

    These are AVX-512 with VPCLMULQDQ, GFNI and VBMI. `NUMBA_CPU_NAME` names another processor to compile for.
    """
    features = binding.get_host_cpu_features()
    needed = ("pclmul", "avx512f", "avx512bw", "avx512vbmi", "vpclmulqdq", "gfni")
    return getattr(config, "CPU_NAME", None) is None and all(features.get(name, False) for name in needed)


def instruction(write: Callable) -> Callable[..., Any]:
    """A decorator: the intrinsic whose code `write(builder, ...)` writes, of numbers, most of which are addresses."""

    def define(context, *numbers):
        def generate(context, builder, signature, values):
            write(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.intp] * len(numbers)), generate

    vars(define).update(__signature__=inspect.signature(write), __doc__=write.__doc__)
    return intrinsic(define)


def word(n: int) -> ir.Constant:
    return ir.Constant(WORD, n)


def line_of(n: int) -> ir.Constant:
    """A line that has a word eight times."""
    return ir.Constant(LINE, [n] * LINE_WORDS)


def load(builder: Any, address: Any, kind: ir.Type = LINE, align: int = 8) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 8) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def offset(builder: Any, address: Any, stride: Any, count: int) -> Any:
    """The address `count` strides after another; a stride is a number or a value, in bytes."""
    return builder.add(address, word(stride * count) if isinstance(stride, int) else builder.mul(stride, word(count)))


def shuffle(builder: Any, x: Any, y: Any, places: Sequence[int]) -> Any:
    """The elements of two vectors, counted from x on, at these places."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INDEX, len(places)), places))


def broadcast(builder: Any, value: Any) -> Any:
    """A word as a line that has it eight times."""
    first = builder.insert_element(ir.Constant(LINE, ir.Undefined), value, INDEX(0))
    return shuffle(builder, first, first, [0] * LINE_WORDS)


def call(builder: Any, name: str, result: ir.Type, *arguments: Any) -> Any:
    """A function of LLVM's, such as one instruction of the processor."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def counted_loop(
    builder: Any, count: Any, first: Sequence[Any], body: Callable[[list], Sequence[Any]]
) -> Sequence[Any]:
    """Write a loop of `count` steps, one at least, whose code begins at a line of the cache.

    Args:
        first: the values of the first step. body: writes one step: from its values those of the next step.

    Returns:
        The values after the last step.
    """
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, values = builder.phi(count.type), [builder.phi(value.type) for value in first]
    results = body(values)
    following = builder.add(number, ir.Constant(count.type, 1))
    moving = (number, ir.Constant(count.type, 0), following), *zip(values, first, results, strict=True)
    for value, initial, later in moving:
        value.add_incoming(initial, before)
        value.add_incoming(later, loop)
    branch = builder.cbranch(builder.icmp_unsigned("<", following, count), loop, after)
    aligned = builder.module.add_metadata([ir.MetaDataString(builder.module, "llvm.loop.align"), INDEX(64)])
    branch.set_metadata("llvm.loop", _loop_metadata(builder.module, aligned))
    builder.position_at_end(after)
    return results


def _loop_metadata(module: Any, *properties: Any) -> Any:
    """The metadata of one loop: LLVM takes a node whose first operand is the node itself."""
    node = module.add_metadata([ir.MetaDataString(module, f"loop {len(module.metadata)}"), *properties])
    node.operands = (node, *properties)
    return node


# Loops on torch's tensors and threads.


def run_in_threads(count: int, kernel: Callable, *arguments: Any) -> None:
    """kernel(*arguments, low, high) on all of 0 .. count, spread over as many threads as torch uses."""
    threads = min(torch.get_num_threads(), count)
    if threads < 2:
        kernel(*arguments, 0, count)
        return
    pieces, number = min(count, 2 * threads), itertools.count()

    def run() -> None:
        while (i := next(number)) < pieces:
            kernel(*arguments, count * i // pieces, count * (i + 1) // pieces)

    helpers = [_pool(threads, os.getpid()).submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:  # after this, no thread writes into the arrays
        for helper in helpers:
            if not helper.cancel():  # it has begun
                helper.result()


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; after a fork the parent's are gone."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sectorch-loops")


_WORDS = 1 << 11
"""A loop over at least so many words of packed bits is spread over threads."""


def run_on_words(count: int, kernel: Callable, *arguments: Any) -> None:
    """kernel(*arguments, low, high) on the words 0 .. count, in whole lines of the cache."""
    if count < _WORDS or torch.get_num_threads() < 2:
        kernel(*arguments, 0, count)
        return

    def run(low: int, high: int) -> None:
        kernel(*arguments, 64 * low, min(count, 64 * high))

    run_in_threads(-(-count // 64), run)


def array(x: torch.Tensor) -> np.ndarray:
    """A tensor's elements, row by row."""
    return (x if x.is_contiguous() else x.contiguous()).numpy()


@compiled
def aligned_words(count):
    """Memory of [count, 8] words that begins at a line of the cache: a vector across two lines takes twice the time."""
    words = np.empty((count + 1) * 8, np.uint64)
    first = (-words.ctypes.data % 64) // 8
    return words[first : first + count * 8].reshape(count, 8)


@compiled
def aligned_zeros(count):
    """`aligned_words`, set to zero."""
    words = aligned_words(count)
    words[:] = 0
    return words
