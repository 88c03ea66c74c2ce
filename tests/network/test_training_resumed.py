"""A training whose party dies in the middle of an epoch: all go on from the newest state that all have, bit for bit.

Here each party is a thread with a connection of its own, and one that dies closes it without a word. As processes that
kill themselves (-9), at twenty places of each party: `python -m sweeps kill training` (`test_sweeps.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from federation_world import World, each
from training_program import BATCHES, EPOCHS, program, rows_of

from sectorch.choreography.ledger import Cost
from sectorch.errors import CheckpointError, SectorchError
from sectorch.federated.parties import Simulation

PARTIES = {"north": "Q", "east": "A", "south": "S", "west": "H1"}


@pytest.fixture(scope="module")
def world(tmp_path_factory, patience):
    world = World(tmp_path_factory.mktemp("resumed"), PARTIES)
    yield world
    world.close()


def trained(world: World, folder: Path, dying: str = "", at: int = -1) -> tuple[dict[str, Any], dict, dict]:
    """What each party learns or fails with, the bytes that each has counted, and the messages that each has sent; one
    dies at a message of its."""
    costs: dict[str, float] = {}
    sent = dict.fromkeys(PARTIES, 0)

    def work(name: str) -> Any:
        federation = world.party(name)
        try:
            inner = federation.connection.link.send

            def send(data: Any, urgent: bool = False) -> None:
                sent[name] += not urgent
                if name == dying and sent[name] == at:
                    federation.connection._stream.close()
                inner(data, urgent)

            federation.connection.link.send = send
            with Cost() as cost:
                parties = federation.for_run({PARTIES[name]: rows_of(PARTIES[name])}, "", folder / name)
                found = program(parties)
            costs[name] = cost.bytes
            return {key: value for key, value in found.items() if not value.is_meta}
        finally:
            federation.close()

    return each(PARTIES, work), costs, sent


@pytest.mark.sectorch_long  # `test_checkpoints.py` has the bits in one process
def test_a_party_that_dies_in_an_epoch_and_all_go_on_to_the_same_bits(world, tmp_path):
    one = program(Simulation({role: rows_of(role) for role in PARTIES.values()}, tmp_path / "one"))
    whole, before, sent = trained(world, tmp_path / "whole")
    assert {name for name, learned in whole.items() if learned} == {"east", "west"}
    assert all(torch.equal(whole["east"][key], one[key]) for key in one)

    lost, *_ = trained(world, tmp_path / "kept", "east", sent["east"] * 6 // 10)
    assert all(isinstance(error, SectorchError) for error in lost.values()), lost
    steps = {int(path.stem) for path in (tmp_path / "kept").glob("*/*/*.state")}
    assert steps and max(steps) < EPOCHS * BATCHES, "it died in the middle"
    found, after, _ = trained(world, tmp_path / "kept")
    for name in ("east", "west"):
        assert found[name].keys() == one.keys() and all(torch.equal(found[name][key], one[key]) for key in one)
    assert after["south"] < 0.9 * before["south"], "what was done was not done again"

    again, *_ = trained(world, tmp_path / "kept")
    assert all(torch.equal(again["west"][key], one[key]) for key in one), "at its end there is nothing left to do"
    for path in (tmp_path / "kept" / "south").glob("*/*.state"):
        path.unlink()
    lost, *_ = trained(world, tmp_path / "kept")
    assert any(isinstance(error, CheckpointError) for error in lost.values()), lost  # nothing begins anew
