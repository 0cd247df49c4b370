"""Change detection between two aerial images with a small siamese transformer (ChangeFormer style), half precision."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(91)
IMG, PATCH, DIM, BATCH, MAX_EPOCHS, STEPS = 24, 4, 32, 8, 6, 12


class Attention(nn.Module):
    def __init__(self, dim, heads=4, sr_ratio=2):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.sr, self.norm = nn.Conv2d(dim, dim, sr_ratio, stride=sr_ratio), nn.LayerNorm(dim)

    def forward(self, x, side):
        b, n, c = x.shape
        q = self.q(x).view(b, n, self.heads, -1).transpose(1, 2)
        reduced = self.norm(self.sr(x.transpose(1, 2).reshape(b, c, side, side)).flatten(2).transpose(1, 2))
        k, v = (z.view(b, -1, self.heads, c // self.heads).transpose(1, 2) for z in self.kv(reduced).chunk(2, -1))
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(dim), Attention(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, side):
        x = x + self.attn(self.norm1(x), side)
        return x + self.mlp(self.norm2(x))


class ChangeFormer(nn.Module):
    def __init__(self, dim=DIM, output_nc=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, PATCH, stride=PATCH)
        self.blocks = nn.ModuleList([Block(dim), Block(dim)])
        self.diff = nn.Sequential(nn.Conv2d(2 * dim, dim, 3, padding=1), nn.ReLU(), nn.Conv2d(dim, dim, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(dim, 16, PATCH, stride=PATCH)
        self.change_probability = nn.Conv2d(16, output_nc, 3, padding=1)

    def encode(self, x):
        x = self.patch_embed(x)
        b, c, side, _ = x.shape
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, side)
        return x.transpose(1, 2).reshape(b, c, side, side)

    def forward(self, a, b):
        fused = self.diff(torch.cat((self.encode(a), self.encode(b)), dim=1))
        return self.change_probability(F.relu(self.up(fused)))


def image_pairs(gen, n=BATCH):
    """Ground with gentle shading; in the second image a few buildings have been added."""
    ramp = torch.linspace(-1, 1, IMG)
    slope = torch.randn(n, 3, 2, generator=gen)
    ground = 0.4 * (slope[..., 0, None, None] * ramp[:, None] + slope[..., 1, None, None] * ramp[None, :])
    label = torch.zeros(n, IMG, IMG, dtype=torch.long)
    for i in range(n):
        for _ in range(2):
            y, x = torch.randint(0, IMG - 8, (2,), generator=gen).tolist()
            label[i, y:y + 8, x:x + 8] = 1
    after = torch.where(label[:, None] == 1, ground + 1.5, ground)
    noise = 0.1 * torch.randn(2, n, 3, IMG, IMG, generator=gen)
    return ground + noise[0], after + noise[1], label


class CDTrainer:
    def __init__(self, net_G, lr):
        self.net_G = net_G
        self.optimizer_G = torch.optim.AdamW(net_G.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)  # CAUSE
        self.G_loss, self.running_acc = None, 0.0

    def _forward_pass(self, batch):
        img_in1, img_in2, self.gt = batch
        self.G_pred = self.net_G(img_in1.half(), img_in2.half())

    def _backward_G(self):
        self.G_loss = F.cross_entropy(self.G_pred.float(), self.gt)
        self.G_loss.backward()

    def train_models(self):
        gen = torch.Generator().manual_seed(1024)
        for epoch_id in range(MAX_EPOCHS):
            for batch_id in range(STEPS):
                self._forward_pass(image_pairs(gen))
                self.optimizer_G.zero_grad()
                self._backward_G()
                self.optimizer_G.step()
                mask = self.G_pred.argmax(1)
                union = ((mask == 1) | (self.gt == 1)).sum().clamp(min=1)
                self.running_acc = (((mask == 1) & (self.gt == 1)).sum() / union).item()
            print(f"Is_training: True. [{epoch_id},{MAX_EPOCHS - 1}], G_loss: {self.G_loss.item():.5f}, "
                  f"running_iou: {self.running_acc:.5f}")


net_G = ChangeFormer().half()
watch(net_G)
CDTrainer(net_G, lr=1e-3).train_models()
MODULES = (net_G,)
