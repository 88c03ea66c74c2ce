"""A private top-k vote: who asks learns which k items have the highest sums of scores, and nothing else.

    python examples/top_k.py                                             # all parties in this process, a simulation
    sectorch run examples/top_k.py:program --federation federation.toml --as north --input V1=scores.npy

Each of four voters scores eight items. Two of them, as the server S and the answering party A, compute on shares of all
scores; the others share theirs and wait. Q learns the places of the k highest sums in ascending order, so that their
ranks stay secret too; of equal sums either may win. A run that was killed goes on after its last whole stage
(docs/federated.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import sectorch
from sectorch.federated import Run
from sectorch.federated.parties import Parties, Simulation

VOTERS, EVERYBODY = ("A", "S", "V1", "V2"), ("S", "Q", "A", "V1", "V2")
CAST = {"Q": "Q", "A": "A", "S": "S", "O": ["V1", "V2"]}
ITEMS, K, HIGHEST = 8, 3, 10.0


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """The places of the k items, at Q."""
    what = {"run": "top-k", "items": ITEMS, "k": K, "highest": HIGHEST}
    scores, places = torch.empty(ITEMS, device="meta"), torch.empty(K, device="meta", dtype=torch.int64)
    with Run(what, members=EVERYBODY, parties=parties, out=parties.folder) as run:
        raw = {v: run.bring(v, parties.inputs.get(v), public=scores) for v in VOTERS}
        ballots = [run.at(v, ballot, raw[v], stage=f"{v}/ballot", public=scores) for v in VOTERS]
        top = run.among(vote, CAST, list(VOTERS), ballots, K, at="Q", stage="top", public=places)
    return {"top": top.value} if top.present else {}


def ballot(scores: torch.Tensor) -> torch.Tensor:
    """A voter's scores within the range that all agreed on."""
    return scores.float().clamp(0, HIGHEST)


def vote(session: sectorch.Session, voters: Sequence[str], ballots: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    """Sum and order on shares; the places are sorted before they are opened."""
    shared = [sectorch.share(x, owner=v, session=session, limit=HIGHEST) for v, x in zip(voters, ballots, strict=True)]
    places = torch.stack(shared).sum(0).topk(k).indices
    return places.sort().values.reveal(to="Q")


if __name__ == "__main__":
    scores = torch.rand(len(VOTERS), ITEMS, generator=torch.Generator().manual_seed(0)) * HIGHEST
    found = program(Simulation(dict(zip(VOTERS, scores, strict=True)), "top-k-run"))["top"]
    clear = scores.sum(0).topk(K).indices.sort().values
    print(f"top {K}: {found.tolist()}, in the clear {clear.tolist()}; one process, which protects nothing")
