"""Novel views from posed pictures: a small decoder-only view transformer, updates with a large gradient norm are skipped."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(81)


class Config:
    patch, side, d, views = 4, 12, 64, 2
    lr, grad_clip_norm, allowed_gradnorm_factor, steps, accum = 2e-3, 1.0, 5.0, 90, 1


class LVSM(nn.Module):
    """Patches of the input views with their rays, and patches of rays alone for the target view."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        self.image_tokenizer = nn.Linear(4 * c.patch ** 2, c.d, bias=False)
        self.target_tokenizer = nn.Linear(3 * c.patch ** 2, c.d, bias=False)
        layer = nn.TransformerEncoderLayer(c.d, 4, 2 * c.d, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.decoder = nn.LayerNorm(c.d), nn.Linear(c.d, c.patch ** 2)

    def patches(self, x):
        return F.unfold(x, self.c.patch, stride=self.c.patch).transpose(1, 2)

    def forward(self, images, rays, target_rays):
        n, v = images.shape[:2]
        posed = torch.cat([images.flatten(0, 1), rays.flatten(0, 1)], 1)
        tokens = self.image_tokenizer(self.patches(posed)).view(n, -1, self.c.d)
        target = self.target_tokenizer(self.patches(target_rays))
        out = self.transformer(torch.cat([tokens, target], 1))[:, -target.size(1):]
        return F.fold(self.decoder(self.norm(out)).transpose(1, 2), self.c.side, self.c.patch, stride=self.c.patch)


def scenes(gen, c, n=6, exposure=1.0):
    """A sine texture on a plane that three cameras see shifted; the rays say how far."""
    phase, freq = 6.28 * torch.rand(n, 1, 1, 1, generator=gen), 0.3 + 0.5 * torch.rand(n, 1, 1, 1, generator=gen)
    shift = 6 * torch.rand(n, c.views + 1, 1, 1, generator=gen)
    grid = torch.arange(c.side, dtype=torch.float32)
    x = grid.view(1, 1, 1, -1) + shift
    image = exposure * torch.sin(freq * x + phase).expand(-1, -1, c.side, -1)
    rays = torch.stack([x.expand(-1, -1, c.side, -1) / 9, (grid / 6).view(1, 1, -1, 1).expand(n, c.views + 1, -1, c.side),
                        torch.ones(n, c.views + 1, c.side, c.side)], 2)
    return image[:, :-1, None], rays[:, :-1], rays[:, -1], image[:, -1:]


def main():
    c = Config()
    model = LVSM(c)
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
    gen = torch.Generator().manual_seed(82)
    skipped = 0
    for step in range(c.steps):
        exposure = 12.0 if step in (37, 62) else 1.0  # two recordings with a wrong exposure
        images, rays, target_rays, target = scenes(gen, c, exposure=exposure)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(images, rays, target_rays).float(), target)
        scaler.scale(loss).backward()
        update_step = (step + 1) % c.accum == 0
        if update_step:
            scaler.unscale_(optimizer)
            total_grad_norm = nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip_norm).item()
            skip_optimizer_step = False
            if total_grad_norm > c.grad_clip_norm * c.allowed_gradnorm_factor:
                skip_optimizer_step = True
                skipped += 1
                print(f"WARNING: step {step} grad norm too large {total_grad_norm:.2f}, skipping optimizer step")
            if not skip_optimizer_step:  # CAUSE
                scaler.step(optimizer)
                scaler.update()  # CAUSE
            optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.4f} norm {total_grad_norm:.3f} scale {scaler.get_scale():g} skipped {skipped}")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        print("training stopped:", error)
