"""Yao's garbled circuits and oblivious transfer for batches of tensors: the two-party steps of CaPC.

    pair = correlate(session.setup(A), A)                    # once a session: base oblivious transfers
    s, s_hat = argmax_onehot(net, pair, at_A, at_Q)          # step 1c: one-hot argmax, in shares of Q and A
    label = argmax_noisy(net, pair_of_S, at_S, at_Q)         # step 3: the label, to Q alone

`argmax_onehot_shares` and `argmax_noisy_shares` compute the same on the three-party secret sharing of `sectorch.mpc`,
much cheaper, and secure only while no two of the parties collude. `argmax_confident` and `argmax_confident_shares`
answer step 3 only where the vote is clear. See docs/garbled.md.
"""

from .argmax import (
    UNANSWERED,
    argmax_confident,
    argmax_confident_shares,
    argmax_noisy,
    argmax_noisy_shares,
    argmax_onehot,
    argmax_onehot_shares,
)
from .argmax import label_of_shares as label_of_shares
from .argmax import one_hot_of_classes as one_hot_of_classes
from .argmax import onehot_of_shares as onehot_of_shares
from .transfer import Pair, correlate, oblivious_transfer, relay

__all__ = [
    "UNANSWERED",
    "Pair",
    "argmax_confident",
    "argmax_confident_shares",
    "argmax_noisy",
    "argmax_noisy_shares",
    "argmax_onehot",
    "argmax_onehot_shares",
    "correlate",
    "oblivious_transfer",
    "relay",
]
