"""What is recorded for a CUDA device (`run/cuda_graphs.py`), as far as it needs none; `test_cuda.py` has the rest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sectorch
from sectorch.choreography.net import Draw
from sectorch.choreography.program.projection import part_of
from sectorch.choreography.run import cuda_graphs
from sectorch.choreography.run.cuda_graphs import CapturedGraph, DeviceWaits
from sectorch.choreography.streams import PairKey
from sectorch.errors import StreamReuseError
from sectorch.nn.models import ZOO
from sectorch.tensor import unwrap_openings

CPU = torch.device("cpu")


def set_to_one(x: torch.Tensor) -> None:
    x[0] = 1


@pytest.mark.parametrize(
    "work",
    [
        torch.Tensor.item, bool, torch.nonzero, set_to_one, lambda x: x[x > 0], lambda x: x[[0]],
        lambda x: torch.equal(x, x), lambda x: torch.masked_select(x, x > 0), lambda x: x.to("meta"),
        lambda x: torch.tensor([1, 2]), lambda x: x.clone().index_put_((x > 0,), x[:1]),
    ],
)  # fmt: skip
def test_what_waits(work):
    """For a value of the device's, or to bring it one of the processor's."""
    with DeviceWaits(CPU) as seen:
        work(torch.ones(1, dtype=torch.int64))
    assert seen.waits


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + 1, lambda x: x[:1].fill_(1), lambda x: x.index_select(0, x * 0), lambda x: x[x * 0],
        lambda x: torch.stack([x, x]).sum(0) @ x, lambda x: torch.arange(3, device=x.device), torch.clone,
        lambda x: x.clone().index_copy_(0, x * 0, x), lambda x: torch.where(x > 0, x, 0),
    ],
)  # fmt: skip
def test_what_does_not_wait(work):
    with DeviceWaits(CPU) as seen:
        work(torch.ones(1, dtype=torch.int64))
    assert not seen.waits


def recorded() -> tuple[sectorch.SecureModule, torch.Tensor, CapturedGraph, ThreadPoolExecutor]:
    construct, shape = ZOO["lenet"]
    secured, x = sectorch.secure(construct().eval()), torch.randn(2, *shape)
    secured(x)
    program = secured.choreography(x)
    part = part_of(program, secured.session.runtime.here)
    settled = secured.session.run_setup(program, secured._program_inputs(sectorch.Inputs.of(x)))
    values = settled.values(part, secured.session.runtime, secured._program_inputs(sectorch.Inputs.of(x)))
    threads = ThreadPoolExecutor(2)
    return secured, x, CapturedGraph(part.lines, values, CPU, threads), threads


def test_the_first_calls_are_taken_step_by_step_and_the_second_is_watched():
    secured, x, one, threads = recorded()
    program, runtime = secured.choreography(x), secured.session.runtime
    part, expected = part_of(program, runtime.here), secured(x)
    inputs = secured._program_inputs(sectorch.Inputs.of(x))
    brought = {i.slot: inputs[i.name] for i in part.required_inputs}
    for _ in range(2):
        found = part.copy_results(one.take(runtime, secured.session.number(program), brought))
        assert torch.equal(unwrap_openings(found), expected)
    assert one._waiting and len(one._waiting) < 10, "the query's check looks at it; next to nothing else does"
    threads.shutdown()


def test_pieces_hold_every_step_once_and_every_word_its_own(monkeypatch: pytest.MonkeyPatch):
    """The steps in their order; those that wait alone; draws next to each other in memory, none over another."""
    *_, one, threads = recorded()
    monkeypatch.setattr(cuda_graphs, "WORDS", 20_000)
    monkeypatch.setattr(cuda_graphs, "STEPS", 100)
    waits = {at for at, line in enumerate(one.lines) if not isinstance(line.step, Draw)}
    one._waiting = dict.fromkeys(sorted(waits)[5::50], "item")
    pieces, words = one._plan()
    assert [line for piece in pieces for line in piece.lines] == one.lines
    alone = [piece.lines for piece in pieces if piece.waits]
    assert alone == [[one.lines[at]] for at in one._waiting]
    assert len(pieces) > 2 * len(alone) and max(len(piece.lines) for piece in pieces) <= 100
    draws = [draw for piece in pieces for draw in piece.draws]
    assert [draw for draw, _ in draws] == [line.step for line in one.lines if isinstance(line.step, Draw)]
    ends = [0, *(at.stop for _, at in draws)]
    assert all(
        end <= at.start and at.stop - at.start == draw.words for end, (draw, at) in zip(ends, draws, strict=False)
    )
    assert words >= ends[-1] and all(at.start % 64 == 0 for _, at in draws)
    threads.shutdown()


def test_words_are_those_of_the_stream_whoever_draws_them():
    """The place is drawn at once, so that another draw of it is refused before the words are there."""
    key, again = PairKey(b"k" * 32, b"s" * 16), PairKey(b"k" * 32, b"s" * 16)
    out = torch.empty(1000, dtype=torch.int64)
    work = key.filling("mask", 3, 1, out.numpy().data.cast("B"))
    with pytest.raises(StreamReuseError):
        key.words("mask", 3, 1, 1000)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
    assert torch.equal(out, again.words("mask", 3, 1, 1000))


def test_a_program_of_many_steps_is_not_recorded(monkeypatch: pytest.MonkeyPatch):
    *_, one, threads = recorded()
    monkeypatch.setattr(cuda_graphs, "MOST", 100)
    assert not one.refused
    assert "steps" in CapturedGraph(one.lines, one.setup, CPU, threads).refused
    threads.shutdown()
