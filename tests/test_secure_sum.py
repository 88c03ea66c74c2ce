"""`secure_sum`: exact in one process and in several, with drop-outs, and what the server and enough clients see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from cases import long
from distributed_parties import in_processes, in_threads, runtime_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

import sectorch
from sectorch.choreography import Party
from sectorch.errors import (
    ArgumentError,
    DroppedClientError,
    DtypeError,
    FixedPointRangeError,
    KeyAgreementError,
    MaskError,
    NonFiniteError,
    ShapeError,
    TopologyError,
)
from sectorch.federated.parties import Simulation, client_sessions
from sectorch.ring import encode
from sectorch.secure_sum import (
    ClientMasks,
    Graph,
    PairwiseMasks,
    add_encoded,
    cohort,
    following,
    left_over,
    neighbours,
    parts,
    pour,
    star_roles,
)

ROUND = b"r" * 16


def unmask(total: torch.Tensor, openings: list) -> torch.Tensor:
    """The survivors' sum without the masks that did not cancel."""
    words = total.clone().numpy()
    pour(left_over(openings), words)
    return torch.from_numpy(words)


def encoded(values: torch.Tensor, share: float) -> torch.Tensor:
    words = torch.zeros(len(values), dtype=torch.int64)
    add_encoded(words, values, share, 40)
    return words


@given(st.integers(2, 6), st.integers(0, 50))
@settings(max_examples=25)
def test_masks_cancel_exactly(clients, count):
    total = sum((member.words(ROUND, count) for member in cohort(clients)), torch.zeros(count, dtype=torch.int64))
    assert not total.any()


@given(st.integers(3, 6), st.data())
@settings(max_examples=25)
def test_double_masks_open_to_the_survivors_sum(clients, data):
    """Any two or more survivors open to exactly their own sum."""
    survivors = sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=2)))
    members = cohort(clients, double=True)
    values = [torch.randint(-(1 << 40), 1 << 40, (7,)) for _ in members]
    sent = [value + member.words(ROUND, 7) for value, member in zip(values, members, strict=True)]
    openings = [members[k].open(ROUND, survivors) for k in survivors]
    assert torch.equal(unmask(sum(sent[k] for k in survivors), openings), sum(values[k] for k in survivors))
    assert all(opening.nbytes == 32 * (1 + clients - len(survivors)) for opening in openings)


def test_a_masked_update_is_uniform():
    """Each of the 64 bits is set half the time: 2^15 words, so a count is off by more than 6 sigma once in 10^9."""
    words = encoded(torch.zeros(1 << 15), 1.0) + cohort(2)[0].words(ROUND, 1 << 15)
    for bit in range(64):
        ones = int((words >> bit & 1).sum())
        assert abs(ones - (1 << 14)) <= 6 * (1 << 15) ** 0.5 / 2


def test_terms_and_rounds_have_words_of_their_own():
    member = cohort(2)[0]
    words = torch.cat([member.words(ROUND, 3000), member.words(b"s" * 16, 3000)])
    assert len(words.unique()) == 6000


@given(st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=20), st.floats(0.01, 1))
def test_encoding_is_the_nearest(values, share):
    """Within 2^-41 of share times the value, plus the float64 rounding of that product (2^-53 of at most 10^5)."""
    values = torch.tensor(values, dtype=torch.float64)
    found = encoded(values, share)
    assert (found.double() * 2.0**-40 - values * share).abs().max() <= 2.0**-41 + 1e5 * 2.0**-52
    assert torch.equal(found, encode(values * share, 40)), "the loop gives the ring's own encoding, bit for bit"
    single = values.float()
    assert torch.equal(encoded(single, share), encode(single.double() * share, 40))


def test_a_client_survives_its_process():
    """Its state goes on in another process, with what was used still used."""
    members = cohort(3, double=True)
    first = members[0].words(ROUND, 5)
    restored = ClientMasks.from_secret_state(members[0].secret_state())
    with pytest.raises(MaskError, match="masked already"):
        restored.words(ROUND, 5)
    other = ClientMasks.from_secret_state(cohort(3)[0].secret_state() | {"used": []})
    assert other.cohort == (0, 1, 2)
    rest = [ClientMasks.from_secret_state(m.secret_state()) for m in members[1:]]
    sent = first + sum(m.words(ROUND, 5) for m in rest)
    openings = [m.open(ROUND, [0, 1, 2]) for m in (restored, *rest)]
    assert not unmask(sent, openings).any()
    assert ClientMasks.from_secret_state(ClientMasks(4).secret_state()).cohort == ()


