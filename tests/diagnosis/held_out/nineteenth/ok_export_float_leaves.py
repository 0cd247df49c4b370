"""Board-position evaluator trained under autocast, then traced for export; looks for half types in model and graph."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(349)
BOARD = 6


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Evaluator(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.stem, self.tower = nn.Conv2d(2, c, 3, padding=1), nn.Sequential(Residual(c), Residual(c))
        self.policy, self.value = nn.Conv2d(c, 1, 1), nn.Linear(c, 1)

    def forward(self, x):
        h = self.tower(F.relu(self.stem(x)))
        return self.policy(h).flatten(1), torch.tanh(self.value(h.mean((2, 3)))).squeeze(-1)


def positions(gen, n=24):
    """Stones of two players; the best move is the empty point with most own neighbours, the value is the difference in stones."""
    fill = torch.rand(n, BOARD, BOARD, generator=gen)
    lead = torch.rand(n, 1, 1, generator=gen) * 0.4 + 0.1
    own, other = (fill < lead).float(), (fill > 0.7).float()
    kernel = torch.tensor([[0, 1.0, 0], [1, 0, 1], [0, 1, 0]]).view(1, 1, 3, 3)
    count = F.conv2d(own[:, None], kernel, padding=1)[:, 0] - 9 * (own + other)
    count = count + 1e-3 * torch.arange(BOARD * BOARD).view(BOARD, BOARD)
    move = count.flatten(1).argmax(-1)
    value = torch.tanh(4 * (own.mean((1, 2)) - other.mean((1, 2))))
    return torch.stack((own, other), dim=1), move, value


def half_nodes(traced):
    return sum("Half(" in line for line in str(traced.inlined_graph).splitlines())


net = Evaluator()
watch(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 80)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
gen = torch.Generator().manual_seed(350)

for step in range(80):
    boards, move, value = positions(gen)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        policy, estimate = net(boards)
        policy_loss, value_loss = F.cross_entropy(policy.float(), move), F.mse_loss(estimate.float(), value)
    scaler.scale(policy_loss + value_loss).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    if step % 10 == 0:
        print(f"step {step} policy {policy_loss.item():.4f} value {value_loss.item():.4f} scale {scaler.get_scale():g}")

net.eval()
boards, move, value = positions(torch.Generator().manual_seed(351), 200)
print("dtypes of parameters and buffers:", sorted({str(t.dtype) for t in net.state_dict().values()}))
with torch.no_grad():
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        under_autocast = torch.jit.trace(net, boards, check_trace=False)
        policy, estimate = net(boards)
        print(f"autocast: half nodes {half_nodes(under_autocast)}, output {policy.dtype}, "
              f"move accuracy {(policy.argmax(-1) == move).float().mean().item():.3f}")
    export = torch.jit.trace(net.float(), boards, check_trace=False)
    policy, estimate = export(boards)
    print(f"export: half nodes {half_nodes(export)}, output {policy.dtype}, "
          f"move accuracy {(policy.argmax(-1) == move).float().mean().item():.3f}, value error {(estimate - value).abs().mean().item():.4f}")
