"""Tagging of token sequences with a Composer-like trainer: a run of 60 batches is interrupted and resumed from its checkpoint."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(1376)
VOCAB, DIM, LENGTH, TAGS, BATCH = 30, 32, 16, 5, 32


class ComposerTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.conv1, self.conv2 = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 3, padding=1)
        self.norm, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, TAGS)

    def forward(self, batch):
        x = self.emb(batch[0]).transpose(1, 2)
        x = x + F.gelu(self.conv1(x))
        x = x + F.gelu(self.conv2(x))
        return self.out(self.norm(x.transpose(1, 2)))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs.float().flatten(0, 1), batch[1].flatten(), reduction="sum") / 4


def sequences(seed):
    """The tag depends on a token and on its left neighbour."""
    gen = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=gen)
        yield ids, (ids + ids.roll(1, dims=1)) % TAGS


class State:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.scaler, self.batch = model, optimizer, None, 0

    def state_dict(self):
        out = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "batch": self.batch}
        if self.scaler is not None:
            out["scaler"] = self.scaler.state_dict()
        return out

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batch = state["batch"]
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


class Trainer:
    def __init__(self, model, optimizer, train_dataloader, max_batches, save_path=None, load_path=None):
        self.state, self.dataloader = State(model, optimizer), train_dataloader
        self.max_batches, self.save_path = max_batches, save_path
        if load_path is not None:
            self.state.load_state_dict(torch.load(load_path))

    def fit(self):
        self._train_loop()
        if self.save_path is not None:
            torch.save(self.state.state_dict(), self.save_path)

    def _train_loop(self):
        self.state.scaler = torch.amp.GradScaler("cpu")  # CAUSE
        model, optimizer, scaler = self.state.model, self.state.optimizer, self.state.scaler
        while self.state.batch < self.max_batches:
            batch = next(self.dataloader)
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = model(batch)
            loss = model.loss(outputs, batch)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            self.state.batch += 1
            if self.state.batch % 5 == 0 or self.state.batch in (41, 42, 43):
                accuracy = (outputs.argmax(-1) == batch[1]).float().mean().item()
                print(f"[batch={self.state.batch}/{self.max_batches}] loss/train/total: {4 * loss.item() / BATCH / LENGTH:.4f} "
                      f"accuracy: {accuracy:.4f} scale: {scaler.get_scale():g}")


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)


model = ComposerTagger()
watch(model)
with tempfile.TemporaryDirectory() as folder:
    checkpoint = os.path.join(folder, "ep0-ba40.pt")
    loader = sequences(17)
    Trainer(model, make_optimizer(model), loader, 40, save_path=checkpoint).fit()
    Trainer(model, make_optimizer(model), loader, 80, load_path=checkpoint).fit()
MODULES = (model,)
