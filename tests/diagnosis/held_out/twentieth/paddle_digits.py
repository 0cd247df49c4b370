"""Digit classifier in the style of a dynamic-graph AMP tutorial: small convolutional net, momentum, dynamic loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(67895)
CLASS_DIM, SIDE, BATCH_SIZE, EPOCHS, BATCHES = 8, 12, 24, 4, 20


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.linear1, self.linear2 = nn.Linear(16 * 9, 48), nn.Linear(48, CLASS_DIM)

    def forward(self, image):
        x = F.max_pool2d(F.relu(self.conv1(image)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


class Digits(torch.utils.data.Dataset):
    """Stroke patterns, shifted by a pixel and covered with noise, in grey values from 0 to 255."""

    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        strokes = (torch.rand(CLASS_DIM, SIDE, SIDE, generator=torch.Generator().manual_seed(3)) < 0.3).float()
        strokes = F.avg_pool2d(strokes[:, None], 3, stride=1, padding=1)[:, 0] * 2
        self.labels = torch.randint(0, CLASS_DIM, (n,), generator=gen)
        shift = torch.randint(-1, 2, (n, 2), generator=gen).tolist()
        images = torch.stack([strokes[y].roll(tuple(s), (0, 1)) for y, s in zip(self.labels, shift)])
        images = images + 0.15 * torch.randn(images.shape, generator=gen)
        self.images = (images.clamp(0, 1) * 255).round()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i][None] / 127.5 - 1, self.labels[i]


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = total = 0
    for image, label in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            predict = model(image)
        right, total = right + int((predict.argmax(1) == label).sum()), total + len(label)
    model.train()
    return right / total


def train():
    loader = torch.utils.data.DataLoader(Digits(BATCH_SIZE * BATCHES, 1), batch_size=BATCH_SIZE, shuffle=True,
                                         generator=torch.Generator().manual_seed(2))
    test_loader = torch.utils.data.DataLoader(Digits(96, 5), batch_size=48)
    model = SimpleNet()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=15)
    loss_func = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        for batch_id, (image, label) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):  # CAUSE
                predict = model(image)
                loss = loss_func(predict.float(), label)
            scaled = scaler.scale(loss)
            scaled.backward()
            scaler.step(optimizer)
            scaler.update()
            if batch_id % 10 == 9:
                print(f"epoch {epoch} batch_id {batch_id} loss {loss.item():.4f} loss_scaling {scaler.get_scale():g}")
        print(f"epoch {epoch} accuracy {evaluate(model, test_loader):.3f}")
    return model


model = train()
MODULES = (model,)
