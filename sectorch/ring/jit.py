"""How loops are compiled (numba, LLVM) and spread over torch's threads.

A compiled loop is kept on the disk beside its module, or in the user's cache folder (or `NUMBA_CACHE_DIR`) where that
cannot be written, and compiled again for another kind of processor; where nothing can be written, at each start. It
releases the interpreter's lock.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import extending, njit
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

_kept: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, cache=True, error_model="numpy")
_unkept: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, error_model="numpy")
inlined: Callable[[Callable], Callable[..., Any]] = njit(nogil=True, inline="always", error_model="numpy")


def warm() -> None:
    """Have numba load what it knows of types and functions, which else the first loop that is called does."""
    with global_compiler_lock:  # what is to be loaded comes from a generator, which no two threads may ask at once
        contexts: tuple[Any, ...] = cpu_target.typing_context, cpu_target.target_context
        for context in contexts:
            context.refresh()


def compiled(loop: Callable) -> Callable[..., Any]:
    """The loop as machine code, made when it is first called."""
    try:
        return _kept(loop)
    except RuntimeError:  # no folder that can be written, as on a read-only root file system
        return _unkept(loop)


def intrinsic(made: Callable) -> Callable[..., Any]:
    """`numba.extending.intrinsic`: compiled loops call it without the context that its definition takes."""
    return extending.intrinsic(made)


@intrinsic
def borrow_array(context, x):
    """An array that a loop was given, as a view whose holders are not counted: to count those of a slice takes as long
    as to combine some vectors. The loop's caller keeps the array alive."""

    def generate(context, builder, signature, values):
        view = cgutils.create_struct_proxy(signature.return_type)(context, builder, value=values[0])
        view.meminfo, view.parent = (cgutils.get_null_value(v.type) for v in (view.meminfo, view.parent))
        return view._getvalue()

    return x(x), generate


def counted_loop(
    builder: Any, count: Any, first: Sequence[Any], step: Callable[[list], Sequence[Any]]
) -> Sequence[Any]:
    """In an intrinsic: a loop of `count` steps, one at least. `step` takes some values, `first` at the beginning, and
    gives those of the next step; those after the last are given back. Its code begins at a line of the cache."""
    before, loop, after = builder.block, builder.append_basic_block(), builder.append_basic_block()
    builder.branch(loop)
    builder.position_at_end(loop)
    number, values = builder.phi(count.type), [builder.phi(value.type) for value in first]
    found = step(values)
    following = builder.add(number, ir.Constant(count.type, 1))
    moving = (number, ir.Constant(count.type, 0), following), *zip(values, first, found, strict=True)
    for value, begun, later in moving:
        value.add_incoming(begun, before)
        value.add_incoming(later, loop)
    again = builder.cbranch(builder.icmp_unsigned("<", following, count), loop, after)
    aligned = builder.module.add_metadata([ir.MetaDataString(builder.module, "llvm.loop.align"), ir.IntType(32)(64)])
    again.set_metadata("llvm.loop", _of_a_loop(builder.module, aligned))
    builder.position_at_end(after)
    return found


def _of_a_loop(module: Any, *said: Any) -> Any:
    """What is said of one loop: LLVM knows it by a node that names itself first."""
    node = module.add_metadata([ir.MetaDataString(module, f"loop {len(module.metadata)}"), *said])
    node.operands = (node, *said)
    return node


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

    others = [_pool(threads, os.getpid()).submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:  # nobody writes into these arrays any more once this is over
        for other in others:
            if not other.cancel():  # it has begun
                other.result()


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process; after a fork the parent's are gone."""
    return ThreadPoolExecutor(threads, thread_name_prefix="sectorch-loops")


@compiled
def aligned_words(count):
    """Room for [count, 8] words at the beginning of a line of the cache: a vector that crosses one takes twice the
    time."""
    found = np.empty((count + 1) * 8, np.uint64)
    first = (-found.ctypes.data % 64) // 8
    return found[first : first + count * 8].reshape(count, 8)


@compiled
def aligned_zeros(count):
    """`room`, with zeros in it."""
    found = aligned_words(count)
    found[:] = 0
    return found


@compiled
def times_vector(matrix, x, out, rows, low, high):
    """out[i] = sum_k matrix[i, k] x[k] mod 2^64, for rows low .. high, so many at a time."""
    for i in range(low * rows, min(high * rows, len(out))):
        total, row = np.int64(0), matrix[i]
        for k in range(len(x)):
            total += row[k] * x[k]
        out[i] = total


_WORDS = 1 << 11
"""Words from which on a loop over packed bits is spread over threads."""


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
