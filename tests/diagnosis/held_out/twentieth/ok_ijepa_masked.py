"""Joint-embedding prediction of masked patches: context encoder, predictor, averaged target encoder, bf16 with a scaler."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(64)
PATCHES, PATCH_DIM, DIM, PRED_DIM, BATCH = 16, 12, 48, 32, 24
use_bfloat16, ema, ipe, num_epochs = True, (0.98, 1.0), 20, 5


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.norm2, self.qkv, self.proj = nn.LayerNorm(d), nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


def apply_masks(x, keep):
    return x.gather(1, keep[..., None].expand(-1, -1, x.size(-1)))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed, self.pos_embed = nn.Linear(PATCH_DIM, DIM), nn.Parameter(0.3 * torch.randn(1, PATCHES, DIM))
        self.blocks, self.norm = nn.Sequential(Block(DIM), Block(DIM)), nn.LayerNorm(DIM)

    def forward(self, imgs, masks=None):
        x = self.patch_embed(imgs) + self.pos_embed
        if masks is not None:
            x = apply_masks(x, masks)
        return self.norm(self.blocks(x))


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos_embed = nn.Linear(DIM, PRED_DIM), nn.Parameter(0.3 * torch.randn(1, PATCHES, PRED_DIM))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, PRED_DIM))
        self.blocks, self.norm, self.proj = Block(PRED_DIM), nn.LayerNorm(PRED_DIM), nn.Linear(PRED_DIM, DIM)

    def forward(self, z, masks_enc, masks_pred):
        pos = self.pos_embed.expand(len(z), -1, -1)
        x = self.embed(z) + apply_masks(pos, masks_enc)
        queries = self.mask_token + apply_masks(pos, masks_pred)
        x = self.norm(self.blocks(torch.cat((x, queries), dim=1)))
        return self.proj(x[:, z.size(1):])


def load_imgs(gen):
    """Pictures of a few scenes: patches share colour and gradient of their scene."""
    scenes = torch.randn(6, PATCHES, PATCH_DIM, generator=torch.Generator().manual_seed(3))
    c = torch.randint(0, 6, (BATCH,), generator=gen)
    imgs = scenes[c] * (0.8 + 0.4 * torch.rand(BATCH, 1, 1, generator=gen)) + 0.2 * torch.randn(BATCH, PATCHES, PATCH_DIM, generator=gen)
    order = torch.stack([torch.randperm(PATCHES, generator=gen) for _ in range(BATCH)])
    return imgs, order[:, :11], order[:, 11:]


encoder, predictor = VisionTransformer(), Predictor()
target_encoder = copy.deepcopy(encoder)
for p in target_encoder.parameters():
    p.requires_grad = False
trained = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
watch(trained)
optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3, weight_decay=0.04)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16) if use_bfloat16 else None
steps = ipe * num_epochs
momentum_scheduler = (ema[0] + i * (ema[1] - ema[0]) / steps for i in range(steps + 1))
gen = torch.Generator().manual_seed(8)


def train_step(itr):
    imgs, masks_enc, masks_pred = load_imgs(gen)
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * min(1.0, (itr + 1) / 10) * 0.5 * (1 + math.cos(math.pi * itr / steps))

    def forward_target():
        with torch.no_grad():
            h = target_encoder(imgs)
            h = F.layer_norm(h.float(), (h.size(-1),))
            return apply_masks(h, masks_pred)

    def forward_context():
        return predictor(encoder(imgs, masks_enc), masks_enc, masks_pred)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=use_bfloat16):
        h = forward_target()
        z = forward_context()
        loss = F.smooth_l1_loss(z.float(), h)
    if use_bfloat16:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        m = next(momentum_scheduler)
        for param_q, param_k in zip(encoder.parameters(), target_encoder.parameters()):
            param_k.mul_(m).add_((1.0 - m) * param_q.detach())
    return loss.item()


for epoch in range(num_epochs):
    losses = [train_step(epoch * ipe + i) for i in range(ipe)]
    print(f"epoch {epoch + 1} avg. loss {sum(losses) / len(losses):.4f} last {losses[-1]:.4f}")

MODULES = (trained,)
