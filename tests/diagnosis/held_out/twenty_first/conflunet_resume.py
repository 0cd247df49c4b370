"""Lesion instances in small volumes: segmentation, centre heat map and offsets; training goes on from a checkpoint."""
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
torch.manual_seed(16)
SIDE, CHANNELS, BATCH, EPOCHS = 8, 12, 4, 9


class ConvBlock(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.conv, self.norm = nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.conv(x)))


class ConfLUNet(nn.Module):
    def __init__(self, ch=CHANNELS):
        super().__init__()
        self.enc, self.down, self.dec = ConvBlock(1, ch), ConvBlock(ch, ch), ConvBlock(2 * ch, ch)
        self.sem, self.center, self.offsets = nn.Conv3d(ch, 2, 1), nn.Conv3d(ch, 1, 1), nn.Conv3d(ch, 3, 1)

    def forward(self, x):
        skip = self.enc(x)
        up = self.down(F.max_pool3d(skip, 2)).repeat_interleave(2, 2).repeat_interleave(2, 3).repeat_interleave(2, 4)
        h = self.dec(torch.cat((skip, up), dim=1))
        return self.sem(h), self.center(h), self.offsets(h)


def volumes(gen):
    """One bright blob in each noisy volume with its centre and the offsets towards it."""
    grid = torch.stack(torch.meshgrid(*[torch.arange(float(SIDE))] * 3, indexing="ij"))
    centre = 2 + (SIDE - 4) * torch.rand(BATCH, 3, 1, 1, 1, generator=gen)
    offsets = centre - grid
    dist = offsets.pow(2).sum(1, keepdim=True)
    image = torch.exp(-dist / 6) + 0.1 * torch.randn(BATCH, 1, SIDE, SIDE, SIDE, generator=gen)
    return image, (dist[:, 0] < 5).long(), torch.exp(-dist / 4), offsets


def criterion(outputs, seg, heatmap, offsets, seg_weight=1.0, heatmap_weight=100.0, offsets_weight=10.0):
    sem, center, offs = (o.float() for o in outputs)
    lesion = seg[:, None].float()
    seg_loss = F.cross_entropy(sem, seg)
    center_loss = F.mse_loss(center, heatmap)
    offset_loss = ((offs - offsets).abs() * lesion).sum() / BATCH
    return seg_weight * seg_loss + heatmap_weight * center_loss + offsets_weight * offset_loss


def save_checkpoint(path, epoch, model, optimizer, lr_scheduler, scaler):
    torch.save({"epoch": epoch, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict(),
                "lr_scheduler": lr_scheduler.state_dict(), "scaler": scaler.state_dict()}, path)


def load_checkpoint(path, model, optimizer, lr_scheduler, scaler):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    lr_scheduler.load_state_dict(checkpoint["lr_scheduler"])
    return checkpoint["epoch"] + 1  # CAUSE


def main(args_save_path, continue_training, n_epochs, batches_per_epoch=8):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS, eta_min=5e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
    path = os.path.join(args_save_path, "checkpoint.pth")
    start_epoch = load_checkpoint(path, model, optimizer, lr_scheduler, scaler) if continue_training else 0
    for epoch in range(start_epoch, n_epochs):
        gen = torch.Generator().manual_seed(90 + epoch)
        for _ in range(batches_per_epoch):
            image, seg, heatmap, offsets = volumes(gen)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = model(image)
            loss = criterion(outputs, seg, heatmap, offsets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        lr_scheduler.step()
        mean = sum(losses[-batches_per_epoch:]) / batches_per_epoch
        print(f"epoch {epoch + 1}/{n_epochs} loss {mean:.2f} scale {scaler.get_scale():g}")
        save_checkpoint(path, epoch, model, optimizer, lr_scheduler, scaler)


losses = []
model = ConfLUNet()
watch(model)
with tempfile.TemporaryDirectory() as save_path:
    main(save_path, continue_training=False, n_epochs=5)
    main(save_path, continue_training=True, n_epochs=EPOCHS)
MODULES = (model,)
