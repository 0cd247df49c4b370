"""Optical flow without labels; the loss is scaled by 1024 for the backward pass, the gradients are divided before the step."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(149)


class PWCLite(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(c, c, 3, padding=1), nn.LeakyReLU(0.1))
        self.estimator = nn.Sequential(nn.Conv2d(25 + c, 2 * c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(2 * c, 2, 3, padding=1))

    def forward(self, pair):
        a, b = self.features(pair[:, :1]), self.features(pair[:, 1:])
        h, w = a.shape[2:]
        padded = F.pad(b, (2, 2, 2, 2))
        cost = [(a * padded[:, :, i:i + h, j:j + w]).mean(1, keepdim=True) for i in range(5) for j in range(5)]
        return self.estimator(torch.cat([F.leaky_relu(torch.cat(cost, 1), 0.1), a], 1))


def flow_warp(x, flow):
    n, _, h, w = x.shape
    grid = F.affine_grid(torch.eye(2, 3).expand(n, -1, -1), x.shape, align_corners=False)
    return F.grid_sample(x, grid + flow.permute(0, 2, 3, 1) * torch.tensor([2 / w, 2 / h]), padding_mode="border", align_corners=False)


class UnFlowLoss(nn.Module):
    def forward(self, flow, pair):
        im1, recons = pair[:, :1], flow_warp(pair[:, 1:], flow)
        photometric = (im1 - recons).abs().mean()
        smooth = flow.diff(dim=2).abs().mean() + flow.diff(dim=3).abs().mean()
        return photometric + 0.02 * smooth, photometric, flow.abs().mean()


def pairs(gen, n=3, size=20):
    big = F.interpolate(torch.rand(n, 1, 8, 8, generator=gen), size=(size + 4, size + 4), mode="bicubic", align_corners=False)
    flow = 1.5 * (2 * torch.rand(n, 2, 1, 1, generator=gen) - 1)
    im1 = big
    im2 = flow_warp(big, -flow.expand(-1, -1, size + 4, size + 4))
    return torch.cat([im1, im2], 1)[:, :, 2:-2, 2:-2], flow


class TrainFramework:
    def __init__(self):
        self.model, self.loss_func = PWCLite(), UnFlowLoss()
        watch(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=6e-3, betas=(0.9, 0.999), eps=1e-7)

    def run_one_epoch(self, batches):
        for i_step, (pair, true_flow) in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.float16):
                flow = self.model(pair)
            flow = flow.float()
            loss, photometric, flow_mean = self.loss_func(flow, pair)
            self.optimizer.zero_grad()
            scaled_loss = 1024.0 * loss
            scaled_loss.backward()
            for param in [p for p in self.model.parameters() if p.requires_grad]:
                param.grad.data.mul_(1.0 / 1024)
            self.optimizer.step()
            if i_step % 15 == 0 or i_step == len(batches) - 1:
                epe = (flow - true_flow).norm(dim=1).mean().item()
                print(f"{i_step} loss {loss.item():.4f} ph {photometric.item():.4f} flow_mean {flow_mean.item():.3f} EPE {epe:.3f}")


gen = torch.Generator().manual_seed(150)
TrainFramework().run_one_epoch([pairs(gen) for _ in range(4)] * 20)