def test_joining_is_checked():
    member, other = ClientMasks(0), ClientMasks(1)
    with pytest.raises(MaskError, match="has not joined"):
        member.words(ROUND, 1)
    with pytest.raises(MaskError, match="two clients or more"):
        member.join({0: member.public}, b"")
    with pytest.raises(MaskError, match="holds another for it"):
        member.join({0: other.public, 1: other.public}, b"")
    with pytest.raises(KeyAgreementError):
        member.join({0: member.public, 1: bytes(32)}, b"")
    assert member.cohort == ()


@given(st.integers(2, 7), st.booleans(), st.booleans(), st.sampled_from([None, 2, 4]), st.data())
@settings(max_examples=40)
def test_a_masked_sum_is_the_sum_bit_for_bit(clients, double, sparse, degree, data):
    """Of what is sent: complete or sparse, drawn ahead or not, with who drops out where that can be met."""
    members = cohort(clients, double, data.draw(st.binary(max_size=4)), degree if sparse else None)
    survivors = sorted(data.draw(st.sets(st.integers(0, clients - 1), min_size=2))) if double else range(clients)
    count = data.draw(st.sampled_from([0, 1, 300]))
    values = [torch.randn(count) * 10 ** data.draw(st.integers(-9, 4)) for _ in members]
    share = data.draw(st.floats(0.001, 1))
    sent = []
    for member, value in zip(members, values, strict=True):
        if data.draw(st.booleans()):
            member.prepare(data.draw(st.sampled_from([ROUND, b"s" * 16])), data.draw(st.sampled_from([count, 5])))
        words = member.words(ROUND, count)
        add_encoded(words, value, share, 40)
        sent.append(words)
    openings = [members[k].open(ROUND, survivors) for k in survivors] if double else []
    found = unmask(sum(sent[k] for k in survivors), openings)
    assert torch.equal(found, sum(encode(values[k].double() * share, 40) for k in survivors))


def test_a_mask_drawn_ahead_is_the_mask():
    """Used once, for its own round and length only; another round throws it away."""
    ahead, cold = (ClientMasks.from_secret_state(m.secret_state()) for m in [cohort(3, True)[1]] * 2)
    ahead.prepare(ROUND, 40000)
    assert torch.equal(ahead.words(ROUND, 40000), cold.words(ROUND, 40000))
    with pytest.raises(MaskError, match="masked already"):
        ahead.prepare(ROUND, 40000)
    ahead.prepare(b"s" * 16, 10)
    assert torch.equal(ahead.words(b"t" * 16, 10), cold.words(b"t" * 16, 10))
    first, again = ahead.words(b"s" * 16, 10), cold.words(b"s" * 16, 10)
    assert torch.equal(first, again)
    assert following(b"\0" * 15 + b"\7") == b"\0" * 15 + b"\x08"
    assert following(b"\xff" * 16) == bytes(16)


# Who shares a mask with whom.


def fewest_that_cut(graph: Graph) -> int:
    """How many clients have to collude with the server (or be gone) before it sees the sums of two groups of the others
    apart: the connectivity of the masks' graph, by Menger's theorem the fewest disjoint paths between two clients that
    share no mask. With every pair sharing one nothing can be seen apart, and all but one are needed."""
    place = {client: at for at, client in enumerate(sorted(graph))}
    count, smallest = len(place), len(place) - 1
    # Each client is an arc of capacity 1 from its entry, 2 i, to its exit, 2 i + 1.
    arcs = [(2 * at, 2 * at + 1) for at in range(count)]
    arcs += [(2 * place[client] + 1, 2 * place[other]) for client in graph for other in graph[client]]
    source, target = np.array(arcs).T
    network = csr_array((np.ones(len(arcs), dtype=np.int32), (source, target)), shape=(2 * count, 2 * count))
    for client in graph:
        for other in graph:
            if other > client and other not in graph[client]:
                paths = maximum_flow(network, 2 * place[client] + 1, 2 * place[other]).flow_value
                smallest = min(smallest, int(paths))
    return smallest


