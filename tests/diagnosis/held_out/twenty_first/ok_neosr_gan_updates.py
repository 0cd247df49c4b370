"""Super-resolution of short signals with an adversarial loss: one gradient scaler for both networks."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)
LENGTH, FACTOR, WIDTH, ITERS = 32, 2, 32, 90


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH // FACTOR, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2))
        self.tail = nn.Linear(WIDTH, LENGTH)

    def forward(self, lq):
        return self.tail(self.body(lq)) + lq.repeat_interleave(FACTOR, dim=-1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(LENGTH, WIDTH)), nn.LeakyReLU(0.2),
                                 nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.net(x)


class GANLoss(nn.Module):
    def forward(self, prediction, target_is_real):
        target = torch.full_like(prediction, float(target_is_real))
        return F.binary_cross_entropy_with_logits(prediction.float(), target.float())


def paired_data(gen, n=32):
    """Sums of two waves and their means over neighbouring samples."""
    t = torch.arange(LENGTH) / LENGTH
    f, phase = 1 + 4 * torch.rand(n, 2, 1, generator=gen), 6.28 * torch.rand(n, 2, 1, generator=gen)
    gt = (torch.tensor([1.0, 0.4])[:, None] * torch.sin(6.28 * f * t + phase)).sum(1)
    return gt.view(n, -1, FACTOR).mean(-1), gt


class SRModel:
    def __init__(self):
        self.net_g, self.net_d = Generator(), Discriminator()
        watch(self.net_g, self.net_d)
        self.optimizer_g = torch.optim.AdamW(self.net_g.parameters(), lr=3e-3, betas=(0.9, 0.99))
        self.optimizer_d = torch.optim.AdamW(self.net_d.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.gradscaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11, growth_interval=50)
        self.cri_gan, self.log_dict = GANLoss(), {}

    def autocast(self):
        return torch.autocast("cpu", dtype=torch.float16)

    def optimize_parameters(self, lq, gt):
        for p in self.net_d.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad(set_to_none=True)
        with self.autocast():
            output = self.net_g(lq)
            l_g_pix = F.l1_loss(output.float(), gt)
            l_g_gan = self.cri_gan(self.net_d(output), True)
            l_g_total = l_g_pix + 0.05 * l_g_gan
        self.gradscaler.scale(l_g_total).backward()
        self.gradscaler.unscale_(self.optimizer_g)
        torch.nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)
        self.gradscaler.step(self.optimizer_g)
        self.gradscaler.update()
        for p in self.net_d.parameters():
            p.requires_grad = True
        self.optimizer_d.zero_grad(set_to_none=True)
        with self.autocast():
            l_d_real = self.cri_gan(self.net_d(gt), True)
            l_d_fake = self.cri_gan(self.net_d(output.detach()), False)
        self.gradscaler.scale(l_d_real + l_d_fake).backward()
        self.gradscaler.unscale_(self.optimizer_d)
        torch.nn.utils.clip_grad_norm_(self.net_d.parameters(), 1.0)
        self.gradscaler.step(self.optimizer_d)
        self.gradscaler.update()
        self.log_dict = dict(l_g_pix=l_g_pix.item(), l_g_gan=l_g_gan.item(), l_d=(l_d_real + l_d_fake).item())


sr, gen, losses = SRModel(), torch.Generator().manual_seed(4), []
for current_iter in range(1, ITERS + 1):
    sr.optimize_parameters(*paired_data(gen))
    losses.append(sr.log_dict["l_g_pix"])
    if current_iter % 10 == 0:
        message = " ".join(f"{k}: {v:.4f}" for k, v in sr.log_dict.items())
        print(f"[iter: {current_iter}] {message} scale: {sr.gradscaler.get_scale():g}")
MODULES = (sr.net_g, sr.net_d)
