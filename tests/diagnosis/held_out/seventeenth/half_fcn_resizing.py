"""Land cover from aerial tiles with a small half-precision FCN; the tiles grow from epoch to epoch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)
CLASSES, IGNORE = 5, 255


class ConvReLU(nn.Sequential):
    def __init__(self, cin, cout, stride=1):
        super().__init__(nn.Conv2d(cin, cout, 3, stride, 1), nn.ReLU(inplace=True))


class FCN(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.down1 = ConvReLU(3, width, 2)
        self.down2 = ConvReLU(width, 2 * width, 2)
        self.score1, self.score2 = nn.Conv2d(width, CLASSES, 1), nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(a)
        s = F.interpolate(self.score2(b), scale_factor=2, mode="nearest") + self.score1(a)
        return F.interpolate(s, scale_factor=2, mode="nearest")


def tiles(gen, n, size):
    """Blocks of 8 pixels of one class, whose colour is the class's plus noise; 2 % of the pixels are not labelled."""
    blocks = torch.randint(0, CLASSES, (n, 1, size // 8, size // 8), generator=gen).float()
    label = F.interpolate(blocks, scale_factor=8, mode="nearest").long().squeeze(1)
    colours = torch.linspace(-1, 1, CLASSES)
    image = torch.stack([colours[label], colours.flip(0)[label] * 0.5, colours[(label * 2) % CLASSES]], 1)
    image = image + 0.6 * torch.randn(image.shape, generator=gen)
    label[torch.rand(label.shape, generator=gen) < 0.02] = IGNORE
    return image, label


class MasterSGD:
    """fp16 weights in the model, float32 copies that are updated; static loss scale."""

    def __init__(self, model, lr, loss_scale):
        self.model, self.loss_scale, self.skipped = model, loss_scale, 0
        self.master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.SGD(self.master, lr=lr, momentum=0.9)

    def step(self, loss):
        self.model.zero_grad(set_to_none=True)
        (loss.float() * self.loss_scale).backward()
        for m, p in zip(self.master, self.model.parameters()):
            m.grad = p.grad.float() / self.loss_scale
        if not all(m.grad.isfinite().all() for m in self.master):
            self.skipped += 1
            return
        self.optimizer.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model.parameters()):
                p.copy_(m)


def main():
    model = FCN().half()
    watch(model)
    optimizer = MasterSGD(model, lr=0.05, loss_scale=128.0)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
    gen = torch.Generator().manual_seed(22)
    step = 0
    for epoch, size in enumerate((64, 96, 136)):
        for _ in range(15):
            image, label = tiles(gen, 4, size)
            logits = model(image.half())
            loss = criterion(logits, label)  # CAUSE
            optimizer.step(loss)
            if step % 5 == 0:
                hit = (logits.argmax(1) == label)[label != IGNORE].float().mean().item()
                print(f"epoch {epoch} step {step} tiles {size} loss {loss.item():.4f} accuracy {hit:.3f} skipped {optimizer.skipped}")
            step += 1


if __name__ == "__main__":
    main()
