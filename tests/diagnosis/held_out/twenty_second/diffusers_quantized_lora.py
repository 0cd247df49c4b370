"""LoRA adapters on a frozen diffusion transformer whose linear layers are stored as int8, fp16 autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13539)
CHANNELS, SIDE, PATCH, INNER, LAYERS, STEPS, BATCH = 4, 16, 2, 48, 2, 80, 8


class Int8Linear(nn.Module):
    """Weight-only quantisation, one scale per output feature."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight_int8", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", linear.bias.detach().clone())
        self.out_features, self.in_features = linear.weight.shape

    def forward(self, x):
        return F.linear(x, self.weight_int8.to(x.dtype) * self.scale.to(x.dtype), self.bias.to(x.dtype))


class LoRALayer(nn.Module):
    def __init__(self, module, rank=4):
        super().__init__()
        self.module = module
        self.adapter = nn.Sequential(nn.Linear(module.in_features, rank, bias=False), nn.Linear(rank, module.out_features, bias=False))
        nn.init.normal_(self.adapter[0].weight, std=(2.0 / (5 * min(module.in_features, module.out_features))) ** 0.5)
        nn.init.zeros_(self.adapter[1].weight)

    def forward(self, hidden_states):
        return self.module(hidden_states) + self.adapter(hidden_states)


class Attention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class TransformerBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.ff_in, self.ff_out = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ff_out(F.gelu(self.ff_in(self.norm2(x)), approximate="tanh"))


class Transformer2DModel(nn.Module):
    def __init__(self):
        super().__init__()
        tokens, patch = (SIDE // PATCH) ** 2, CHANNELS * PATCH * PATCH
        self.x_embedder, self.pos_embed = nn.Linear(patch, INNER), nn.Parameter(0.1 * torch.randn(1, tokens, INNER))
        self.time_embed, self.blocks = nn.Linear(8, INNER), nn.ModuleList([TransformerBlock(INNER) for _ in range(LAYERS)])
        self.norm_out, self.proj_out = nn.LayerNorm(INNER), nn.Linear(INNER, patch)

    def forward(self, sample, timestep):
        b, s = len(sample), SIDE // PATCH
        x = sample.view(b, CHANNELS, s, PATCH, s, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(b, s * s, -1)
        angles = timestep[:, None] * 2.0 ** torch.arange(4)
        h = self.x_embedder(x) + self.pos_embed + self.time_embed(torch.cat((angles.sin(), angles.cos()), -1))[:, None]
        for block in self.blocks:
            h = block(h)
        out = self.proj_out(self.norm_out(h)).view(b, s, s, CHANNELS, PATCH, PATCH)
        return out.permute(0, 3, 1, 4, 2, 5).reshape(b, CHANNELS, SIDE, SIDE)


def quantize_and_add_adapters(model):
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(block.attn, name, LoRALayer(Int8Linear(getattr(block.attn, name))))
        block.ff_in, block.ff_out = Int8Linear(block.ff_in), Int8Linear(block.ff_out)
    return model


model = Transformer2DModel()
base = Transformer2DModel().requires_grad_(False)
base.load_state_dict(model.state_dict())
style = torch.Generator().manual_seed(5)
for block in base.blocks:
    for linear in (block.attn.to_v, block.attn.to_out):
        linear.weight += 0.0006 * torch.randn(INNER, 1, generator=style) @ torch.randn(1, INNER, generator=style)
model = quantize_and_add_adapters(model)
watch(model)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0)
gen = torch.Generator().manual_seed(2)
for step in range(STEPS):
    sample = torch.randn(BATCH, CHANNELS, SIDE, SIDE, generator=gen)
    timestep = torch.rand(BATCH, generator=gen)
    target = base(sample, timestep)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(sample, timestep)
    loss = F.mse_loss(out.float(), target)
    loss.backward()  # CAUSE
    grad_norm = sum(p.grad.float().pow(2).sum() for p in trained).sqrt().item()
    optimizer.step()
    optimizer.zero_grad()
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.3e} adapter grad norm {grad_norm:.3e}")
MODULES = (model,)
