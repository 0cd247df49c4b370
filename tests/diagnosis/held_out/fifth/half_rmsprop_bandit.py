import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)


class RMSPropTF(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, alpha=0.9, eps=1e-8):
        super().__init__(params, dict(lr=lr, alpha=alpha, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["square_avg"] = torch.zeros_like(p)
                sq = st["square_avg"]
                sq.mul_(group["alpha"]).addcmul_(p.grad, p.grad, value=1 - group["alpha"])  # CAUSE
                denom = sq.sqrt().add_(group["eps"])  # CAUSE
                p.addcdiv_(p.grad, denom, value=-group["lr"])  # CAUSE


class Arms(nn.Module):
    def __init__(self, ctx=12, arms=6):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(ctx, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.mean = nn.Linear(48, arms)

    def forward(self, c):
        return self.mean(self.trunk(c))


gen = torch.Generator().manual_seed(131)
true = torch.randn(12, 6, generator=gen) * 0.01
policy = Arms().half()
nn.init.zeros_(policy.mean.bias)
with torch.no_grad():
    policy.mean.weight.mul_(0.05)
MODULES = [policy]
watch(*MODULES)
opt = RMSPropTF(policy.parameters(), lr=1e-3)
dtype = next(policy.parameters()).dtype
regret = 0.0
for t in range(50):
    ctx = torch.randn(32, 12, generator=gen)
    reward = ctx @ true
    est = policy(ctx.to(dtype))
    arm = torch.where(torch.rand(32, generator=gen) < 0.2, torch.randint(0, 6, (32,), generator=gen), est.detach().float().nan_to_num().argmax(1))
    picked = reward.gather(1, arm[:, None]).squeeze(1)
    regret += (reward.max(1).values - picked).mean().item()
    loss = (est.gather(1, arm[:, None]).squeeze(1).float() - picked).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print("regret", regret / 50, "loss", loss.item())
