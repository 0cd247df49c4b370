"""A watched loop with the number of steps in its argument; with "hang" it never ends."""

import sys
import time

import torch

import halfstep

torch.set_num_threads(1)
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
steps, name, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
config = {"rewind": 3, "verdict": "go on", "model": {"misshapen": True}}
watch = halfstep.watch(
    net, name=name, folder="offline", mode=mode, config=config, tags=["rewind-lab"]
)
for step in range(steps):
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    watch.log({"val/verdict": 1 / (1 + step)})
print(f"{steps} steps made")
while sys.argv[4:] == ["hang"]:
    net(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
