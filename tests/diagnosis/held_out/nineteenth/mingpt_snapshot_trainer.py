"""Character-level GPT in the style of the minGPT example: a Trainer with snapshots, mixed precision and gradient clipping."""
import io
from dataclasses import asdict, dataclass
from typing import Any, Dict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3407)


@dataclass
class TrainerConfig:
    max_epochs: int = 3
    batch_size: int = 16
    grad_norm_clip: float = 1.0
    save_every: int = 1
    use_amp: bool = True


@dataclass
class Snapshot:
    model_state: Dict[str, torch.Tensor]
    optimizer_state: Dict[str, Any]
    finished_epoch: int


class CharDataset(Dataset):
    def __init__(self, n, block, seed):
        words = ["the", "old", "mill", "by", "a", "river", "turns", "slowly", "and", "grinds", "corn", "for", "town"]
        gen = torch.Generator().manual_seed(seed)
        text = " ".join(words[i] for i in torch.randint(0, len(words), (4 * n,), generator=gen))
        chars = sorted(set(" ".join(words)))
        self.stoi, self.block, self.n = {c: i for i, c in enumerate(chars)}, block, n
        self.data = torch.tensor([self.stoi[c] for c in text])

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        chunk = self.data[i * 7: i * 7 + self.block + 1]
        return chunk[:-1], chunk[1:]


class Block(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.attn(self.ln1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block, d=48, layers=2):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab, d), nn.Parameter(torch.zeros(1, block, d))
        self.blocks = nn.Sequential(*[Block(d) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, idx, targets):
        logits = self.head(self.ln_f(self.blocks(self.tok_emb(idx) + self.pos_emb)))
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset, test_dataset):
        self.config, self.model, self.optimizer = config, model, optimizer
        self.train_loader = DataLoader(train_dataset, config.batch_size)
        self.test_loader = DataLoader(test_dataset, config.batch_size)
        self.snapshot = io.BytesIO()
        if config.use_amp:
            self.scaler = torch.amp.GradScaler("cpu")

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train), torch.autocast("cpu", dtype=torch.float16):
            _, loss = self.model(source, targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            if self.config.use_amp:
                self.scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)  # CAUSE
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
                self.optimizer.step()
        return loss.item()

    def _run_epoch(self, epoch, loader, train=True):
        losses = []
        for it, (source, targets) in enumerate(loader):
            losses.append(self._run_batch(source, targets, train))
            if it % 10 == 0:
                print(f"Epoch {epoch} | Iter {it} | {'Train' if train else 'Eval'} Loss {losses[-1]:.5f}")
        return sum(losses) / len(losses)

    def _save_snapshot(self, epoch):
        self.snapshot = io.BytesIO()
        snapshot = Snapshot(self.model.state_dict(), self.optimizer.state_dict(), epoch)
        torch.save(asdict(snapshot), self.snapshot)

    def train(self):
        for epoch in range(1, self.config.max_epochs + 1):
            train_loss = self._run_epoch(epoch, self.train_loader)
            if epoch % self.config.save_every == 0:
                self._save_snapshot(epoch)
            print(f"Epoch {epoch} mean loss {train_loss:.4f} "
                  f"test {self._run_epoch(epoch, self.test_loader, train=False):.4f}")


def create_optimizer(model, lr, weight_decay):
    decay = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay},
                              {"params": rest, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95))


train_set, test_set = CharDataset(480, 24, seed=1), CharDataset(48, 24, seed=2)
gpt = GPT(len(train_set.stoi), 24)
watch(gpt)
Trainer(TrainerConfig(), gpt, create_optimizer(gpt, lr=3e-4, weight_decay=0.1), train_set, test_set).train()
