"""Imported by the server that programs of tests are forked from (`distributed_parties.py`): its first secure inference loads compiled
loops, which takes a second of a processor, and then each of its forks has them."""

from __future__ import annotations

import gc

import torch

from sectorch.network.warm_up import warm

torch.set_num_threads(1)
warm()

gc.collect()
gc.freeze()  # a collection in a fork would write on all of it, and so copy it
