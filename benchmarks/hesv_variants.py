"""HESV as what SecSV is compared with: by the letter of the paper, and the fastest that keeps to its messages.

Neither pays for our fresh encryptions of zero or for labels in unary: the client that counts sees by how much
predictions and labels differ. By the letter, every product of two ciphertexts is relinearised and rescaled, for every
coalition; the fastest does so once for a sum, and multiplies the first layer once for each client's model.
"""

from __future__ import annotations

from sectorch.choreography import Located, Message, Net, protocol
from sectorch.choreography.located import run_in
from sectorch.ckks.exchange import LocatedCKKSTensor
from sectorch.protocols.secsv.hesv import HESVTester, linear
from sectorch.protocols.secsv.testers import ONE_SERVER, during


@protocol("hesv_compare", "SecSV, Algorithm 2, steps 8 and 9", [
    Message("differences", "P", "C", "encryption, which C takes off", "by how much predictions and labels differ"),
    Message("count", "C", "P", "", "how many samples are classified correctly"),
], roles=ONE_SERVER)  # fmt: skip
def compare(net: Net, prediction: LocatedCKKSTensor, labels: LocatedCKKSTensor) -> Located:
    """How many predictions and labels agree, int64 [1] at P, from the labels' numbers. Rounds 2."""
    with during("arithmetic"):
        differences = (prediction - labels).smallest_form()
    with during("decryption"):
        off = differences.decrypt_at(net.C, "differences", rerandomised=True)
    return (off.abs() < 0.5).sum().view(1).send(net.C, net.P, "count").at(net.P)


class FastestTester(HESVTester):
    """The paper's messages, as fast as we can."""

    unary = fresh = False
    _count = staticmethod(compare)


class LetterTester(FastestTester):
    """The paper's algorithms as they stand."""

    first_once = False

    def _product(self, layer, model, operand):
        with run_in(self.nets[0]):
            return self.keys.run(self.nets[0].P, linear, layer, model, operand, True)
