"""What a round under the clients' masks costs beside FedAvg's: the cost table and Table V's split.

All is measured in turn, a repetition at a time, in processor time of one thread, which a busy machine does not stretch
by taking turns; times are medians, and ratios medians of the ratios of a repetition. Every repetition is a whole round
whose recovered gradient is compared with FedAvg's: what is timed is what trains. All clients hold the same batch, so
that one backward pass serves for the updates that are not timed; their masks are their own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sectorch.protocols.perturbation import ClientMasks, Scheme, cohort
from sectorch.protocols.perturbation.experiment import DenseNet, ResNet, mlp

CASES = (
    ("mse", 1, None, "weights"), ("mse", 1, None, "bias"), ("cross_entropy", 1, "shift", "weights"),
    ("cross_entropy", 1, "paper", "weights"), ("cross_entropy", 1, "paper", "bias"), ("mse", 2, None, "weights"),
)  # fmt: skip
DENSE = 20
"""With more clients than these each shares masks with `--degree` others."""


def cnn() -> nn.Module:
    """The command's small net, at 32x32."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{f"mlp{n}": (lambda n=n: mlp(n, 256, 10, 256), (256,)) for n in (3, 5, 7)},
    "cnn": (cnn, (3, 32, 32)),
    **{f"resnet{n}": (lambda n=n: ResNet(n, 10), (3, 32, 32)) for n in (20, 32, 56)},
    "densenet": (lambda: DenseNet(10), (3, 32, 32)),
}


class Round:
    """The parties of one case, and the seconds of what they did."""

    def __init__(self, net: str, case: tuple, clients: int, degree: int, batch: int):
        torch.manual_seed(0)
        make, shape = NETS[net]
        loss, m, exchange, place = case
        self.model, self.clients = make(), clients
        self.scheme = Scheme(self.model, loss, m, exchange=exchange, noise_on=place)
        x = torch.randn(batch, *shape)
        self.batch = x, torch.randn(batch, 10) if loss == "mse" else torch.randint(10, (batch,))
        self.parameters = list(self.model.parameters())
        self.buffers = [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-9, 0.9)
        self.degree = degree if clients > DENSE else None
        self.masks = cohort(clients, session=b"cost", degree=self.degree)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.up = self.turn = 0

    def timed(self, what: str, call: Callable[[], Any]) -> Any:
        begun = time.process_time()
        found = call()
        self.seconds[what].append(time.process_time() - begun)
        return found

    def run(self, first: bool) -> None:
        """One round, of which the first is not counted. Client 0 has drawn its mask ahead, client 1 has not."""
        scheme, share = self.scheme, 1 / self.clients
        plain = lambda: torch.autograd.grad(scheme.loss_fn(self.model(self.batch[0]), self.batch[1]), self.parameters)
        noisy, key = self.timed("perturb", lambda: scheme.perturb(self.model.state_dict()))
        step = lambda masks, share: scheme.client_step(
            noisy, self.batch, masks=masks, share=share, server=lambda request: scheme.answer(key, request)
        )
        drawn = [masks._ahead is not None for masks in self.masks]
        assert first or drawn == [True] + [False] * (self.clients - 1), "only client 0 has drawn ahead"
        steps = {
            "client FedAvg": plain,
            "client unmasked": lambda: step(None, 1.0),
            "client": lambda: step(self.masks[0], share),
            "client cold": lambda: step(self.masks[1], share),
        }
        order = list(steps)[self.turn % 4 :] + list(steps)[: self.turn % 4]
        self.turn += 1
        did = {what: self.timed(what, steps[what]) for what in order}
        gradient, updates = did["client FedAvg"], [did["client"], did["client cold"]]
        updates += self._others(noisy, key, share)
        self._split(noisy, key)
        self._hot(noisy, plain, step)
        assert all(update.masked for update in updates)
        sent = [[g.clone() for g in gradient] for _ in range(self.clients)]
        self.timed("server FedAvg", lambda: self._plain_server(sent))
        recovered = self.timed("recover", lambda: scheme.recover(key, updates, [1] * self.clients))
        ours, expected = (torch.cat([g.flatten() for g in gs]) for gs in (recovered.values(), gradient))
        error = float((ours - expected).norm() / expected.norm())
        assert error < 1e-3, f"the round that was timed gave another gradient, off by {error:.1e}"
        self.timed("step", lambda: scheme.step(self.model, self.optimizer, recovered))
        self.up = updates[0].nbytes
        updates.clear()  # Sent, and gone from the clients' memory.
        did.clear()
        self.timed("ahead", lambda: scheme.prepare(noisy, self.masks[0]))
        if first:
            self.seconds.clear()

    def _others(self, noisy, key, share: float) -> list:
        """The updates of the other clients, of the same terms under their own masks."""
        work = self.scheme.begin(noisy, self.batch)
        self._answered(work, key)
        done = work.done()
        return [self.scheme.update(noisy, *done, masks=masks, share=share) for masks in self.masks[2:]]

    def _answered(self, work, key) -> None:
        request = work.ask()
        work.take(None if request is None else self.scheme.answer(key, request))

    def _hot(self, noisy, plain: Callable, step: Callable) -> None:
        """The unkind control: each step behind one of its own kind, so that all but the mask is in the cache. The mask
        is that of another pair, as the round's own is used once."""
        again = self._pair(noisy)
        plain()
        self.timed("hot FedAvg", plain)
        step(None, 1.0)
        self.timed("hot", lambda: step(again, 0.5))

    def _pair(self, noisy) -> ClientMasks:
        """Masks of another cohort, drawn for this round."""
        masks, (terms, trained, running) = cohort(2)[0], self.scheme.counts
        masks.prepare(noisy.round, terms * trained + running)
        return masks

    def _split(self, noisy, key) -> None:
        """Client 0's work once more, in pieces: forward, backward, masking."""
        scheme = self.scheme
        outputs = self.timed("forward FedAvg", lambda: scheme.loss_fn(self.model(self.batch[0]), self.batch[1]))
        self.timed("backward FedAvg", lambda: torch.autograd.grad(outputs, self.parameters))
        work = scheme.begin(noisy, self.batch)
        request = self.timed("forward", work.ask)
        reply = None if request is None else scheme.answer(key, request)
        done = self.timed("backward", lambda: (work.take(reply), work.done())[1])
        again = self._pair(noisy)
        self.timed("mask", lambda: scheme.update(noisy, *done, masks=again, share=0.5))

    def _plain_server(self, sent: list[list[torch.Tensor]]) -> None:
        """FedAvg's: the mean of K gradients and of the running statistics, and a step."""

        def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
            total = tensors[0] / self.clients
            for tensor in tensors[1:]:
                total.add_(tensor, alpha=1 / self.clients)
            return total

        for parameter, gradients in zip(self.parameters, zip(*sent, strict=True), strict=True):
            parameter.grad = mean(list(gradients))
        self.optimizer.step()
        for buffer in self.buffers:
            buffer.copy_(mean([buffer] * self.clients))

    def ms(self, *what: str) -> float:
        """The median milliseconds of these together."""
        return 1e3 * statistics.median(map(sum, zip(*(self.seconds[w] for w in what), strict=True)))

    def ratio(self, above: list[str], below: list[str], waiting: int = 0) -> float:
        """The median of a repetition's ratios. `waiting`: so many FedAvg client steps in both."""
        wait = [waiting * t for t in self.seconds["client FedAvg"]]
        sums = [map(sum, zip(*(self.seconds[w] for w in what), wait, strict=True)) for what in (above, below)]
        return statistics.median(a / b for a, b in zip(*sums, strict=True))


