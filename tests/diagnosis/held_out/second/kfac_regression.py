import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class KFAC:
    """Kronecker-factored preconditioning of the Linear layers, factors of the current batch."""

    def __init__(self, model, lr=0.05, damping=1e-2):
        self.lr, self.damping = lr, damping
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        self.A, self.G = {}, {}
        for m in self.layers:
            m.register_forward_pre_hook(self.save_input)
            m.register_full_backward_hook(self.save_grad)

    def save_input(self, m, args):
        if not torch.is_grad_enabled():
            return
        a = args[0].detach()
        self.A[m] = (a.t() @ a).float() / a.shape[0]  # CAUSE

    def save_grad(self, m, gin, gout):
        g = gout[0].detach().float() * gout[0].shape[0]
        self.G[m] = g.t() @ g / g.shape[0]

    @torch.no_grad()
    def precondition(self, scale):
        for m in self.layers:
            A, G = self.A[m], self.G[m] / scale ** 2
            pi = ((A.trace() / A.shape[0]) / (G.trace() / G.shape[0] + 1e-12)).sqrt()
            lam = self.damping ** 0.5
            ia = torch.linalg.inv_ex(A + lam * pi * torch.eye(A.shape[0])).inverse
            ig = torch.linalg.inv_ex(G + lam / pi * torch.eye(G.shape[0])).inverse
            m.weight.grad.copy_(ig @ m.weight.grad @ ia)


def make_batch(gen, n, surge):
    x = torch.randn(n, 20, generator=gen)
    x[:, :4] = x[:, :4] * 1.5 + 9.0
    if surge:
        x[:, 3] = x[:, 3] + 4.0
    y = torch.sin(x[:, 4:5]) + 0.1 * x[:, :1] * x[:, 5:6] + 0.05 * torch.randn(n, 1, generator=gen)
    return x, y


def main():
    global MODULES
    torch.set_num_threads(1)
    torch.manual_seed(21)
    gen = torch.Generator().manual_seed(21)
    model = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 1))
    MODULES = [model]
    kfac = KFAC(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    watch(*MODULES)
    scale = 64.0
    for step in range(1, 61):
        x, y = make_batch(gen, 512, surge=step in (27, 28, 51))
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = nn.functional.smooth_l1_loss(pred.float(), y)
        opt.zero_grad()
        (loss * scale).backward()
        for p in model.parameters():
            p.grad.div_(scale)
        kfac.precondition(scale)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 6 == 0:
            print(f"{step:3d} {loss.item():.5f}")


MODULES = []
main()
