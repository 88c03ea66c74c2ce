"""Imported by the server that test programs are forked from (`distributed_parties.py`).

Its first secure inference loads compiled loops, which takes a second; each fork then has them already.
"""

from __future__ import annotations

import gc

import torch

from sectorch.network.warm_up import warm

torch.set_num_threads(1)
warm()

gc.collect()
gc.freeze()  # a collection in a fork would write on all of it, and so copy it
