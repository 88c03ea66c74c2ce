"""Steps of training in CrypTen, for benchmarks/training_peers.py, which runs this in an environment of its own.

    python benchmarks/training_crypten.py MODEL BATCH STEPS

Prints a line of JSON: the seconds of each step, and the bytes that party 0 sent in the last one.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

import torch

crypten = importlib.import_module("crypten")
multiprocess = importlib.import_module("crypten.mpc.context").run_multiprocess
nn = crypten.nn

MODELS = {
    "mlp": lambda: [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)],
    "lenet": lambda: [
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    ],
}  # fmt: skip
SHAPES = {"mlp": (64,), "lenet": (1, 28, 28)}


@multiprocess(world_size=2)
def train(name: str, batch: int, steps: int) -> str:
    """One of the two parties."""
    torch.set_num_threads(1)
    communicator = crypten.communicator.get()
    importlib.import_module("crypten.config").cfg.communicator.verbose = True  # it counts bytes then
    model = nn.Sequential(*MODELS[name]())
    model.encrypt()
    model.train()
    loss = nn.CrossEntropyLoss()
    optimiser = crypten.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    torch.manual_seed(0)
    x = crypten.cryptensor(torch.rand(batch, *SHAPES[name]), src=0)
    y = crypten.cryptensor(torch.nn.functional.one_hot(torch.randint(0, 10, (batch,)), 10).float(), src=1)
    seconds, sent = [], 0
    for _ in range(steps):
        communicator.reset_communication_stats()
        began = time.perf_counter()
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
        seconds.append(time.perf_counter() - began)
        sent = communicator.comm_bytes
    return json.dumps({"seconds": seconds, "bytes": sent})


if __name__ == "__main__":
    print(train(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))[0])