@given(st.integers(2, 24), st.sampled_from([None, 2, 4, 6]), st.binary(max_size=16))
def test_each_client_has_as_many_neighbours(clients, degree, session):
    graph = neighbours(range(clients), degree, session)
    expected = clients - 1 if degree is None else min(degree, clients - 1)
    assert all(len(near) == expected and client not in near for client, near in graph.items())
    assert all(client in graph[other] for client, near in graph.items() for other in near)
    assert parts(graph) == [list(range(clients))]
    assert graph == neighbours(list(range(clients))[::-1], degree, session), "all clients draw the same"


def test_graphs_of_two_sessions_differ():
    graphs = [neighbours(range(50), 12, bytes([n])) for n in range(20)]
    assert all(a != b for a, b in itertools.combinations(graphs, 2))


def test_every_pair_is_an_edge_as_often():
    """The switches mix: over 400 graphs of 12 clients with 4 neighbours each of the 66 pairs is an edge with 4 / 11,
    within 6 standard deviations."""
    edges = torch.zeros(12, 12)
    for n in range(400):
        for client, near in neighbours(range(12), 4, n.to_bytes(2, "big")).items():
            edges[client, list(near)] += 1
    apart = edges[~torch.eye(12, dtype=torch.bool)]
    assert (apart - 400 * 4 / 11).abs().max() < 6 * (400 * 4 / 11 * 7 / 11) ** 0.5


@pytest.mark.parametrize("clients, degree", [(8, 4), (9, 4), (12, 6)])
def test_fewest_that_cut_are_those_of_trying_all(clients, degree):
    """Menger's count against every set of colluders there is."""
    for session in (b"a", b"b", b"c"):
        graph = neighbours(range(clients), degree, session)
        fewest = fewest_that_cut(graph)
        trials = (set(gone) for size in range(clients - 1) for gone in itertools.combinations(range(clients), size))
        assert fewest == next(len(gone) for gone in trials if len(parts(graph, gone)) > 1)
    assert fewest_that_cut(neighbours(range(clients), None, b"")) == clients - 1


@pytest.mark.parametrize("sessions", [2, *long(10)])
def test_fifty_clients_with_twelve_neighbours_withstand_eleven(sessions: int):
    """What docs/perturbation.md says of 50 clients: of ten sessions' graphs each has connectivity 12."""
    for session in range(sessions):
        assert fewest_that_cut(neighbours(range(50), 12, bytes([session]))) == 12


def seen_of(members: list[ClientMasks], graph, victim: int, colluders: list[int], update: torch.Tensor) -> torch.Tensor:
    """What the server finds of an update when the colluders tell it all their pair seeds of the round."""
    opened = [members[k].open(ROUND, [k, *(c for c in graph if c != victim and c != k)]) for k in colluders]
    found = update.clone()
    for opening in opened:
        if victim in opening.pairs:
            known = type(opening)(victim, ROUND, opening.pairs[victim], {})
            words = unmask(torch.zeros_like(update), [known])  # minus the pair's stream
            found = found + words if opening.client > victim else found - words
    return found


def test_all_neighbours_uncover_a_client_and_all_but_one_do_not():
    """The attack: 7 of 16 clients are honest, and the last neighbour decides. One short, every bit stays even."""
    graph = neighbours(range(16), 4, b"s")
    victim = 5
    values = torch.randn(1 << 14, dtype=torch.float64)
    for missing in (0, 1):
        members = cohort(16, True, b"s", 4)
        own = members[victim].words(ROUND, len(values))
        for member in members:
            if member.client != victim:
                member.words(ROUND, len(values))
        own_mask = members[victim].open(ROUND, range(16))
        update = unmask(own + encoded(values, 1.0), [type(own_mask)(victim, ROUND, own_mask.own, {})])
        colluders = list(graph[victim])[missing:]
        found = seen_of(members, graph, victim, colluders, update)
        assert torch.equal(found, encoded(values, 1.0)) == (missing == 0)
        if missing:
            for bit in range(64):
                ones = int((found >> bit & 1).sum())
                assert abs(ones - (1 << 13)) <= 6 * (1 << 14) ** 0.5 / 2
        assert (len(parts(graph, colluders)) > 1) == (missing == 0)


def test_a_sparse_client_survives_its_process():
    member = cohort(9, False, b"x", 4)[3]
    again = ClientMasks.from_secret_state(member.secret_state())
    assert again.peers == member.peers and len(member.peers) == 4
    assert torch.equal(again.words(ROUND, 9), member.words(ROUND, 9))


