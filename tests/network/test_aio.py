"""Asking and taking part from asyncio: the loop goes on, and a cancelled call ends at the others."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest
import torch
from federation_world import World
from network_world import until

from sectorch import errors, reference
from sectorch.network import aio

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import secure_sum

PARTIES = {"north": "H1", "south": "H2", "west": "H3", "collector": "C"}


async def beating(stop: asyncio.Event) -> int:
    """How often the loop came round meanwhile."""
    count = 0
    while not stop.is_set():
        count += 1
        await asyncio.sleep(0.001)
    return count


def test_a_model_is_asked_beside_the_loop_and_a_cancelled_call_ends(star):
    address, made, model = star
    x = torch.randn(2, 1, 8, 8)

    async def ask():
        async with aio.AsyncConnection(address, made["alice"]) as connection:
            assert await connection.models() == ["hospital-b"]
            asked = await connection.model("hospital-b")
            stop = asyncio.Event()
            beats = asyncio.create_task(beating(stop))
            first, second = await asyncio.gather(asked(x), asked(x + 1))
            stop.set()
            ideal = reference(model)
            assert torch.equal(first, ideal(x)) and torch.equal(second, ideal(x + 1)) and await beats > 1
            with pytest.raises(errors.ShapeError):
                await asked(torch.randn(2, 7))
            task = asyncio.create_task(asked(x))
            while asked.remote._active is None:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert asked.remote._active is None and torch.equal(await asked(x), ideal(x)), "the next one is right"

    asyncio.run(ask())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("aio"), PARTIES)
    yield world
    world.close()


def test_four_parties_in_one_loop(world):
    vectors = {name: torch.randn(4) for name in secure_sum.HOSPITALS}

    async def party(name: str):
        own = {role: x for role, x in vectors.items() if role == PARTIES[name]}
        async with aio.AsyncFederation(world.path, name) as federation:
            return await federation.run(secure_sum.program, own)

    async def all_of_them():
        return dict(zip(PARTIES, await asyncio.gather(*map(party, PARTIES)), strict=True))

    found = asyncio.run(all_of_them())
    torch.testing.assert_close(found["collector"]["sum"], sum(vectors.values()), rtol=0, atol=4 * 2.0**-21)
    assert all(found[name] == {} for name in PARTIES if name != "collector")


def test_to_cancel_a_program_ends_it_at_the_others(world):
    there, held = threading.Event(), threading.Event()

    def stuck(parties):
        with parties.session(secure_sum.ROLES, label="stuck") as session:
            if parties.present("H1"):
                there.set()
                held.wait(60)
            return session.run(
                session.trace(secure_sum.total), {"H2": torch.zeros(4).long(), "H3": torch.zeros(4).long()}
            )

    async def all_of_them():
        async def party(name: str):
            async with aio.AsyncFederation(world.path, name) as federation:
                return await federation.run(stuck)

        tasks = {name: asyncio.create_task(party(name)) for name in PARTIES}
        while not there.is_set():
            await asyncio.sleep(0.01)
        tasks["north"].cancel()
        found = await asyncio.gather(*(tasks[name] for name in PARTIES if name != "north"), return_exceptions=True)
        held.set()
        with pytest.raises(asyncio.CancelledError):
            await tasks["north"]
        return found

    found = asyncio.run(all_of_them())
    assert isinstance(found[-1], errors.SectorchError), "the collector; a hospital may have sent its part before"
    assert any("'north'" in str(error) and "stopped by its user" in str(error) for error in found)
    assert until(lambda: len(world.server._broker) == 0, 30)


def test_to_cancel_a_party_that_waits_ends_its_wait(world):
    async def wait():
        async with aio.AsyncFederation(world.path, "north") as federation:
            task = asyncio.create_task(federation.run(secure_sum.program, {"H1": torch.zeros(4)}))
            while not world.server._broker._waiting:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(wait())
    assert until(lambda: not world.server._broker._waiting, 30)


def test_it_is_used_within_async_with(world):
    with pytest.raises(errors.ArgumentError, match="within `async with`"):
        asyncio.run(aio.AsyncFederation(world.path, "north").run(secure_sum.program))
