"""What the parties of a valuation say to each other when they are apart, beside SecSV itself: keys, sums, rounds.

The clients' joint key goes from the first client to the others, each over a channel of the two alone. Local models are
averaged in shares: P and X add up what they cannot read, and the clients learn the sum, which is the next global model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import ckks
from ...choreography import Located, Message, Net, Roles, protocol, shaped
from ...ckks.convert import random_words
from ...ckks.scheme.keys import SecretKey
from ...federated.parties import Parties
from .parties import TWO_SERVERS
from .secsv import joint_keys, joint_parameters

PAIR = Roles("K L", edges="K-L")


@protocol("shapley_public_key", "SecSV, section 3", [
    Message("public", "K", "L", "nothing", "the clients' public key"),
], roles=PAIR)  # fmt: skip
def send_public(net: Net, key: Located) -> Located:
    """The clients' public key from the first of them, uint8, at L. Rounds 1, bytes about 16 N (primes + 1)^2."""
    return key.send(net.K, net.L, "public").at(net.L)


@protocol("shapley_secret_key", "SecSV, section 3", [
    Message("secret", "K", "L", "the secured channel", "the secret key, which all clients have in common"),
], roles=PAIR)  # fmt: skip
def send_secret(net: Net, key: Located) -> Located:
    """The clients' secret key from the first of them, uint8, at L, another client. Rounds 1, bytes 8 N (primes + 1)."""
    return key.send(net.K, net.L, "secret").at(net.L)


def exchange_keys(clients: Sequence[str], together: Parties, agreed: str) -> ckks.Keys | ckks.PublicKeys:
    """The joint keys of the clients; their public half at a server.

    Args:
        clients: names; the first makes the keys, afresh in every run.
    """
    parameters = joint_parameters()
    found: ckks.Keys | ckks.PublicKeys | None = joint_keys() if together.present(clients[0]) else None
    blank = lambda size: torch.empty(size, dtype=torch.uint8, device="meta")
    for other in (*clients[1:], "P", "X"):
        here = together.present(other)
        if not (here or together.present(clients[0])):
            continue
        keys = found if isinstance(found, ckks.Keys) else None
        public = blank(ckks.PublicKeys.message_bytes(parameters)) if keys is None else keys.public.message()
        secret = blank(SecretKey.message_bytes(parameters)) if keys is None else keys.secret.message()
        session = together.session(PAIR, {"K": clients[0], "L": other}, label=f"shapley keys {other}", agreed=agreed)
        with session as pair, pair.call() as net:
            arrived = net.read(send_public(net, net.own(net.K, public)), net.L)
            if here:
                found = ckks.PublicKeys.from_message(parameters, arrived)
            if other in clients:
                arrived = net.read(send_secret(net, net.own(net.K, secret)), net.L)
                if here and isinstance(found, ckks.PublicKeys):
                    found = ckks.Keys(found, SecretKey.from_message(found, arrived))
    if found is None:
        raise ckks.MissingKeyError("a party of a valuation is one of its clients, or P or X")
    return found


@protocol("shapley_share_model", "FedAvg; SecSV, Figure 1", [
    Message("local_P", "C", "P", "a share mod 2^64"), Message("local_X", "C", "X", "a share mod 2^64"),
], roles=TWO_SERVERS)  # fmt: skip
def share_model(net: Net, model: Located) -> tuple[Located, Located]:
    """C's local model times its weight, int64 [parameters], shared. Rounds 1; 8 bytes a parameter to each server."""
    at_P, at_X = net.fresh(net.C, _split, model)
    return at_P.send(net.C, net.P, "local_P").at(net.P), at_X.send(net.C, net.X, "local_X").at(net.X)


@shaped(lambda model: (model, model))
def _split(model: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = random_words(model.numel()).view(model.shape)
    return model - mask, mask


@protocol("shapley_open_sum", "FedAvg; SecSV, Figure 1", [
    Message("sum_P", "P", "C", "X's half"),
    Message("sum_X", "X", "C", "P's half", "the weighted sum of the local models, which is the next global model"),
], roles=TWO_SERVERS)  # fmt: skip
def open_sum(net: Net, at_P: Located, at_X: Located) -> Located:
    """The sum at C. Rounds 1; 8 bytes a parameter from each."""
    return at_P.send(net.P, net.C, "sum_P").at(net.C) + at_X.send(net.X, net.C, "sum_X").at(net.C)


@protocol("shapley_round", "docs/secsv.md", [
    Message("round", "P", "C", "nothing", "which round is valued next, and whether the first model's hits are counted"),
], roles=TWO_SERVERS)  # fmt: skip
def say_round(net: Net, value: Located) -> Located:
    """What comes next, int64 [2], from P at C. Rounds 1, bytes 16."""
    return value.send(net.P, net.C, "round")


@protocol("shapley_round_X", "docs/secsv.md", [
    Message("round", "P", "X", "nothing", "which round is valued next, and whether the first model's hits are counted"),
], roles=TWO_SERVERS)  # fmt: skip
def say_round_X(net: Net, value: Located) -> Located:
    """The same at X. Rounds 1, bytes 16."""
    return value.send(net.P, net.X, "round")
