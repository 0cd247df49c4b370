"""Image classifier in a trainer with a state object, run in three jobs that follow one another."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1376)
CLASSES, SIDE, BATCH = 6, 8, 32


class ResidualBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.norm(x))))


class ComposerClassifier(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.patch, self.blocks = nn.Linear(3 * 4 * 4, d), nn.Sequential(ResidualBlock(d), ResidualBlock(d))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, CLASSES)

    def forward(self, batch):
        x = batch[0].unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        return self.head(self.norm(self.blocks(self.patch(x)).mean(1)))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.float(), batch[1], reduction="sum")


class State:
    """All that a checkpoint holds."""

    serialized_attributes = ("model", "optimizer", "scaler", "batches")

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.scaler, self.batches = model, optimizer, None, 0

    def state_dict(self):
        out = {}
        for name in self.serialized_attributes:
            value = getattr(self, name)
            out[name] = copy.deepcopy(value.state_dict()) if hasattr(value, "state_dict") else value
        return out

    def load_state_dict(self, saved):
        for name in self.serialized_attributes:
            value = getattr(self, name)
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(saved[name])
            elif not isinstance(saved[name], dict):
                setattr(self, name, saved[name])


class Trainer:
    def __init__(self, model, dataloader, lr=0.05, precision=torch.float16, load_object=None):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr / BATCH, momentum=0.9)
        self.state, self.dataloader, self.precision = State(model, optimizer), dataloader, precision
        if load_object is not None:
            self.state.load_state_dict(load_object)

    def fit(self, duration):
        self._train_loop(self.state.batches + duration)

    def _train_loop(self, max_batches):
        self.state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)  # CAUSE
        model, optimizer, scaler = self.state.model, self.state.optimizer, self.state.scaler
        while self.state.batches < max_batches:
            batch = self.dataloader(self.state.batches)
            with torch.autocast("cpu", dtype=self.precision):
                outputs = model(batch)
            loss = model.loss(outputs, batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            self.state.batches += 1
            losses.append(loss.item() / BATCH)
            if self.state.batches % 8 == 0:
                print(f"batch {self.state.batches} loss/train {losses[-1]:.4f} scale {scaler.get_scale():g}")


def synthetic_images(index):
    """Six kinds of coloured stripes, brightness varies."""
    gen = torch.Generator().manual_seed(77 + index)
    kinds = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(3)).repeat(1, 1, 2, 2)
    y = torch.randint(0, CLASSES, (BATCH,), generator=gen)
    brightness = 20 * torch.exp(0.3 * torch.randn(BATCH, 1, 1, 1, generator=gen))
    return brightness * (kinds[y] + 5.0 * torch.randn(BATCH, 3, SIDE, SIDE, generator=gen)), y


losses = []
model = ComposerClassifier()
watch(model)
checkpoint = None
for job in range(3):
    trainer = Trainer(model, synthetic_images, load_object=checkpoint)
    trainer.fit(duration=24)
    checkpoint = trainer.state.state_dict()
MODULES = (model,)