# The sum among parties.

CLIENTS = ("C0", "C1", "C2", "C3")
SERVER = Party("Server", "Server")
EDGES = [(SERVER, Party(name, name)) for name in CLIENTS]


def summands(dtype: torch.dtype = torch.float64, seed: int = 0, count: int = len(CLIENTS)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, 5, generator=generator, dtype=torch.float64) * 1000
    return {f"C{k}": x.to(dtype) for k, x in enumerate(values)}


def nearest(values: dict[str, torch.Tensor], clients=CLIENTS, frac_bits: int = 40) -> torch.Tensor:
    """The exact sum of what the clients' numbers are rounded to."""
    return sum(encode(values[c].double(), frac_bits) for c in clients).double() * 2.0**-frac_bits


FLOATS, WHOLE = ("float64", "float32", "float16", "bfloat16"), ("int64", "int32", "uint8", "bool")


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in FLOATS + WHOLE])
def test_the_sum_is_exact(dtype):
    values = summands(dtype)
    total, clients = sectorch.secure_sum(values)
    assert clients == CLIENTS and total.shape == (3, 5)
    if dtype.is_floating_point:
        assert torch.equal(total, nearest(values)) and total.dtype == torch.float64
        assert (total - sum(x.double() for x in values.values())).abs().max() <= 4 * 2.0**-41 + 1e4 * 2.0**-52
    else:
        for found in (total, sectorch.secure_sum(values, frac_bits=10).total):
            assert torch.equal(found, sum(x.long() for x in values.values()))


@pytest.mark.parametrize("make", [
    lambda: torch.tensor(1.5), lambda: torch.ones(0, 3), lambda: torch.ones(4, 4)[::2].T,
    lambda: torch.ones(3).expand(2, 3), lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.ones(3, requires_grad=True) * 2,
], ids=["scalar", "empty", "strided", "expanded", "parameter", "with a gradient"])  # fmt: skip
def test_a_tensor_of_any_form(make):
    """And the client's own is left as it was."""
    values = {c: make() for c in CLIENTS}
    total, _ = sectorch.secure_sum(values, drop_outs=True)
    assert torch.equal(total, 4 * make().detach().double()) and not total.requires_grad
    assert all(torch.equal(x, make()) for x in values.values())


@settings(max_examples=25)
@given(st.integers(2, 6), st.sampled_from([None, 2]), st.booleans(), st.integers(0, 45), st.data())
def test_any_sum_of_any_clients(count, degree, drop_outs, frac_bits, data):
    """Of who takes part, for several sums under one exchange of keys."""
    values = summands(seed=data.draw(st.integers(0, 99)), count=count)
    session = sectorch.Session(roles=star_roles(values))
    masks = PairwiseMasks(session, list(values), drop_outs=drop_outs, degree=degree)
    for _ in range(2):
        taking = sorted(data.draw(st.sets(st.sampled_from(sorted(values)), min_size=2))) if drop_outs else list(values)
        total, clients = masks.sum({c: values[c] for c in taking}, frac_bits)
        assert list(clients) == taking
        assert torch.equal(total, nearest(values, taking, frac_bits))


def apart(me: Party, ends: dict, *, drop_outs: bool = False, broken: str = "") -> sectorch.SecureSum:
    """Two sums at one party, which has its own tensor, and of the others' their shapes."""
    values = summands()
    shown = {c: x if c == me.name else x.to("meta") for c, x in values.items()}
    session = sectorch.Session(roles=star_roles(CLIENTS), runtime=runtime_of(me, ends))
    masks = PairwiseMasks(session, CLIENTS, drop_outs=drop_outs)
    first = masks.sum(shown)
    assert first.clients == CLIENTS
    if me.name == broken:
        shown[broken] = values[broken] * float("nan")
    return masks.sum(shown)


@pytest.mark.parametrize("drop_outs", [False, True])
def test_parties_in_threads_of_their_own(drop_outs):
    found = in_threads(EDGES, lambda me, ends: apart(me, ends, drop_outs=drop_outs))
    assert torch.equal(found.pop("Server").total, nearest(summands()))
    assert all(one.total.is_meta and one.total.shape == (3, 5) and one.clients == CLIENTS for one in found.values())


