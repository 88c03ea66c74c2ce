"""CaPC without private inference: everybody votes on images that are no secret, and Q learns the noisy winners.

    python examples/public_queries.py                                    # all parties in this process, a simulation
    sectorch run examples/public_queries.py:program --federation federation.toml --as north --input V1=rows.npy

The images are strokes that a public program draws, so every voter's model answers in the clear. Votes stay secret: they
enter as shares, S adds the noise of GNMax, and each voter's budget is charged before it votes. Q trains on its own rows
and the labels. docs/capc.md has what Q loses and gains beside secret queries. S keeps its folder with the noise: a vote
that is paid for is not to be answered under another.
"""

from contextlib import ExitStack

import torch
import torch.nn.functional as F

import sectorch
from sectorch.dp import BudgetFile, GNMax, charge, scale_for
from sectorch.federated import Run
from sectorch.federated.parties import Parties, Simulation

VOTERS, COUNT, LIMIT = tuple(f"V{i}" for i in range(1, 16)), 30, (20.0, 1e-5)
MECHANISM = GNMax(scale_for("gaussian", *LIMIT, COUNT))


def program(parties: Parties) -> dict[str, torch.Tensor]:
    """The labels, and Q's models before and after, at Q."""
    what, shape = {"run": "public queries", "limit": LIMIT}, torch.empty(COUNT, 10, dtype=torch.int64, device="meta")
    with Run(what, members=("Q", "S", *VOTERS), parties=parties, out=parties.folder) as run, ExitStack() as stack:
        files = [parties.folder / f"budget-{v}.json" for v in VOTERS if run.present(v)]
        books, images = [stack.enter_context(BudgetFile(file, LIMIT)) for file in files], run.public(strokes(COUNT))
        rows = {p: run.bring(p, parties.inputs.get(p)) for p in ("Q", *VOTERS)}
        votes = [run.at(v, ballot, rows[v], images, stage=f"{v}/votes", public=shape) for v in VOTERS]
        noise = run.at("S", MECHANISM.draw, COUNT, 10, stage="noise")  # the same one after a kill
        with charge(books, MECHANISM, COUNT, mark="strokes", asker="Q"):
            cast = {"Q": "Q", "A": list(VOTERS), "S": "S"}
            labels = run.among(winners, cast, votes, noise, at="Q", stage="labels", public=shape[:, 0])
        models = [run.at("Q", fit, rows["Q"], *also, stage=f"model-{len(also)}") for also in ((), (images, labels))]
    names = ("labels", "before", "after")
    return {name: held.value for name, held in zip(names, (labels, *models), strict=True) if held.present}


def strokes(count: int) -> torch.Tensor:
    """Images [count, 64] of a line through five random points each, by a public seed."""
    bends = 7 * torch.rand(count, 5, 2, generator=torch.Generator().manual_seed(0))
    line = torch.lerp(bends[:, :-1, None], bends[:, 1:, None], torch.linspace(0, 1, 9)[:, None]).flatten(1, 2)
    pixels = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    return torch.exp(-2 * (line[:, :, None] - pixels).square().sum(-1).amin(1))


def fit(rows: torch.Tensor, images: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> torch.Tensor:
    """A linear model [10, 65] of rows that end in their class, and of labelled images beside them."""
    x, y = rows[:, :-1], rows[:, -1].long()
    if images is not None and labels is not None:
        x, y = torch.cat((x, images)), torch.cat((y, labels))
    model = torch.zeros(10, 65, requires_grad=True)
    adam = torch.optim.Adam([model], 0.05, weight_decay=1e-3)
    for _ in range(150):
        adam.zero_grad()
        F.cross_entropy(scores(model, x), y).backward()
        adam.step()
    return model.detach()


def scores(model: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return images @ model[:, :-1].T + model[:, -1]


def ballot(rows: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return F.one_hot(scores(fit(rows), images).argmax(1), 10)


def winners(session: sectorch.Session, votes: list[torch.Tensor], noise: tuple[torch.Tensor] | None) -> torch.Tensor:
    own = zip(session.answering, votes, strict=True)
    shared = [sectorch.share(v, owner=p.name, session=session, party=p) for p, v in own]
    return MECHANISM.release(sectorch.collect(shared), noise, engine="shares")


if __name__ == "__main__":
    from sklearn.datasets import load_digits

    data, target = load_digits(return_X_y=True)
    rows = torch.cat((torch.tensor(data) / 16, torch.tensor(target)[:, None]), 1).float()
    parts = dict(zip(("Q", *VOTERS), rows[:640].split(40), strict=True))
    found, x, y = program(Simulation(parts, "public-queries-run")), rows[640:, :-1], rows[640:, -1]
    first, last = ((scores(found[k], x).argmax(1) == y).float().mean() for k in ("before", "after"))
    print(f"accuracy {first:.3f}, after {COUNT} labels {last:.3f}; one process, which protects nothing")
