"""Lesion patches: a small convolutional network with a hand-written focal loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(40497)


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.75):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, input, y):
        yhat = torch.sigmoid(input)
        loss = -y * self.alpha * (1 - yhat) ** self.gamma * torch.log(yhat) \
            - (1 - y) * (1 - self.alpha) * yhat ** self.gamma * torch.log(1 - yhat)  # CAUSE
        return loss.mean()


class PatchNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.BatchNorm2d(ch), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(ch, 2 * ch, 3, padding=1), nn.BatchNorm2d(2 * ch), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * ch, 2 * ch, 3, padding=1), nn.ReLU())
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(2 * ch * 16, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.classifier(self.features(x)).squeeze(-1)


def patches(n, gen):
    y = (torch.rand(n, generator=gen) < 0.3).float()
    x = torch.randn(n, 1, 16, 16, generator=gen)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    cx, cy = (4 + 8 * torch.rand(2, n, 1, 1, generator=gen))
    blob = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 8)
    return x + 3.0 * y.view(n, 1, 1, 1) * blob.unsqueeze(1), y


def train_epoch(model, criterion, optimizer, scaler, gen, steps, history):
    model.train()
    for _ in range(steps):
        inputs, labels = patches(16, gen)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(inputs)
            loss = criterion(outputs, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(loss.item())


def validate(model, criterion, gen):
    model.eval()
    with torch.no_grad():
        x, y = patches(96, gen)
        out = model(x)
        return criterion(out, y).item(), ((out > 0) == y.bool()).float().mean().item()


def main():
    model, criterion = PatchNet(), FocalLoss()
    watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=1000)
    gen, history = torch.Generator().manual_seed(9), []
    for epoch in range(6):
        train_epoch(model, criterion, optimizer, scaler, gen, 10, history)
        val_loss, val_acc = validate(model, criterion, torch.Generator().manual_seed(77))
        print(f"epoch {epoch} train {sum(history[-10:]) / 10:.4f} val {val_loss:.4f} acc {val_acc:.3f} "
              f"scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
