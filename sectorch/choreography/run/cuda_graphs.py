"""CUDA graphs, in their own file: the steps of a program are replayed with a few launches in place of thousands.

A step of a protocol is a few small kernels, and the processor takes longer to launch one than the device to run it. A
program has the same steps in every call, so the device's work can be recorded once. The first call of a program runs
step by step and fills all caches. The second one does too, and finds the steps that wait for the device or move data
between processor and device. The third call records the other steps, in pieces between those. Later calls replay the
pieces: inputs are copied to the memory of the recorded ones, and the processor draws a piece's random words while the
device computes the piece before.

Calls with an observer run step by step, since it sees every message. So does a program that cannot be recorded, and one
of more than `MOST` steps, since the second call takes several times as long.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import SectorchError
from ..ledger import observers
from ..net import Draw, Party, Runtime
from ..program.projection import ConstantValue, ProjectedStep, Projection, take
from ..program.trace import Slot, garbage_collection_paused

WORDS = 1 << 23
"""The most words that are drawn for a piece, but for those of its last step."""
STEPS = 4096
"""The most steps of a piece."""
MOST = 1 << 17
"""The most steps of a program that is recorded. BERT-base has 62,122."""
SHARE = 2
"""Recorded programs take at most one part in so many of the device's memory; the least recently used one is dropped."""
JOB = 1 << 20
"""The least bytes that a thread draws at a time."""
THREADS = 8
"""The most threads that draw words."""
_ALIGNED = 64  # words, as torch's own memory: the kernels that it chooses depend on it
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_FROM_PYTHON = torch.ops.aten.lift_fresh.default
_READS_CONTENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceWaits(TorchDispatchMode):
    """Finds whether the code inside waits for a device, or moves data to it or from it.

    Attributes:
        waits: the function that did, or an empty string. A wait that it misses makes the recording fail.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.waits = device, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = (args, result, *kwargs.values()) if kwargs else (args, result)
        if self._reads_content(func, args) or self._on_other_device(tensors):
            self.waits = func.name()
        return result

    def _reads_content(self, func: Any, args: tuple) -> bool:
        if func.overloadpacket in _INDEXED:
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return func is _FROM_PYTHON or not _READS_CONTENT.isdisjoint(func.tags)

    def _on_other_device(self, values: Iterable[Any]) -> bool:
        """Whether a tensor is on another device. torch's own tree functions would take longer than the steps."""
        for x in values:
            if isinstance(x, torch.Tensor):
                if x.device != self.device:
                    return True
            elif isinstance(x, (list, tuple)) and self._on_other_device(x):
                return True
        return False


class _Unrecordable(Exception):
    """A result or an operand of a step is no tensor on the device."""


@dataclass
class _Piece:
    """The steps between two that wait, or (without a graph) one step that waits."""

    lines: list[ProjectedStep] = field(default_factory=list)
    draws: list[tuple[Draw, slice]] = field(default_factory=list)
    waits: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    contents: dict[Slot, Any] = field(default_factory=dict)
    """The operands of a step that waits; `results` are the tensors that its results are copied to."""
    results: dict[Slot, torch.Tensor] = field(default_factory=dict)
    drawing: list[Future] = field(default_factory=list)

    @property
    def words(self) -> slice:
        return slice(self.draws[0][1].start, self.draws[-1][1].stop) if self.draws else slice(0, 0)


class _DrawnBefore:
    """A runtime that gives words of a call that were drawn before; a stream gives each word once."""

    def __init__(self, runtime: Runtime, there: Mapping[tuple[frozenset[Party], str, int], torch.Tensor], device):
        self._runtime, self._there, self._device = runtime, there, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        found = self._there.get((pair, label, draw))
        return self._runtime.draw(pair, label, call, draw, count) if found is None else found.to(self._device)


def _run_job(job: list[Callable[[], None]]) -> None:
    for work in job:
        work()


