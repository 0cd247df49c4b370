"""Fully convolutional segmentation; mean intersection over union per validation image, many classes are absent."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(83)
N_CLASS, IGNORE = 9, 255


def _fast_hist(label_true, label_pred, n_class):
    mask = (label_true >= 0) & (label_true < n_class)
    return np.bincount(n_class * label_true[mask].astype(int) + label_pred[mask], minlength=n_class ** 2).reshape(n_class, n_class)


def label_accuracy_score(label_true, label_pred, n_class):
    hist = _fast_hist(label_true.flatten(), label_pred.flatten(), n_class)
    with np.errstate(divide="ignore", invalid="ignore"):
        acc = np.diag(hist).sum() / hist.sum()
        acc_cls = np.nanmean(np.diag(hist) / hist.sum(axis=1))
        iu = np.diag(hist) / (hist.sum(axis=1) + hist.sum(axis=0) - np.diag(hist))
    return acc, acc_cls, np.nanmean(iu), iu


class FCN16s(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        def stage(i, o):
            return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.pool3, self.pool4 = stage(3, ch), stage(ch, 2 * ch)
        self.score4, self.score3 = nn.Conv2d(2 * ch, N_CLASS, 1), nn.Conv2d(ch, N_CLASS, 1)

    def forward(self, x):
        p3 = self.pool3(x)
        p4 = self.pool4(p3)
        y = F.interpolate(self.score4(p4), scale_factor=2, mode="bilinear") + self.score3(p3)
        return F.interpolate(y, scale_factor=2, mode="bilinear")


class Shapes:
    """Each image has background and two kinds of objects; borders are not labelled."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.colour = torch.randn(N_CLASS, 3, generator=torch.Generator().manual_seed(0))

    def sample(self):
        label = torch.zeros(24, 24, dtype=torch.long)
        for c in torch.randint(1, N_CLASS, (2,), generator=self.gen).tolist():
            y, x = torch.randint(1, 12, (2,), generator=self.gen).tolist()
            label[y - 1:y + 11, x - 1:x + 11] = IGNORE
            label[y:y + 10, x:x + 10] = c
        image = self.colour[label.clamp(max=N_CLASS - 1)].permute(2, 0, 1) + 0.4 * torch.randn(3, 24, 24, generator=self.gen)
        return image, label

    def batch(self, n):
        return tuple(torch.stack(t) for t in zip(*(self.sample() for _ in range(n))))


class Trainer:
    def __init__(self, model, max_iter=48, interval=16):
        self.model, self.max_iter, self.interval = model, max_iter, interval
        self.optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=30)
        self.train_data = Shapes(1)

    def validate(self):
        self.model.eval()
        data, metrics, per_class = Shapes(2), [], []
        with torch.no_grad():
            for _ in range(4):
                x, y = data.batch(1)
                acc, acc_cls, mean_iu, iu = label_accuracy_score(y.numpy(), self.model(x).argmax(1).numpy(), N_CLASS)
                metrics.append((acc, acc_cls, mean_iu))
                per_class.append(iu)
        self.model.train()
        return np.mean(metrics, axis=0), per_class[-1]

    def train(self):
        for iteration in range(self.max_iter):
            x, y = self.train_data.batch(4)
            self.optim.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.cross_entropy(self.model(x).float(), y, ignore_index=IGNORE)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optim)
            self.scaler.update()
            if iteration % self.interval == self.interval - 1:
                (acc, acc_cls, mean_iu), iu = self.validate()
                print(f"iter {iteration + 1} loss {loss.item():.3f} acc {acc:.3f} acc_cls {acc_cls:.3f} mean_iu {mean_iu:.3f}")
                print("   iu", " ".join(f"{v:.2f}" for v in iu))


if __name__ == "__main__":
    net = FCN16s()
    watch(net)
    Trainer(net).train()
