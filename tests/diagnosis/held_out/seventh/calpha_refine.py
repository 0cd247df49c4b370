import argparse
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules):
        ...

def build_chain(n_prot, length, gen):
    """random C-alpha traces in crystal coordinates (Angstrom), 3.8 A between neighbours"""
    d = torch.randn(n_prot, length, 3, generator=gen)
    d = d + 0.8 * torch.randn(n_prot, 1, 3, generator=gen)
    d = 3.8 * d / d.norm(dim=-1, keepdim=True)
    origin = torch.tensor([182.0, -240.0, 310.0]) + 40 * torch.randn(n_prot, 1, 3, generator=gen)
    return origin + d.cumsum(1)

def incidence(length):
    m = torch.zeros(length - 1, length)
    idx = torch.arange(length - 1)
    m[idx, idx], m[idx, idx + 1] = -1.0, 1.0
    return m

class Refiner(nn.Module):
    def __init__(self, n_res=20, width=64):
        super().__init__()
        self.emb = nn.Embedding(n_res, 16)
        self.gru = nn.Conv1d(16 + 3, width, 5, padding=2)
        self.mid = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Conv1d(width, 3, 1)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, seq, pos):
        local = pos - pos.mean(1, keepdim=True)
        kinks = nn.functional.pad(local[:, 2:] - 2 * local[:, 1:-1] + local[:, :-2], (0, 0, 1, 1))
        h = torch.cat([self.emb(seq), kinks], -1).transpose(1, 2)
        h = torch.relu(self.gru(h))
        h = torch.relu(self.mid(h))
        return self.out(h).transpose(1, 2)

class BondRestraint(nn.Module):
    def __init__(self, length, ideal=3.8):
        super().__init__()
        self.register_buffer("inc", incidence(length))
        self.ideal = ideal

    def forward(self, pos):
        bonds = self.inc @ pos  # CAUSE
        return (bonds.float().norm(dim=-1) - self.ideal).square().mean()

args = argparse.Namespace(steps=80, length=28, batch=16, lr=2e-3, seed=11)
torch.set_num_threads(1)
torch.manual_seed(args.seed)
gen = torch.Generator().manual_seed(args.seed)
model, restraint = Refiner(), BondRestraint(args.length)
MODULES = [model, restraint]

def main():
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    bias = 0.08 * torch.randn(20, 3, generator=gen)      # side-chain dependent shift of the tracer
    watch(*MODULES)
    for step in range(args.steps):
        native = build_chain(args.batch, args.length, gen)
        seq = torch.randint(0, 20, (args.batch, args.length), generator=gen)
        model_pos = native + bias[seq] + 0.005 * torch.randn(native.shape, generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            shift = model(seq, model_pos)
            refined = model_pos + shift.float()
            bond = restraint(refined)
            loss = bond + 0.01 * shift.float().square().mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        sched.step()
        if step % 20 == 0 or step == args.steps - 1:
            print(f"{step:3d} loss {loss.item():.5f} bond rmsd {bond.sqrt().item():.4f}")

main()
