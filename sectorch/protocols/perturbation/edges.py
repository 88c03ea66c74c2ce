"""What a server and a client send each other: the roles, and a declared message or two to a protocol.

What a message holds is in `messages.py`, when it is sent in `rounds.py`; what it shows, in docs/perturbation.md.
"""

from __future__ import annotations

from collections.abc import Callable

from ...choreography import Located, Message, Net, Party, Roles, protocol

PAIR = Roles("Server Client", edges="Server-Client")
SERVER = Party("Server", "Server")


def roles_of(clients: int) -> Roles:
    """The star of a server and so many clients: Server, C0, C1, ..."""
    names = [f"C{client}" for client in range(clients)]
    return Roles(" ".join(("Server", *names)), edges=" ".join(f"Server-{name}" for name in names))


@protocol("perturbation_key", "Bonawitz et al. 2017", [
    Message("public", "Client", "Server", "a public key", "the client's public key"),
], roles=PAIR)  # fmt: skip
def send_key(net: Net, public: Located) -> Located:
    """A client's public key, of which the masks are made. 32 bytes."""
    return public.send(net.Client, net.Server, "public")


@protocol("perturbation_cohort", "Bonawitz et al. 2017", [
    Message("publics", "Server", "Client", "public keys", "the public keys of all clients"),
], roles=PAIR)  # fmt: skip
def send_cohort(net: Net, publics: Located) -> Located:
    """All clients' public keys. 32 bytes a client."""
    return publics.send(net.Server, net.Client, "publics")


@protocol("perturbation_begin", "the beginning of a run", [
    Message("begun", "Server", "Client", "", "how many rounds were finished before"),
], roles=PAIR)  # fmt: skip
def send_begun(net: Net, begun: Located) -> Located:
    """Where a run goes on: as far as the server has kept it. 8 bytes."""
    return begun.send(net.Server, net.Client, "begun")


@protocol("perturbation_model", "III-A", [
    Message("model", "Server", "Client", "scales and additive noise of the server",
            "a model of the same function, and more (docs/perturbation.md)"),
], roles=PAIR)  # fmt: skip
def send_model(net: Net, model: Located) -> Located:
    """A round's noisy model, the same to each client: the model's bytes, 16 for each of its outputs, and 16."""
    return model.send(net.Server, net.Client, "model")


@protocol("perturbation_exchange", "III-B1 b, Eqs. 22 to 25", [
    Message("request", "Client", "Server", "lambda, which does not hide it", "the prediction of every sample"),
    Message("reply", "Server", "Client", "delta and xi, which do not hide it", "the prediction of every sample"),
], roles=PAIR)  # fmt: skip
def exchange(net: Net, request: Located, answer: Callable, key: Located) -> Located:
    """The paper's exchange for cross-entropy, of one batch. Rounds 2, bytes 8 B (n (n - 1) + 1) and 24 B n."""
    at_server = request.send(net.Client, net.Server, "request").at("Server")
    return net.fresh(net.Server, answer, key, at_server).send(net.Server, net.Client, "reply")


@protocol("perturbation_update", "III-B, Eq. 27", [
    Message("masked", "Client", "Server", "the pair keys of the clients", "with the others', their sum"),
], roles=PAIR)  # fmt: skip
def send_masked(net: Net, update: Located) -> Located:
    """A client's terms and statistics under its masks: 8 bytes a number. Alone they are uniform."""
    return update.send(net.Client, net.Server, "masked")


@protocol("perturbation_plain_update", "III-B", [
    Message("update", "Client", "Server", "", "the client's gradient"),
], roles=PAIR)  # fmt: skip
def send_plain(net: Net, update: Located) -> Located:
    """A client's terms and statistics without masks: the bytes of the model's floats."""
    return update.send(net.Client, net.Server, "update")


@protocol("perturbation_survivors", "Bonawitz et al. 2017", [
    Message("survivors", "Server", "Client", "", "which clients sent an update"),
], roles=PAIR)  # fmt: skip
def send_survivors(net: Net, survivors: Located) -> Located:
    """Which of the clients sent an update: a byte each."""
    return survivors.send(net.Server, net.Client, "survivors")


@protocol("perturbation_opening", "Bonawitz et al. 2017", [
    Message("opening", "Client", "Server", "", "this round's seeds: the client's own, and those with the dropped"),
], roles=PAIR)  # fmt: skip
def send_opening(net: Net, opening: Located) -> Located:
    """What takes the masks of the round off the survivors' sum: 32 bytes, and 32 for each dropped client that it shared
    a mask with."""
    return opening.send(net.Client, net.Server, "opening")
