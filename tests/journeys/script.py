"""A training script that watches itself and logs an artifact of every kind."""

import sys

import numpy as np
import torch
from torch import nn

import halfstep

torch.manual_seed(0)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=5)
watch = halfstep.watch(
    net,
    name="journey",
    tags=["journey"],
    config={"lr": 0.1, "sizes": [4, 1]},
    histogram_every=5,
    layers_every=5,
    headroom_every=5,
)
for step in range(20):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = net(torch.full((2, 4), 4.0)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    watch.log({"accuracy": step / 20})
watch.log(
    {
        "picture": np.linspace(0, 1, 48).reshape(4, 4, 3),
        "table": [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}],
        "note": "It went well.",
        "weights": halfstep.Histogram(net.weight.detach()),
        "speech": halfstep.Audio(np.sin(np.arange(1600) / 10), rate=16000),
    }
)
torch.save(net.state_dict(), sys.argv[1])
watch.checkpoint(sys.argv[1], upload=True)
