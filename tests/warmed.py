"""Imported by the server that programs of tests are forked from (`apart.py`): its first secure inference loads compiled
loops, which takes a second of a processor, and then each of its forks has them."""

from __future__ import annotations

import torch

from sectorch.network.warm import warm

torch.set_num_threads(1)
warm()
