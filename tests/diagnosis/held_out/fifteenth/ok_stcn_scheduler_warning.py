"""Video object segmentation with a space-time memory; the scheduler is stepped in every iteration."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(44)


class KeyEncoder(nn.Module):
    def __init__(self, ch=16, key=16):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, ch, 3, stride=2, padding=1), nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.key = nn.Conv2d(ch, key, 1)

    def forward(self, frame):
        f4 = F.relu(self.c1(frame))
        f8 = F.relu(self.c2(f4))
        return self.key(f8), f8, f4


class STCN(nn.Module):
    def __init__(self, ch=16, value=24):
        super().__init__()
        self.key_encoder = KeyEncoder(ch)
        self.value_encoder = nn.Sequential(nn.Conv2d(4, ch, 3, stride=2, padding=1), nn.ReLU(),
                                           nn.Conv2d(ch, value, 3, stride=2, padding=1))
        self.fuse, self.skip = nn.Conv2d(value + ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 1)
        self.pred = nn.Conv2d(ch, 1, 3, padding=1)

    @staticmethod
    def affinity(mk, qk):
        """Negative squared distance between memory and query keys, in single precision."""
        mk, qk = mk.flatten(2).float(), qk.flatten(2).float()
        with torch.autocast("cpu", enabled=False):
            a = (2 * mk.transpose(1, 2) @ qk - mk.pow(2).sum(1).unsqueeze(2)) / mk.shape[1] ** 0.5
            return F.softmax(a, dim=1)

    def forward(self, frames, first_mask):
        keys = [self.key_encoder(frames[:, t]) for t in range(frames.shape[1])]
        values = [self.value_encoder(torch.cat([frames[:, 0], first_mask], 1)).flatten(2)]
        memory, logits = [keys[0][0]], []
        for t in range(1, frames.shape[1]):
            qk, f8, f4 = keys[t]
            w = self.affinity(torch.cat([m.flatten(2) for m in memory], 2), qk)
            read = (torch.cat(values, 2) @ w.to(values[0].dtype)).view(f8.shape[0], -1, *f8.shape[2:])
            x = F.relu(self.fuse(torch.cat([read, f8], 1)))
            x = F.interpolate(x, scale_factor=2, mode="bilinear") + self.skip(f4)
            out = F.interpolate(self.pred(F.relu(x)), scale_factor=2, mode="bilinear")
            logits.append(out)
            memory.append(qk)
            values.append(self.value_encoder(torch.cat([frames[:, t], torch.sigmoid(out)], 1)).flatten(2))
        return torch.stack(logits, 1)


def clips(gen, n=3, t=3):
    pos, vel = 8 + 8 * torch.rand(n, 2, generator=gen), torch.randn(n, 2, generator=gen) * 1.5
    yy, xx = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    masks = torch.stack([(((yy - (pos + k * vel)[:, 0, None, None]) ** 2 + (xx - (pos + k * vel)[:, 1, None, None]) ** 2) < 36).float()
                         for k in range(t)], 1).unsqueeze(2)
    colour = 2 * torch.randn(n, 1, 3, 1, 1, generator=gen)
    return masks * colour + 0.5 * torch.randn(n, t, 3, 24, 24, generator=gen), masks


class STCNModel:
    def __init__(self, lr=4e-3, steps=(40,), gamma=0.3):
        self.net = STCN()
        watch(self.net)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr, weight_decay=1e-7)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, steps, gamma)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18, growth_interval=2000)

    def do_pass(self, frames, masks, it):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.net(frames, masks[:, 0])
            loss = F.binary_cross_entropy_with_logits(logits.float(), masks[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if it % 8 == 0:
            inter = ((logits > 0) & masks[:, 1:].bool()).sum().item()
            union = ((logits > 0) | masks[:, 1:].bool()).sum().item()
            print(f"it {it} loss {loss.item():.4f} iou {inter / max(union, 1):.3f} lr {self.scheduler.get_last_lr()[0]:.0e} "
                  f"scale {self.scaler.get_scale():.0f}")


if __name__ == "__main__":
    model, gen = STCNModel(), torch.Generator().manual_seed(9)
    for it in range(60):
        model.do_pass(*clips(gen), it)
