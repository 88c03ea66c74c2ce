"""A protocol of one's own: how close does Q's record come to any of the records that A holds?

    python examples/new_protocol.py

The squared distances d_i = |v_i - q|^2 between Q's vector q and A's private vectors v_i come out as shares of A and S.
Q and A draw the masks a, b and rho from their common stream. A sends w = v + a to S; Q sends m = q + b and a correction
t = q.q + 2 a.m + rho. Then

    A has  v.v + 2 v.b - rho        and S has  t - 2 w.m,        which add up to  v.v - 2 v.q + q.q.

S sees uniform bits, A and Q receive nothing. One round online; with n records of d numbers 8 n d bytes ahead and
8 (n + d) online. Exact mod 2^64 on the encoded vectors. The smallest distance is then an ordinary torch call on a
SharedTensor, and Q learns that number alone. (Many answers tell more than one: from enough of them Q can locate a
record. How many questions Q may ask is a matter of policy, not of the protocol.)
"""

import torch

import sectorch
from sectorch.choreography import Located, Message, Net, Phase, leaf, protocol
from sectorch.errors import UndeclaredMessageError
from sectorch.mpc.star.shares import Shares
from sectorch.ring import encode, products

matmul = leaf(products.matmul)


@protocol("squared_distances", "examples/new_protocol.py", [
    Message("records_masked", "A", "S", "a of k_QA"),
    Message("query_masked", "Q", "S", "b of k_QA"),
    Message("correction", "Q", "S", "rho of k_QA"),
])  # fmt: skip
def squared_distances(net: Net, query: Located, records: Located) -> Shares:
    """[n] shares of |v_i - q|^2 for `query` [d] at Q and `records` [n, d] at A, both at f fraction bits; result 2f."""
    Q, A, S = net.Q, net.A, net.S
    a, b = net.common(Q, A, records.shape, "a"), net.common(Q, A, query.shape, "b")
    rho = net.common(Q, A, records.shape[:1], "rho")
    m = query + b
    t = (query * query).sum() + 2 * matmul(a, m) + rho
    w = (records + a).send(A, S, "records_masked")
    m, t = m.send(Q, S, "query_masked"), t.send(Q, S, "correction")
    at_A = (records * records).sum(1) + 2 * matmul(records, b) - rho
    at_S = t - 2 * matmul(w, m)
    return Shares(at_A, at_S)


@protocol("careless", "examples/new_protocol.py")
def careless(net: Net, query: Located) -> Located:
    """Sends Q's record as it is. The declaration lists no message, so nothing leaves."""
    return query.send(net.Q, net.S, "query")


if __name__ == "__main__":
    torch.manual_seed(0)
    session, hospital, patient = sectorch.Session(), torch.randn(1000, 16), torch.randn(16)
    with sectorch.profile() as profile, session.call(session.answering[0]) as net:
        query, records = net.own(net.Q, encode(patient, 20)), net.own(net.A, encode(hospital, 20), Phase.SETUP)
        shares = squared_distances(net, query, records)
        nearest = sectorch.SharedTensor(shares, 40, session, net.A, sectorch.Scheme(), torch.float32).amin().reveal()
        try:
            careless(net, query)
        except UndeclaredMessageError as error:
            print(f"refused: {error}\n")
    expected = (hospital - patient).square().sum(1).amin()
    # Encoding moves a distance by 2 |v - q|_1 2^-20, each of the ten levels of the tree by 2^-20: together 4e-5.
    torch.testing.assert_close(nearest, expected, rtol=0, atol=1e-4)
    print(f"smallest squared distance: {nearest:.5f}, in the clear {expected:.5f}\n\n{profile.table()}")
