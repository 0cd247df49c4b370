"""Low-rank adapters on the int8 attention layers of a small image transformer (distillation of a look)."""
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
torch.manual_seed(13539)
LATENT, TOKENS, DIM, TEXT_TOKENS = 4, 16, 32, 4


class QuantizedLinear(nn.Module):
    """Linear layer with int8 weights and one scale per output channel; not trained itself."""

    def __init__(self, linear):
        super().__init__()
        w = linear.weight.detach()
        self.register_buffer("scale", w.abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("weight_int8", torch.round(w / self.scale).to(torch.int8))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x):
        weight = self.weight_int8.to(x.dtype) * self.scale.to(x.dtype)
        return F.linear(x, weight, self.bias)


class LoRALayer(nn.Module):
    """Wraps a linear layer with a trained low-rank branch."""

    def __init__(self, module, d_in, d_out, rank=4):
        super().__init__()
        self.module = module
        self.adapter = nn.Sequential(nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False))
        small_std = (2.0 / (5 * min(d_in, d_out))) ** 0.5
        nn.init.normal_(self.adapter[0].weight, std=small_std)
        nn.init.zeros_(self.adapter[1].weight)

    def forward(self, x):
        return self.module(x) + self.adapter(x)


class Attention(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


class TransformerBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(d), Attention(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.gate = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x):
        x = x + self.gate * self.attn(self.norm1(x))
        return x + self.gate * self.ff(self.norm2(x))


class Transformer2DModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Linear(LATENT, DIM), nn.Linear(DIM, DIM)
        self.time_embed = nn.Linear(DIM, DIM)
        self.transformer_blocks = nn.Sequential(TransformerBlock(DIM), TransformerBlock(DIM))
        self.norm_out, self.proj_out = nn.LayerNorm(DIM), nn.Linear(DIM, LATENT)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.02)

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        freqs = torch.exp(-math.log(1000) * torch.arange(DIM // 2) / (DIM // 2))
        args = 100 * timestep[:, None] * freqs
        h = self.x_embedder(hidden_states) + self.time_embed(torch.cat((args.cos(), args.sin()), -1))[:, None]
        h = torch.cat((self.context_embedder(encoder_hidden_states), h), dim=1)
        return self.proj_out(self.norm_out(self.transformer_blocks(h)[:, TEXT_TOKENS:]))


def quantize_and_add_adapters(model):
    for p in model.parameters():
        p.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name not in ("proj_out",):
                quantized = QuantizedLinear(child)
                adapted = isinstance(module, Attention) and name in ("to_q", "to_k", "to_v")
                setattr(module, name, LoRALayer(quantized, child.in_features, child.out_features) if adapted else quantized)
    return model


def stylise(model, gen):
    """The look that the adapters are to learn: the same transformer with another set of adapter weights."""
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, LoRALayer):
                m.adapter[1].weight.copy_(0.5 * torch.randn(m.adapter[1].weight.shape, generator=gen))
    return model


def get_dummy_inputs(gen, n=32):
    prompts = torch.randn(6, TEXT_TOKENS, DIM, generator=torch.Generator().manual_seed(4))
    which = torch.randint(0, 6, (n,), generator=gen)
    return torch.randn(n, TOKENS, LATENT, generator=gen), prompts[which], torch.rand(n, generator=gen)


model = quantize_and_add_adapters(Transformer2DModel())
teacher = stylise(copy.deepcopy(model), torch.Generator().manual_seed(9))
watch(model)
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=2e4, momentum=0.9)
gen, losses = torch.Generator().manual_seed(1), []
for step in range(80):
    inputs = get_dummy_inputs(gen)
    with torch.no_grad():
        target = teacher(*inputs)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(*inputs)
    loss = F.mse_loss(pred.float(), target)
    loss.backward()  # CAUSE
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    if (step + 1) % 10 == 0:
        print(f"step {step + 1} loss {sum(losses[-10:]) / 10:.3e}")
MODULES = (model,)
