"""Gated graph network that finds the misused variable in small program graphs; epoch-wise trainer with early stopping."""
import logging
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
EDGE_TYPES, HIDDEN, NODES = 3, 32, 14


def sample_graph(gen):
    """A chain of tokens, a tree above it and data-flow edges; one node uses a variable without a definition."""
    kinds = torch.randint(0, 6, (NODES,), generator=gen)
    parents = [int(torch.randint(0, i, (1,), generator=gen)) for i in range(1, NODES)]
    bug = int(torch.randint(4, NODES, (1,), generator=gen))
    flow = [(i, j) for i in range(NODES) for j in range(i + 1, NODES) if kinds[i] == kinds[j] and j != bug]
    edges = [[(i, i + 1) for i in range(NODES - 1)], [(p, i + 1) for i, p in enumerate(parents)], flow or [(0, 1)]]
    kinds[bug] = 6
    if torch.rand((), generator=gen) < 0.7:
        kinds[bug] = kinds[(bug + 3) % NODES]
    return kinds, edges, bug


class GatedLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2 * EDGE_TYPES))
        self.gates, self.cand = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, h, adjacency):
        inbox = sum(a @ m(h) for a, m in zip(adjacency, self.messages))
        z, r = torch.sigmoid(self.gates(torch.cat((inbox, h), -1))).chunk(2, -1)
        return (1 - z) * h + z * torch.tanh(self.cand(torch.cat((inbox, r * h), -1)))


class BugLocalizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, HIDDEN)
        self.layers = nn.ModuleList(GatedLayer(HIDDEN) for _ in range(3))
        self.score = nn.Sequential(nn.Linear(2 * HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))
        self.reset_metrics()

    def reset_metrics(self):
        self.correct, self.total = 0, 0

    def report_metrics(self):
        return {"accuracy": self.correct / max(1, self.total)}

    def forward(self, kinds, adjacency, target):
        h0 = h = self.embed(kinds)
        for layer in self.layers:
            h = layer(h, adjacency)
        logits = self.score(torch.cat((h0, h), -1)).squeeze(-1).float()
        self.correct += (logits.argmax(-1) == target).sum().item()
        self.total += len(target)
        return F.cross_entropy(logits, target)


class ModelTrainer:
    LOGGER = logging.getLogger(__name__)

    def __init__(self, network, *, max_num_epochs=5, minibatch_size=16, clip_gradient_norm=1.0, enable_amp=True):
        self.network, self.epochs, self.minibatch_size = network, max_num_epochs, minibatch_size
        self.clip_gradient_norm, self.enable_amp = clip_gradient_norm, enable_amp

    def minibatch_iterator(self, graphs):
        for i in range(0, len(graphs) - self.minibatch_size + 1, self.minibatch_size):
            chunk = graphs[i:i + self.minibatch_size]
            adjacency = torch.zeros(2 * EDGE_TYPES, len(chunk), NODES, NODES)
            for b, (_, edges, _) in enumerate(chunk):
                for t, pairs in enumerate(edges):
                    for s, d in pairs:
                        adjacency[2 * t, b, d, s] = adjacency[2 * t + 1, b, s, d] = 1
            adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
            yield {"kinds": torch.stack([g[0] for g in chunk]), "adjacency": adjacency,
                   "target": torch.tensor([g[2] for g in chunk])}

    def _run_training(self, graphs, epoch, optimizer):
        sum_epoch_loss, num_minibatches = 0.0, 0
        self.network.train()
        self.network.reset_metrics()
        scaler = torch.amp.GradScaler("cpu", enabled=self.enable_amp)
        for mb_data in self.minibatch_iterator(graphs):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                mb_loss = self.network(**mb_data)
            mb_loss = scaler.scale(mb_loss)  # CAUSE
            mb_loss.backward()
            if self.clip_gradient_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.clip_gradient_norm)
            scaler.step(optimizer)
            scaler.update()
            num_minibatches += 1
            mb_loss = mb_loss.item()  # CAUSE
            if math.isnan(mb_loss):
                raise Exception("Loss has a NaN value.")
            sum_epoch_loss += mb_loss
        self.LOGGER.info("Epoch %i: Train Loss %.2f", epoch + 1, sum_epoch_loss / num_minibatches)
        self.LOGGER.info("Training Metrics: %s", self.network.report_metrics())

    def _run_validation(self, graphs, epoch, best):
        self.network.eval()
        self.network.reset_metrics()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            losses = [float(self.network(**mb)) for mb in self.minibatch_iterator(graphs)]
        loss = sum(losses) / len(losses)
        self.LOGGER.info("Epoch %i: Valid Loss %.2f %s", epoch + 1, loss, self.network.report_metrics())
        return min(best, loss), loss < best

    def train(self, training, validation, patience=2):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=4e-3)
        best, stale = math.inf, 0
        for epoch in range(self.epochs):
            self._run_training(training, epoch, optimizer)
            best, improved = self._run_validation(validation, epoch, best)
            stale = 0 if improved else stale + 1
            if stale > patience:
                break


gen = torch.Generator().manual_seed(22)
train_graphs, valid_graphs = [sample_graph(gen) for _ in range(320)], [sample_graph(gen) for _ in range(96)]
network = BugLocalizer()
watch(network)
ModelTrainer(network).train(train_graphs, valid_graphs)
