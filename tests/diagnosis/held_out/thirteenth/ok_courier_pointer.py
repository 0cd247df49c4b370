"""Pointer network for courier routes, trained by REINFORCE with a greedy baseline. Visited stops get a score of -inf."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(73)

STOPS, WIDTH, BATCH, STEPS = 8, 48, 24, 90


class Pointer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.query = nn.Linear(3 * WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)

    def encode(self, stops):
        x = self.embed(stops)
        q, k, v = self.attn(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x, self.key(x)

    def forward(self, stops, sampler=None):
        """Returns route, sum of log probabilities, mean entropy."""
        x, keys = self.encode(stops)
        rows = torch.arange(len(stops))
        visited = torch.zeros(stops.shape[:2], dtype=torch.bool)
        here = torch.zeros(len(stops), dtype=torch.long)
        route, log_prob, entropy = [here], 0.0, 0.0
        visited[rows, here] = True
        for _ in range(STOPS - 1):
            context = torch.cat([x.mean(1), x[:, 0], x[rows, here]], 1)
            score = (keys @ self.query(context)[..., None]).squeeze(2) / WIDTH ** 0.5
            score = (8.0 * torch.tanh(score)).float().masked_fill(visited, float("-inf"))
            lp = torch.log_softmax(score, 1)
            here = lp.argmax(1) if sampler is None else torch.multinomial(lp.detach().exp(), 1, generator=sampler).squeeze(1)
            safe = lp.masked_fill(visited, 0.0)
            entropy = entropy - (safe.exp() * safe).masked_fill(visited, 0.0).sum(1)
            log_prob = log_prob + lp[rows, here]
            visited = visited.clone()
            visited[rows, here] = True
            route.append(here)
        return torch.stack(route, 1), log_prob, entropy / (STOPS - 1)


def length(stops, route):
    path = stops.gather(1, route[..., None].expand(-1, -1, 2))
    return (path - path.roll(-1, 1)).norm(dim=2).sum(1)


gen = torch.Generator().manual_seed(29)
policy = Pointer()
watch(policy)
baseline = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
test = torch.rand(128, STOPS, 2, generator=gen)

for step in range(STEPS):
    stops = torch.rand(BATCH, STOPS, 2, generator=gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        route, log_prob, entropy = policy(stops, sampler=gen)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        greedy, _, _ = baseline(stops)
    advantage = length(stops, route) - length(stops, greedy)
    loss = (advantage * log_prob).mean() - 0.01 * entropy.mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    if step % 15 == 14:
        with torch.no_grad():
            ours, theirs = (length(test, m(test)[0]).mean() for m in (policy, baseline))
        if ours < theirs:
            baseline.load_state_dict(policy.state_dict())
        print(f"{step:3d} loss {loss.item():.4f} entropy {entropy.mean().item():.3f} greedy route {ours:.3f} baseline {theirs:.3f}")