class CapturedGraph:
    """Some steps of a program with the values of one setup, and their graphs once they are recorded.

    Attributes:
        bytes: the device's memory that the graphs keep.
        refused: why the steps are not recorded; empty if they are or may be.
    """

    def __init__(self, lines: list[ProjectedStep], setup: Mapping[Slot, Any], device: torch.device, threads: Executor):
        self.lines, self.setup, self.device, self._threads = lines, setup, device, threads
        self.bytes = self.calls = 0
        self.refused = f"{len(lines)} steps" if len(lines) > MOST else ""
        self._waiting: dict[int, str] = {}
        self._pieces: list[_Piece] = []

    def take(self, runtime: Runtime, call: int, inputs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """As `projection.take` on all values; results have memory of their own."""
        there = all(isinstance(x, torch.Tensor) and x.device == self.device for x in inputs.values())
        if self.refused or not there:
            return take(self.lines, runtime, call, {**self.setup, **inputs})
        self.calls += 1
        if self._pieces:
            return self._replay(runtime, call, inputs)
        # The first call loads kernels and fills caches, the second is watched step by step, the third recorded.
        if self.calls > 2:
            return self._record(runtime, call, inputs)
        values = {**self.setup, **inputs}
        if self.calls == 1:
            return take(self.lines, runtime, call, values)
        for at, line in enumerate(self.lines):
            with DeviceWaits(self.device) as seen:
                take([line], runtime, call, values)
            if seen.waits and not isinstance(line.step, Draw):
                self._waiting[at] = seen.waits
        return values

    def _plan(self) -> tuple[list[_Piece], int]:
        """The pieces, and how many words they draw."""
        pieces, at = [_Piece()], 0
        for i, line in enumerate(self.lines):
            # A step that waits is a piece of its own; the others begin a new piece after it, or when one is full.
            waits, last = i in self._waiting, pieces[-1]
            begun = last.words.start if last.draws else at
            if waits or last.waits or at - begun > WORDS or len(last.lines) >= STEPS:
                pieces.append(last := _Piece(waits=waits))
            if isinstance(line.step, Draw):
                last.draws.append((line.step, slice(at, at + line.step.words)))
                at += -(-line.step.words // _ALIGNED) * _ALIGNED
            last.lines.append(line)
        return [piece for piece in pieces if piece.lines], at

    def _record(self, runtime: Runtime, call: int, inputs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Record the steps, and take them for this call."""
        pieces, words = self._plan()
        before = torch.cuda.memory_reserved(self.device)
        begun = False
        try:
            with garbage_collection_paused(), torch.inference_mode():
                self._host = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)
                self._words = torch.empty(words, dtype=torch.int64, device=self.device)
                begun = True
                self._inputs = {slot: x.clone() for slot, x in inputs.items()}
                self._copied, self._done = torch.cuda.Event(), torch.cuda.Event()
                values = {**self.setup, **self._inputs}
                pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
                with self._drawing(pieces, runtime, call):
                    for piece in pieces:
                        self._copy(piece)
                        if piece.waits:
                            self._wait(piece, runtime, call, values)
                        else:
                            self._capture(piece, runtime, call, values, pool, side)
                made = {slot for line in self.lines for _, slot in line.outputs}
                self._results = {slot: x for slot, x in values.items() if slot in made}
        except SectorchError:
            self._forget()
            raise
        except (_Unrecordable, RuntimeError) as error:  # torch raises RuntimeError for both: no graph, and full memory
            self.refused = f"{type(error).__name__}: {error}"
            # A stream gives each word once: what was drawn for the recording has to serve the call that is taken
            # instead.
            draws = [one for piece in pieces for one in piece.draws if begun]
            there = {(d.owners, d.name, d.number): self._host[at] for d, at in draws}
            self._forget()
            drawn = cast(Runtime, _DrawnBefore(runtime, there, self.device))
            return take(self.lines, drawn, call, {**self.setup, **inputs})
        except BaseException:
            self._forget()
            raise
        self._pieces = pieces
        self.bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        values = self._values_of(inputs)
        self._done.record()
        return values

    @contextmanager
    def _drawing(self, pieces: list[_Piece], runtime: Runtime, call: int) -> Iterator[None]:
        """Inside, other threads draw the words of all pieces, one piece after another; at the end all are drawn."""
        memory = self._host.numpy().data.cast("B") if len(self._host) else memoryview(b"")
        try:
            for piece in pieces:
                jobs, size = [[]], 0
                for draw, at in piece.draws:
                    place = memory[8 * at.start : 8 * at.stop]
                    jobs[-1].append(runtime.keys.filling(draw.owners, draw.name, call, draw.number, place))
                    size += len(place)
                    if size > JOB:
                        jobs.append([])
                        size = 0
                piece.drawing = [self._threads.submit(_run_job, job) for job in jobs if job]
            yield
        finally:
            wait([job for piece in pieces for job in piece.drawing])

    def _capture(self, piece: _Piece, runtime: Runtime, call: int, values: dict[Slot, Any], pool, side) -> None:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                ready = {id(draw): draw.of(self._words[at]) for draw, at in piece.draws}
                for line in piece.lines:
                    if (drawn := ready.get(id(line.step))) is None:
                        take([line], runtime, call, values)
                    else:
                        values |= {slot: drawn for _, slot in line.outputs}
            finally:
                with warnings.catch_warnings():  # of a graph without kernels: these steps make views
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
                    graph.capture_end()
        piece.graph = graph
        graph.replay()  # recording a kernel does not run it

    def _wait(self, piece: _Piece, runtime: Runtime, call: int, values: dict[Slot, Any]) -> None:
        """Take a step that waits, the first time."""
        (line,) = piece.lines
        piece.contents = {source: values[source] for source in line.sources if type(source) is not ConstantValue}
        take([line], runtime, call, values)
        for _, slot in line.outputs:
            if slot not in values:
                continue
            result = values[slot]
            if not isinstance(result, torch.Tensor) or result.device != self.device:
                raise _Unrecordable(f"{line.place}: {line.step} gives a {type(result).__name__}")
            values[slot] = piece.results[slot] = result.clone()

    def _copy(self, piece: _Piece) -> None:
        """Copy a piece's words to the device when they are drawn."""
        for job in piece.drawing:
            job.result()
        if piece.draws:
            self._words[piece.words].copy_(self._host[piece.words], non_blocking=True)
            self._copied.record()

    def _replay(self, runtime: Runtime, call: int, inputs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        self._copied.synchronize()  # the words of the call before are on the device, so their memory is free
        torch.cuda.current_stream(self.device).wait_event(self._done)
        try:
            with torch.inference_mode(), self._drawing(self._pieces, runtime, call):
                for slot, x in inputs.items():
                    self._inputs[slot].copy_(x)
                for piece in self._pieces:
                    self._copy(piece)
                    if piece.graph is not None:
                        piece.graph.replay()
                        continue
                    values = dict(piece.contents)
                    take(piece.lines, runtime, call, values)
                    for slot, there in piece.results.items():
                        there.copy_(values[slot])
            return self._values_of(inputs)
        finally:
            self._done.record()

    @torch.inference_mode()
    def _values_of(self, inputs: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """All values of the call: copies of the recorded results, and the inputs."""
        results = {slot: x.clone() if isinstance(x, torch.Tensor) else x for slot, x in self._results.items()}
        return {**self.setup, **inputs, **results}

    def _forget(self) -> None:
        """Drop the recording."""
        torch.cuda.synchronize(self.device)
        self._pieces, self._results, self._inputs = [], {}, {}
        self._host = self._words = torch.empty(0, dtype=torch.int64)


class Graphs:
    """The recorded programs of a device. One call at a time uses them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "sectorch draws")
        self._of: WeakKeyDictionary[Projection, dict[int, CapturedGraph]] = WeakKeyDictionary()

    def take(
        self, part: Projection, lines: list[ProjectedStep], runtime: Runtime, call: int, setup: Mapping[Slot, Any],
        inputs: Mapping[Slot, Any],
    ) -> dict[Slot, Any]:  # fmt: skip
        """Take steps of a party's part of a program; gives the values that later steps need."""
        if observers():
            return take(lines, runtime, call, {**setup, **inputs})
        with self._lock, torch.cuda.device(self._device):
            of = self._of.setdefault(part, {})
            recorded = of.get(id(lines))
            # A graph has the addresses of its setup's tensors, so another setup needs another graph.
            if recorded is None or recorded.setup is not setup:
                recorded = of[id(lines)] = CapturedGraph(lines, setup, self._device, self._threads)
            values = recorded.take(runtime, call, inputs)
            self._bound(part, lines)
            return values

    def _bound(self, part: Projection, lines: list[ProjectedStep]) -> None:
        """Drop the least recently used graphs while all of them take too much memory."""
        of = self._of.pop(part)  # moved to the end: the order of a dict is that of use
        of[id(lines)] = of.pop(id(lines))
        self._of[part] = of
        most = torch.cuda.get_device_properties(self._device).total_memory // SHARE
        while sum(one.bytes for of in self._of.values() for one in of.values()) > most:
            oldest = next(of for of in self._of.values() if any(one.bytes for one in of.values()))
            del oldest[next(key for key, one in oldest.items() if one.bytes)]