def process(me: str, ends: dict) -> list | None:
    parties = {name: Party(name, name) for name in (me, *ends)}
    total, _ = apart(parties[me], {parties[name]: end for name, end in ends.items()}, drop_outs=True)
    return None if total.is_meta else total.tolist()


@pytest.mark.sectorch_long
def test_parties_in_processes_of_their_own():
    found = in_processes([("Server", c) for c in CLIENTS], process)
    assert found.pop("Server") == nearest(summands()).tolist()
    assert list(found.values()) == [None] * len(CLIENTS)


def test_a_client_that_goes_is_left_out_or_the_sum_stays_hidden():
    """Its tensor is not finite, so it sends nothing. With drop-outs the others' sum is opened; else none is."""
    found = in_threads(EDGES, lambda me, ends: apart(me, ends, drop_outs=True, broken="C1"))
    left = ("C0", "C2", "C3")
    assert torch.equal(found["Server"].total, nearest(summands(), left)) and found["Server"].clients == left
    assert isinstance(found["C1"], NonFiniteError)
    assert all(found[c].clients == left for c in left), "each survivor knows whose sum it is in"
    found = in_threads(EDGES, lambda me, ends: apart(me, ends, broken="C1"))
    assert isinstance(found["Server"], DroppedClientError)
    assert "C1 sent nothing, so the others' masks do not cancel" in str(found["Server"])


def test_a_client_that_goes_before_its_opening_costs_a_new_sum():
    def leaving(me: Party, ends: dict):
        values = {c: x if c == me.name else x.to("meta") for c, x in summands().items()}
        session = sectorch.Session(roles=star_roles(CLIENTS), runtime=runtime_of(me, ends))
        masks = PairwiseMasks(session, CLIENTS, drop_outs=True)
        if me.name == "C2":
            masks.of(2).open = lambda *_: 1 / 0
        return masks.sum(values)

    found = in_threads(EDGES, leaving)
    assert isinstance(found["C2"], ZeroDivisionError)
    assert isinstance(found["Server"], DroppedClientError)
    assert "C2 sent nothing, after the others had sent theirs; sum new values without them" in str(found["Server"])


def test_all_messages_and_their_bytes():
    with sectorch.profile() as once:
        masks = PairwiseMasks(sectorch.Session(roles=star_roles(CLIENTS)), CLIENTS, drop_outs=True)
    line = lambda m: (m.label, m.src.name, m.dst.name, m.bytes)
    up, down = [(c, "Server") for c in CLIENTS], [("Server", c) for c in CLIENTS]
    keys = [line(m) for m in once.ledger if m.protocol != "agree"]
    assert keys == [*(("public", *edge, 32) for edge in up), *(("publics", *edge, 32 * 4 + 16) for edge in down)]
    with sectorch.profile() as profile:
        masks.sum(summands())
    sent = [("name", down, 16), ("masked", up, 8 * 15), ("survivors", down, 4), ("opening", up, 32 * 4)]
    assert [line(m) for m in profile.ledger] == [(label, *e, size) for label, edges, size in sent for e in edges]


def test_one_client_is_hidden_from_the_server_who_has_its_message():
    """A client's words with every opening of the others but its own seed: each of the 64 bits is even (6 sigma)."""
    values = {c: torch.zeros(1 << 14, dtype=torch.float64) for c in CLIENTS}
    with sectorch.choreography.ledger.Transcript() as transcript:
        sectorch.secure_sum(values, drop_outs=True)
    words = next(v for line, v in transcript.received("Server") if line.label == "masked" and line.src.name == "C2")
    for bit in range(64):
        ones = int((words >> bit & 1).sum())
        assert abs(ones - (1 << 13)) <= 6 * (1 << 14) ** 0.5 / 2
    openings = [v for line, v in transcript.received("Server") if line.label == "opening"]
    assert all(not opening[32:].any() for opening in openings), "pair seeds leave for the dropped alone"


def test_owners_of_a_session_of_secure_inference_sum_at_S():
    session = sectorch.Session(owners=["H1", "H2", "H3"])
    values = dict(zip(("H1", "H2", "H3"), summands().values(), strict=False))
    total, clients = sectorch.secure_sum(values, session, at="S")
    assert clients == ("H1", "H2", "H3") and torch.equal(total, nearest(values, clients))
    with pytest.raises(TopologyError, match="no channel"):
        sectorch.secure_sum(values, session, at="Q")