def measured(options: argparse.Namespace, cases: tuple = CASES):
    """A finished `Round` for each net, case and number of clients, and what it is of."""
    for net in options.nets or ("mlp3", "cnn", "resnet20"):
        for case in cases:
            for clients in options.clients:
                found = Round(net, case, clients, options.degree, options.batch_size)
                for repeat in range(options.repeats + 1):
                    found.run(first=repeat == 0)
                loss, m, exchange, place = case
                name = " ".join((loss, *([exchange] if exchange else []), *(["bias"] if place == "bias" else [])))
                yield {"net": net, "loss": name, "m": m, "K": clients, "masks with": found.degree or clients - 1}, found


def cost(options: argparse.Namespace) -> list[dict]:
    """Client and server against FedAvg. FedAvg's client is one forward and one backward pass; its server adds up K
    gradients and running statistics and steps SGD with momentum.

    'client': a masked step whose mask was drawn ahead; 'ahead': that drawing; 'cold': a step that draws its mask
    itself; 'no masks': the control. All over FedAvg's step; 'hot': 'client' with warm caches, from which FedAvg's step
    gains most. 'floor': one forward and T backward passes of twice its arithmetic each, over one and one. 'server':
    perturb, recover and step over FedAvg's server; 'round': the same with K FedAvg steps in both, as Table V has it.
    """
    server = ["perturb", "recover", "step"]
    rows = []
    for row, found in measured(options):
        against = lambda *what, found=found: found.ratio(list(what), ["client FedAvg"])
        rows.append(row | {
            "FedAvg ms": found.ms("client FedAvg"), "ours ms": found.ms("client"), "client": against("client"),
            "ahead": against("ahead"), "hot": found.ratio(["hot"], ["hot FedAvg"]),
            "both": against("client", "ahead"), "cold": against("client cold"),
            "no masks": against("client unmasked"), "floor": (1 + 2 * found.scheme.term_count) / 3,
            "server FedAvg ms": found.ms("server FedAvg"), "server ours ms": found.ms(*server),
            "server": found.ratio(server, ["server FedAvg"]),
            "round": found.ratio(server, ["server FedAvg"], found.clients), "up MB": found.up / 1e6,
        })  # fmt: skip
        print(*(f"{v:.3g}" if isinstance(v, float) else v for v in rows[-1].values()), flush=True)
    return rows


def split(options: argparse.Namespace) -> list[dict]:
    """Table V: milliseconds of preparing (the server noises the model, the client draws its mask ahead), forward,
    backward, masking (a client) and update (the server adds up, recovers and steps). The paper's are of ResNet-56 at
    224x224 in seconds of 250 rounds, without masks."""
    rows = []
    zero = dict.fromkeys(("prepare", "forward", "backward", "mask", "update"), 0.0)
    for row, found in measured(options, CASES[:3]):
        for who, parts in {
            "FedAvg client": {"forward": ["forward FedAvg"], "backward": ["backward FedAvg"]},
            "FedAvg server": {"update": ["server FedAvg"]},
            "our client": {"prepare": ["ahead"], "forward": ["forward"], "backward": ["backward"], "mask": ["mask"]},
            "our server": {"prepare": ["perturb"], "update": ["recover", "step"]},
        }.items():
            times = zero | {part: found.ms(*what) for part, what in parts.items()}
            rows.append(row | {"who": who} | times | {"total": sum(times.values())})
            print(*(f"{v:.3g}" if isinstance(v, float) else v for v in rows[-1].values()), flush=True)
    return rows
