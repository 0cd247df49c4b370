"""LoRA for a small diffusion transformer loaded with torch_dtype=bfloat16, which keeps some of its modules in float32."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(171)


class LoRALinear(nn.Module):
    def __init__(self, cin, cout, rank=8):
        super().__init__()
        self.base = nn.Linear(cin, cout)
        self.lora_a = nn.Parameter(torch.randn(rank, cin) / math.sqrt(cin))
        self.lora_b = nn.Parameter(torch.zeros(cout, rank))

    def forward(self, x):
        return self.base(x) + (x.float() @ self.lora_a.T @ self.lora_b.T).to(x.dtype)


class FP32LayerNorm(nn.LayerNorm):
    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class TimeEmbedder(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(32, d), nn.Linear(d, 6 * d)

    def forward(self, timestep):
        freqs = torch.exp(-math.log(10000) * torch.arange(16) / 16)
        args = timestep.float()[:, None] * freqs
        emb = torch.cat([args.cos(), args.sin()], -1)
        return self.linear_2(F.silu(self.linear_1(emb.to(self.linear_1.weight.dtype))))


class WanBlock(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = FP32LayerNorm(d, elementwise_affine=False), FP32LayerNorm(d)
        self.to_qkv, self.to_out = LoRALinear(d, 3 * d), LoRALinear(d, d)
        self.ffn_in, self.ffn_out = LoRALinear(d, 2 * d), LoRALinear(2 * d, d)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, d) / d ** 0.5)

    def forward(self, x, temb):
        shift, scale, gate, c_shift, c_scale, c_gate = (self.scale_shift_table + temb.float()).chunk(6, 1)
        y = (self.norm1(x.float()) * (1 + scale) + shift).type_as(x)
        b, t, d = y.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.to_qkv(y).chunk(3, -1))
        a = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        x = (x.float() + a * gate).type_as(x)
        y = (self.norm2(x.float()) * (1 + c_scale) + c_shift).type_as(x)
        return (x.float() + self.ffn_out(F.gelu(self.ffn_in(y), approximate="tanh")).float() * c_gate).type_as(x)


class WanTransformer(nn.Module):
    keep_in_fp32_modules = ("time_embedder", "scale_shift_table", "norm1", "norm2")

    def __init__(self, channels=4, d=64, layers=2):
        super().__init__()
        self.patch_embedding = nn.Linear(channels, d)
        self.time_embedder = TimeEmbedder(d)
        self.blocks = nn.ModuleList(WanBlock(d) for _ in range(layers))
        self.proj_out = LoRALinear(d, channels)

    def forward(self, latents, timestep):
        x = self.patch_embedding(latents.to(self.patch_embedding.weight.dtype))
        temb = self.time_embedder(timestep).view(len(x), 6, -1)
        for block in self.blocks:
            x = block(x, temb)
        return self.proj_out(x)

    @classmethod
    def from_pretrained(cls, torch_dtype):
        model = cls()
        for name, p in model.named_parameters():
            if "lora" in name:
                continue
            p.requires_grad_(False)
            if not any(k in name for k in cls.keep_in_fp32_modules):
                p.data = p.data.to(torch_dtype)
        return model


def latents(gen, n=16, frames=12):
    """A drifting wave in four channels."""
    t = torch.arange(frames) / frames
    phase, freq = torch.rand(n, 1, 4, generator=gen), torch.randint(1, 4, (n, 1, 4), generator=gen)
    return torch.sin(6.2832 * (freq * t[None, :, None] + phase))


transformer = WanTransformer.from_pretrained(torch.bfloat16)
watch(transformer)
for name in ("blocks.0.norm2.bias", "blocks.0.scale_shift_table", "blocks.0.to_qkv.base.weight"):
    print(name, transformer.get_parameter(name).dtype)
params = [p for p in transformer.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=5e-3, weight_decay=0.0)
gen = torch.Generator().manual_seed(172)
for step in range(90):
    x0 = latents(gen)
    sigma, noise = torch.rand(len(x0), 1, 1, generator=gen), torch.randn(x0.shape, generator=gen)
    model_input = (1 - sigma) * x0 + sigma * noise
    pred = transformer(model_input, sigma.flatten() * 1000)
    loss = F.mse_loss(pred.float(), noise - x0)
    loss.backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 15 == 0 or step == 89:
        print(f"step {step} loss {loss.item():.4f}")
