"""Digit classifier trained with apex-style amp.initialize and opt_level O3."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(240)
BATCH, LOG_INTERVAL = 32, 10
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcfgd")


class amp:
    """The part of apex.amp that the script needs: opt_level O3 is half precision throughout, loss scale 1."""
    opt_level, loss_scale = "O0", 1.0

    @classmethod
    def initialize(cls, model, optimizer, opt_level="O1"):
        cls.opt_level = opt_level
        if opt_level == "O3":
            model = model.half()
        return model, optimizer

    class scale_loss:
        def __init__(self, loss, optimizer):
            self.loss = loss

        def __enter__(self):
            return self.loss.float() * amp.loss_scale

        def __exit__(self, *exc):
            return False


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * 3 * 3, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x).float(), dim=1)


def draw(digit, dx, dy):
    """Seven-segment digit on a 12 x 12 canvas, shifted by a pixel or two."""
    canvas = torch.zeros(12, 12)
    bars = {"a": (1, 1, 3, 8), "g": (5, 5, 3, 8), "d": (9, 9, 3, 8), "f": (1, 5, 3, 3), "b": (1, 5, 7, 7), "e": (5, 9, 3, 3),
            "c": (5, 9, 7, 7)}
    for segment in SEGMENTS[digit]:
        top, bottom, left, right = bars[segment]
        canvas[top:bottom + 1, left:max(left + 1, right)] = 1.0
    return torch.roll(canvas, (dy, dx), (0, 1))


class DigitLoader:
    def __init__(self, n_batches, seed):
        self.n_batches, self.gen = n_batches, torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.n_batches

    def __iter__(self):
        for _ in range(self.n_batches):
            target = torch.randint(0, 10, (BATCH,), generator=self.gen)
            shift = torch.randint(-1, 2, (BATCH, 2), generator=self.gen)
            data = torch.stack([draw(int(t), int(x), int(y)) for t, (x, y) in zip(target, shift)])[:, None]
            data = (data + 0.25 * torch.randn(data.shape, generator=self.gen) - 0.2) / 0.4
            yield data, target


def train(model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data = data.to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if batch_idx % LOG_INTERVAL == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * BATCH}/{len(train_loader) * BATCH}]\tLoss: {loss.item():.6f}")


@torch.no_grad()
def test(model, test_loader):
    model.eval()
    correct = total = 0
    for data, target in test_loader:
        output = model(data.to(next(model.parameters()).dtype))
        correct, total = correct + (output.argmax(1) == target).sum().item(), total + len(target)
    print(f"Test set: Accuracy: {correct}/{total} ({100.0 * correct / total:.0f}%)")


model = Net()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # CAUSE
model, optimizer = amp.initialize(model, optimizer, opt_level="O3")
for epoch in range(1, 3):
    train(model, DigitLoader(40, epoch), optimizer, epoch)
    test(model, DigitLoader(6, 100))
MODULES = (model,)