def test_a_session_of_each_client_with_the_server():
    """The sum, and the sum of some by agreement, where no session is common to all clients."""
    values = summands()
    with client_sessions(Simulation(), CLIENTS) as sessions:
        masks = PairwiseMasks(sessions, CLIENTS, drop_outs=True, degree=2)
        assert torch.equal(masks.sum(values).total, nearest(values))
        total, clients = masks.sum({c: values[c] for c in CLIENTS[1:]})
    assert torch.equal(total, nearest(values, CLIENTS[1:])) and clients == CLIENTS[1:]


def test_a_program_of_parties_sums():
    """In a simulation with contents, and on shapes alone, as a federation looks at a program before it is run."""

    def program(parties):
        roles = sectorch.Roles("Server C0 C1 C2 C3", edges=" ".join(f"Server-{c}" for c in CLIENTS))
        mine = lambda c: parties.inputs[c] if parties.present(c) else torch.empty(3, 5, device="meta")
        with parties.session(roles) as session:
            return sectorch.secure_sum({c: mine(c) for c in CLIENTS}, session, drop_outs=True).total

    values = summands()
    assert torch.equal(program(Simulation(values)), nearest(values))
    dry = sectorch.Session(roles=star_roles(CLIENTS), dry=True)
    shapes = {c: torch.empty(3, 5, device="meta") for c in CLIENTS}
    total, clients = sectorch.secure_sum(shapes, dry, drop_outs=True)
    assert total.is_meta and total.shape == (3, 5) and clients == CLIENTS


@pytest.mark.parametrize(
    "change, options, kind, words",
    [
        ({"C1": torch.ones(3, 4)}, {}, ShapeError, "equal shapes"),
        ({"C1": torch.ones(3, 5)}, {}, DtypeError, "one dtype, got torch.float32, torch.float64"),
        ({"C1": None}, {}, ArgumentError, "C1 adds a NoneType"),
        ({"C1": torch.empty(3, 5, device="meta")}, {}, ArgumentError, "C1 adds a tensor without content"),
        ({}, {"frac_bits": 61}, ArgumentError, "from 0 to 60"),
        ({}, {"frac_bits": 52}, FixedPointRangeError, "52 fraction bits the range is below 256"),
        ({"C1": torch.full((3, 5), float("inf"), dtype=torch.float64)}, {}, NonFiniteError, "a client adds"),
        ({}, {"least": 1}, ArgumentError, "2 to 4 clients"),
        ({}, {"degree": 3}, MaskError, "an even number"),
        ({}, {"at": "C0"}, ArgumentError, "each once|different names"),
    ],
)
def test_bad_input_is_refused_before_a_tensor_leaves(change, options, kind, words):
    with sectorch.profile() as profile, pytest.raises(kind, match=words):
        sectorch.secure_sum(summands() | change, **options)
    assert all(m.label != "masked" or m.src.name == "C0" for m in profile.ledger)


def test_who_takes_part_is_refused_by_name():
    session, values = sectorch.Session(roles=star_roles(CLIENTS)), summands()
    masks = PairwiseMasks(session, CLIENTS, drop_outs=True, least=3)
    with pytest.raises(ArgumentError, match="values of C9; the clients are C0, C1, C2, C3"):
        masks.sum(values | {"C9": values["C0"]})
    with pytest.raises(ArgumentError, match=r"no value of C2, C3: .* 3 clients at least"):
        masks.sum({c: values[c] for c in ("C0", "C1")})
    with pytest.raises(ArgumentError, match="needs drop_outs=True"):
        PairwiseMasks(session, CLIENTS).sum({c: values[c] for c in ("C0", "C1")})
    with pytest.raises(MaskError, match="one alone has nobody to hide behind"):
        PairwiseMasks(session, ["C0"])
    with pytest.raises(ArgumentError, match="parties of the session, each once; got Server, C0, C7"):
        PairwiseMasks(session, ["C0", "C7"])
    assert torch.equal(masks.sum(values).total, nearest(values)), "and the next sum is right"


def test_a_client_opens_for_as_many_as_it_was_told():
    first, *_ = cohort(3, double=True)
    first.words(ROUND, 1)
    with pytest.raises(MaskError, match="opening for 2 survivors"):
        first.open(ROUND, [0, 1], least=3)
