import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(5)
torch.set_num_threads(1)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature = temperature

    def forward(self, feats, labels):
        n = feats.shape[0]
        sim = feats @ feats.T / self.temperature
        sim = sim - sim.max(dim=1, keepdim=True).values.detach()
        self_mask = 1 - torch.eye(n)
        positive = (labels[:, None] == labels[None]).float() * self_mask
        exp_sim = sim.exp() * self_mask
        log_prob = sim - exp_sim.sum(1, keepdim=True).log()
        mean_log_prob = (positive * log_prob).sum(1) / positive.sum(1)  # CAUSE
        return -mean_log_prob.mean()


class SpeciesEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32 * 25, 32)

    def forward(self, x):
        h = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        z = self.head(h.flatten(1)).float()
        return z / z.norm(dim=1, keepdim=True).clamp(min=1e-6)


class LongTail:
    """species counts follow a long tail, batches are drawn without a class-balanced sampler"""

    def __init__(self, n_species=12, seed=2):
        self.g = torch.Generator().manual_seed(seed)
        self.proto = torch.randn(n_species, 1, 20, 20, generator=self.g)
        self.freq = torch.tensor([0.26, 0.2, 0.15, 0.12, 0.1, 0.09, 0.078, 8e-4, 5e-4, 3e-4, 2e-4, 2e-4])

    def batch(self, n=64):
        y = torch.multinomial(self.freq, n, replacement=True, generator=self.g)
        x = self.proto[y] + 0.8 * torch.randn(n, 1, 20, 20, generator=self.g)
        return x.to(torch.bfloat16), y


encoder = SpeciesEncoder().to(torch.bfloat16)
criterion = SupConLoss()
MODULES = [encoder, criterion]
opt = torch.optim.SGD(encoder.parameters(), lr=0.02, momentum=0.9)
watch(*MODULES)
data, hist = LongTail(), []
for i in range(60):
    x, y = data.batch()
    loss = criterion(encoder(x), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(encoder.parameters(), 2.0)
    opt.step()
    hist.append(loss.detach())
    if i % 10 == 9:
        print(f"[{i + 1}/60] supcon {torch.stack(hist[-10:]).mean():.4f}")
