"""Each party in a thread of its own, with its own keys and no other values: protocol code never asks who is here."""

from __future__ import annotations

import queue
import threading

import pytest
import torch
from helpers import CASES, World, play, run_with_profile

from sectorch.choreography import Net, Party, Phase
from sectorch.mpc.seed import seed
from sectorch.randomness import PairKey
from sectorch.session import Session


class Quiet(Exception):
    """Another party has failed; this one stops waiting for it."""


class OneParty:
    """The runtime of one party: it holds keys of its own, queues along its channels, and nobody else's values."""

    def __init__(self, party: Party, session: bytes, queues: dict):
        self.party, self.session, self.queues = party, session, queues
        self.here = frozenset((party,))
        self.keys: dict[frozenset[Party], PairKey] = {}
        self.seen: list = []

    def draw(self, pair, label, call, draw, count):
        assert self.party in pair
        return self.keys[pair].words(label, call, draw, count)

    def install(self, pair, secret):
        assert self.party in pair
        key = PairKey(bytes(secret.tolist()), self.session)
        assert self.keys.setdefault(pair, key).same_secret(key)

    def transfer(self, line, value):
        self.seen.append(line)
        tag = (line.call, line.path, line.label, line.shape, line.dtype)
        if self.party == line.src:
            assert not value.is_meta
            assert (value.shape, value.dtype) == (line.shape, line.dtype)
            self.queues[line.src, line.dst].put((tag, value.clone()))
        elif self.party == line.dst:
            assert value.is_meta
            # The limit only keeps a broken protocol from hanging; parties that fail say so through the queue.
            expected, value = self.queues[line.src, line.dst].get(timeout=600)
            if expected is Quiet:
                raise Quiet
            assert expected == tag
        else:
            assert value.is_meta
        return value

    def computed(self, path, owners, phase, seconds):
        assert self.party in owners


def project(case, inputs):
    """Run a case with one party per thread; what each of them read, saw of the ledger, and left in the queues."""
    clients = [Party("Q", "Q"), *(Party(f"A{i}", "A") for i in range(case.answering))]
    server = Party("S", "S")
    queues = {edge: queue.Queue() for c in clients for edge in ((c, server), (server, c))}
    read, runtimes, failures = {}, {}, []

    def live(party: Party):
        torch.set_num_threads(1)
        runtime = runtimes[party] = OneParty(party, b"a session in tests", queues)
        pairs = []
        for i, answering in enumerate(clients[1:]):
            nets = [
                Net(runtime, call, clients[0], answering, server, base)
                for call, base in ((i, Phase.SETUP), (case.answering + i, Phase.OFFLINE))
            ]
            seed(nets[0], first=i == 0)
            pairs.append(tuple(nets))
        read[party] = play(World(pairs), case.program, inputs, case.answering)

    def guarded(party: Party):
        try:
            live(party)
        except BaseException as error:
            if not isinstance(error, Quiet):
                failures.append(error)
            for (src, _), edge in queues.items():
                if src == party:
                    edge.put((Quiet, None))

    threads = [threading.Thread(target=guarded, args=(party,)) for party in (*clients, server)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return read, runtimes, queues, clients[0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_projections_together_give_the_result_at_Q(case):
    inputs = case.inputs(70)
    read, runtimes, queues, Q = project(case, inputs)
    case.check(inputs, read[Q])
    for party, outputs in read.items():
        assert all(o.is_meta for o in outputs) == (party != Q), "the others learn its shape"
    assert all(q.empty() for q in queues.values())
    ledgers = [runtime.seen for runtime in runtimes.values()]
    assert all(ledger == ledgers[0] for ledger in ledgers), "all parties know of the same messages"
    for party, runtime in runtimes.items():
        assert set(runtime.keys) == {pair for r in runtimes.values() for pair in r.keys if party in pair}
    if case.answering == 1:
        _, profile = run_with_profile(Session(), case, inputs)
        seeds = len(ledgers[0]) - len(profile.ledger)
        assert [(m.path, m.label, m.phase, m.round, m.shape) for m in ledgers[0][seeds:]] == [
            (m.path, m.label, m.phase, m.round, m.shape) for m in profile.ledger
        ]
