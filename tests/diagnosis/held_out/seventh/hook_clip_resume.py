"""Note-sequence GRU. Cell gradients are clamped inside BPTT; the job is preempted once and picks up from its checkpoint."""
import io
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
NOTES, STEPS, PREEMPT_AT = 24, 70, 36

class NoteRNN(nn.Module):
    def __init__(self, dim=40):
        super().__init__()
        self.emb = nn.Embedding(NOTES, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, NOTES)
        self.dim = dim

    def forward(self, notes, bound=None):
        h = notes.new_zeros(notes.size(0), self.dim, dtype=torch.float32)
        logits = []
        for t in range(notes.size(1)):
            h = self.cell(self.emb(notes[:, t]), h).float()
            if bound is not None and h.requires_grad:
                h.register_hook(lambda gr: gr.clamp(-bound, bound))
            logits.append(self.out(h))
        return torch.stack(logits, 1)

class Job:
    def __init__(self, net, seed=0):
        self.net = net
        self.data = torch.Generator().manual_seed(seed)
        self.build()

    def build(self):
        self.opt = torch.optim.Adam(self.net.parameters(), lr=4e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=7)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.99)
        self.step = 0

    def save(self):
        buf = io.BytesIO()
        parts = dict(net=self.net, opt=self.opt, scaler=self.scaler, sched=self.sched)
        torch.save({**{k: v.state_dict() for k, v in parts.items()}, "step": self.step, "rng": self.data.get_state()}, buf)
        return buf.getvalue()

    def load(self, blob):
        ck = torch.load(io.BytesIO(blob), weights_only=True)
        self.build()
        for name in ("net", "opt", "scaler", "sched"):
            getattr(self, name).load_state_dict(ck[name])
        self.step = ck["step"]
        self.data.set_state(ck["rng"])

    def phrases(self, n=24, t=12):
        start = torch.randint(0, NOTES, (n, 1), generator=self.data)
        leap = torch.randint(1, 5, (n, 1), generator=self.data)
        seq = (start + leap * torch.arange(t + 1)) % NOTES
        return seq[:, :-1], seq[:, 1:]

    def train_to(self, last):
        while self.step < last:
            x, y = self.phrases()
            scale = self.scaler.get_scale()
            with torch.autocast("cpu", dtype=torch.float16):
                logits = self.net(x, bound=4e-4 * scale)
                loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            norm = torch.stack([p.grad.norm() for p in self.net.parameters()]).norm().item() / scale
            self.scaler.step(self.opt)
            self.scaler.update()
            if self.scaler.get_scale() >= scale:
                self.sched.step()
            self.step += 1
            if self.step % 14 == 0:
                self.evaluate(loss.item(), norm)

    @torch.inference_mode()
    def evaluate(self, train_loss, norm):
        keep = self.data.get_state()
        x, y = self.phrases(64)
        self.data.set_state(keep)
        acc = (self.net(x).argmax(-1) == y)[:, 2:].float().mean().item()
        print(f"{self.step:3d} loss {train_loss:.3f} |g| {norm:.3f} acc {acc:.3f} scale {self.scaler.get_scale():.0f}")

torch.manual_seed(33)
net = NoteRNN()
MODULES = [net]
job = Job(net)
watch(*MODULES)
job.train_to(PREEMPT_AT)
blob = job.save()
job = Job(net)
job.load(blob)
job.train_to(STEPS)
