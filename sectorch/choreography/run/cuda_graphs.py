"""The steps of a program on a CUDA device, replayed as CUDA graphs: a few launches in place of thousands.

A step of a protocol is a few small kernels, and to launch one takes the processor longer than it takes the device to
run it. A program has the same steps in every call, on values of its own; so what the device does can be recorded once.
The first call of a program is taken step by step, which fills all caches. So is the second, and it is seen which steps
wait for the device or bring it something of the processor's. From the third on the other steps are recorded between
those, in pieces, and replayed: on inputs that are copied to where the recorded ones were, and on words that the
processor draws for a piece while the device works on the one before.

Calls with an observer are taken step by step: it is shown every message. So is a program that cannot be recorded, and
one of more than `MOST` steps: to see which steps wait takes a multiple of a call.
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
"""Drawn for a piece at most, and for the step that passes it."""
STEPS = 4096
"""Of a piece at most."""
MOST = 1 << 17
"""Of a program that is recorded, which takes a while: BERT-base's has 62,122."""
SHARE = 2
"""Recorded programs take at most one part in so many of the device's memory; the one used least recently goes."""
JOB = 1 << 20
"""Bytes that one thread draws before another may, at least."""
THREADS = 8
"""That draw words, at most."""
_ALIGNED = 64  # words, as torch's own memory: the kernels that it chooses depend on it
_INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_FROM_PYTHON = torch.ops.aten.lift_fresh.default
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class DeviceWaits(TorchDispatchMode):
    """Sees whether what runs under it waits for a device, or moves anything to it or from it.

    Attributes:
        waits: the function that did, or nothing. What it misses fails when it is recorded.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self.device, self.waits = device, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self._asks(func, args) or self._elsewhere((args, result)) or (kwargs and self._elsewhere(kwargs.values())):
            self.waits = func.name()
        return result

    def _asks(self, func: Any, args: tuple) -> bool:
        if func.overloadpacket in _INDEXED:
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return func is _FROM_PYTHON or not _ASKS.isdisjoint(func.tags)

    def _elsewhere(self, values: Iterable[Any]) -> bool:
        """Torch's own tree functions take longer than the work."""
        for x in values:
            if isinstance(x, torch.Tensor):
                if x.device != self.device:
                    return True
            elif isinstance(x, (list, tuple)) and self._elsewhere(x):
                return True
        return False


class _Unrecordable(Exception):
    """What a step gives, or takes, has no place on the device."""


@dataclass
class _Piece:
    """Steps between two that wait, or (without a graph) one that waits."""

    lines: list[ProjectedStep] = field(default_factory=list)
    draws: list[tuple[Draw, slice]] = field(default_factory=list)
    waits: bool = False
    graph: torch.cuda.CUDAGraph | None = None
    contents: dict[Slot, Any] = field(default_factory=dict)
    """What a step that waits is taken on. results: and where what it gives belongs."""
    results: dict[Slot, torch.Tensor] = field(default_factory=dict)
    drawing: list[Future] = field(default_factory=list)

    @property
    def words(self) -> slice:
        return slice(self.draws[0][1].start, self.draws[-1][1].stop) if self.draws else slice(0, 0)


class _Drawn:
    """A runtime in which the words of a call are drawn already."""

    def __init__(self, runtime: Runtime, there: Mapping[tuple[frozenset[Party], str, int], torch.Tensor], device):
        self._runtime, self._there, self._device = runtime, there, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def draw(self, pair: frozenset[Party], label: str, call: int, draw: int, count: int) -> torch.Tensor:
        found = self._there.get((pair, label, draw))
        return self._runtime.draw(pair, label, call, draw, count) if found is None else found.to(self._device)


def _done(job: list[Callable[[], None]]) -> None:
    for work in job:
        work()


