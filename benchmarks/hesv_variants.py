"""HESV as what SecSV is compared with: by the letter of the paper, and the fastest that keeps to its messages.

Neither pays for our fresh encryptions of zero or for labels in unary: the client that counts sees by how much
predictions and labels differ. By the letter, every product of two ciphertexts is relinearised and rescaled, for every
coalition; the fastest does so once for a sum, and multiplies the first layer once for each client's model.
"""

from __future__ import annotations

import torch

from sectorch import ckks
from sectorch.choreography import Located, Message, Net, protocol
from sectorch.protocols.secsv.hesv import HESVTester, Sealed, compute, linear
from sectorch.protocols.secsv.testers import ONE_SERVER, work


@work("arithmetic")
def differences(prediction: ckks.CKKSTensor, labels: ckks.CKKSTensor) -> ckks.CKKSTensor:
    """Prediction less label, encrypted, a slot for each sample (Algorithm 2, step 8)."""
    return (prediction - labels).smallest_form()


@work("decryption", lambda differences, keys: torch.empty(1, dtype=torch.int64, device="meta"))
def zeroes(differences: ckks.CKKSTensor, keys: ckks.Keys) -> torch.Tensor:
    """How many places of a batch hold less than a half, [1]."""
    return (differences.decrypt(keys.secret).abs() < 0.5).sum().view(1)


@protocol("hesv_compare", "SecSV, Algorithm 2, steps 8 and 9", [
    Message("differences", "P", "C", "encryption, which C takes off", "by how much predictions and labels differ"),
    Message("count", "C", "P", "", "how many samples are classified correctly"),
], roles=ONE_SERVER)  # fmt: skip
def compare(net: Net, prediction: Sealed, labels: Sealed, keys: Sealed) -> Located:
    """How many predictions and labels agree, int64 [1] at P, from the labels' numbers. Rounds 2."""
    off = compute(net, net.P, differences, prediction, labels).send(net.P, net.C, "differences")
    return compute(net, net.C, zeroes, off, keys).send(net.C, net.P, "count").at(net.P)


class FastestTester(HESVTester):
    """The paper's messages, as fast as we can."""

    unary = False

    def _hidden(self, net, output):
        return output

    def _agreeing(self, net, prediction, labels, keys):
        return compare(net, prediction, labels, keys)


class LetterTester(FastestTester):
    """The paper's algorithms as they stand."""

    first_once = False

    def _product(self, layer, model, operand):
        net = self.nets[0]
        return compute(net, net.P, linear, layer, model, operand, True)
