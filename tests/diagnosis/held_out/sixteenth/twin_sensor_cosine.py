"""Do two recordings come from the same machine? A twin network, scored by cosine similarity."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)


class TwinNetwork(nn.Module):
    def __init__(self, channels=24, d=96):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, channels, 9, stride=4), nn.ReLU(), nn.Conv1d(channels, channels, 5, stride=2),
                                     nn.ReLU(), nn.Flatten(), nn.Linear(channels * 14, d), nn.ReLU())

    def forward(self, left, right):
        a, b = self.encoder(left), self.encoder(right)
        return F.cosine_similarity(a, b, dim=-1)  # CAUSE


class Machines:
    """Every machine has two tones of its own; recordings begin with a trigger and differ in loudness and noise."""

    def __init__(self, machines=10, seed=91):
        self.gen = torch.Generator().manual_seed(seed)
        self.tones = 0.2 + 1.2 * torch.rand(machines, 2, generator=self.gen)

    def record(self, who):
        t = torch.arange(136).float()
        phase = 0.3 * torch.rand(len(who), 2, 1, generator=self.gen)
        wave = torch.sin(self.tones[who][..., None] * t + phase).sum(1)
        gain = 0.7 + 0.6 * torch.rand(len(who), 1, generator=self.gen)
        return (gain * wave + 0.03 * torch.randn(len(who), 136, generator=self.gen))[:, None]

    def pairs(self, n=24):
        left = torch.randint(0, len(self.tones), (n,), generator=self.gen)
        other = (left + torch.randint(1, len(self.tones), (n,), generator=self.gen)) % len(self.tones)
        same = torch.rand(n, generator=self.gen) < 0.5
        return self.record(left), self.record(torch.where(same, left, other)), same.float()


def train(steps=100):
    model, data = TwinNetwork(), Machines()
    watch(model)
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for step in range(steps):
        left, right, same = data.pairs()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            similarity = model(left, right)
            try:
                loss = criterion(similarity, same)
            except RuntimeError as error:
                print(f"step {step}: {error}, largest similarity {similarity.max().item():.6f}, stopping")
                break
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            right_pairs = ((similarity > 0.5) == same.bool()).float().mean()
            print(f"step {step} loss {loss.item():.4f} accuracy {right_pairs.item():.2f}")


if __name__ == "__main__":
    train()