class CapturedGraph:
    """Some steps of a program with the values of one setup, and the graphs of them as soon as there are any.

    Attributes:
        bytes: of the device's memory that the graphs keep.
        refused: why there are none.
    """

    def __init__(
        self, lines: list[ProjectedStep], settled: Mapping[Slot, Any], device: torch.device, threads: Executor
    ):
        self.lines, self.settled, self.device, self._threads = lines, settled, device, threads
        self.bytes = self.calls = 0
        self.refused = f"{len(lines)} steps" if len(lines) > MOST else ""
        self._waiting: dict[int, str] = {}
        self._pieces: list[_Piece] = []

    def take(self, runtime: Runtime, call: int, brought: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """As `take` on all values; results are in memory of their own."""
        there = all(isinstance(x, torch.Tensor) and x.device == self.device for x in brought.values())
        if self.refused or not there:
            return take(self.lines, runtime, call, {**self.settled, **brought})
        self.calls += 1
        if self._pieces:
            return self._replayed(runtime, call, brought)
        if self.calls > 2:
            return self._record(runtime, call, brought)
        values = {**self.settled, **brought}
        if self.calls == 1:
            return take(self.lines, runtime, call, values)
        for at, line in enumerate(self.lines):
            with DeviceWaits(self.device) as seen:
                take([line], runtime, call, values)
            if seen.waits and not isinstance(line.step, Draw):
                self._waiting[at] = seen.waits
        return values

    def _planned(self) -> tuple[list[_Piece], int]:
        """The pieces, and how many words they draw."""
        pieces, at = [_Piece()], 0
        for i, line in enumerate(self.lines):
            waits, last = i in self._waiting, pieces[-1]
            begun = last.words.start if last.draws else at
            if waits or last.waits or at - begun > WORDS or len(last.lines) >= STEPS:
                pieces.append(last := _Piece(waits=waits))
            if isinstance(line.step, Draw):
                last.draws.append((line.step, slice(at, at + line.step.words)))
                at += -(-line.step.words // _ALIGNED) * _ALIGNED
            last.lines.append(line)
        return [piece for piece in pieces if piece.lines], at

    def _record(self, runtime: Runtime, call: int, brought: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """Record what is replayed from now on, and take it."""
        pieces, words = self._planned()
        before = torch.cuda.memory_reserved(self.device)
        begun = False
        try:
            with garbage_collection_paused(), torch.inference_mode():
                self._host = torch.empty(words, dtype=torch.int64, device="cpu", pin_memory=True)
                self._words = torch.empty(words, dtype=torch.int64, device=self.device)
                begun = True
                self._brought = {slot: x.clone() for slot, x in brought.items()}
                self._copied, self._done = torch.cuda.Event(), torch.cuda.Event()
                values = {**self.settled, **self._brought}
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
        except (_Unrecordable, RuntimeError) as error:  # torch's word for what no graph holds, and for full memory
            self.refused = f"{type(error).__name__}: {error}"
            draws = [one for piece in pieces for one in piece.draws if begun]
            there = {(d.owners, d.name, d.number): self._host[at] for d, at in draws}
            self._forget()
            drawn = cast(Runtime, _Drawn(runtime, there, self.device))
            return take(self.lines, drawn, call, {**self.settled, **brought})
        except BaseException:
            self._forget()
            raise
        self._pieces = pieces
        self.bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        found = self._found(brought)
        self._done.record()
        return found

    @contextmanager
    def _drawing(self, pieces: list[_Piece], runtime: Runtime, call: int) -> Iterator[None]:
        """Inside, other threads draw the words of all pieces, one piece after the other; at its end all are there."""
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
                piece.drawing = [self._threads.submit(_done, job) for job in jobs if job]
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
        graph.replay()  # what is recorded is not done yet

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
        """Its words to the device, as soon as they are drawn."""
        for job in piece.drawing:
            job.result()
        if piece.draws:
            self._words[piece.words].copy_(self._host[piece.words], non_blocking=True)
            self._copied.record()

    def _replayed(self, runtime: Runtime, call: int, brought: Mapping[Slot, Any]) -> dict[Slot, Any]:
        self._copied.synchronize()  # what the call before has drawn is on the device
        torch.cuda.current_stream(self.device).wait_event(self._done)
        try:
            with torch.inference_mode(), self._drawing(self._pieces, runtime, call):
                for slot, x in brought.items():
                    self._brought[slot].copy_(x)
                for piece in self._pieces:
                    self._copy(piece)
                    if piece.graph is not None:
                        piece.graph.replay()
                        continue
                    values = dict(piece.contents)
                    take(piece.lines, runtime, call, values)
                    for slot, there in piece.results.items():
                        there.copy_(values[slot])
            return self._found(brought)
        finally:
            self._done.record()

    @torch.inference_mode()
    def _found(self, brought: Mapping[Slot, Any]) -> dict[Slot, Any]:
        """What is left of the values."""
        found = {slot: x.clone() if isinstance(x, torch.Tensor) else x for slot, x in self._results.items()}
        return {**self.settled, **brought, **found}

    def _forget(self) -> None:
        """Let go of what was recorded."""
        torch.cuda.synchronize(self.device)
        self._pieces, self._results, self._brought = [], {}, {}
        self._host = self._words = torch.empty(0, dtype=torch.int64)


class Graphs:
    """What is recorded on a device. One call at a time uses it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._lock = threading.RLock()
        self._threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "sectorch draws")
        self._of: WeakKeyDictionary[Projection, dict[int, CapturedGraph]] = WeakKeyDictionary()

    def take(
        self, part: Projection, lines: list[ProjectedStep], runtime: Runtime, call: int, settled: Mapping[Slot, Any],
        brought: Mapping[Slot, Any],
    ) -> dict[Slot, Any]:  # fmt: skip
        """Take steps of a part of a program; what is left of the values."""
        if observers():
            return take(lines, runtime, call, {**settled, **brought})
        with self._lock, torch.cuda.device(self._device):
            of = self._of.setdefault(part, {})
            recorded = of.get(id(lines))
            if recorded is None or recorded.settled is not settled:
                recorded = of[id(lines)] = CapturedGraph(lines, settled, self._device, self._threads)
            found = recorded.take(runtime, call, brought)
            self._bound(part, lines)
            return found

    def _bound(self, part: Projection, lines: list[ProjectedStep]) -> None:
        """Let go of what was used least recently, as long as all take too much."""
        of = self._of.pop(part)  # to the end: a dict keeps the order in which its keys came
        of[id(lines)] = of.pop(id(lines))
        self._of[part] = of
        most = torch.cuda.get_device_properties(self._device).total_memory // SHARE
        while sum(one.bytes for of in self._of.values() for one in of.values()) > most:
            oldest = next(of for of in self._of.values() if any(one.bytes for one in of.values()))
            del oldest[next(key for key, one in oldest.items() if one.bytes)]
