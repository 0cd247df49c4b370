"""Language model with gated delta-rule layers, created from its configuration in bfloat16, then trained from scratch."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


@dataclass
class DeltaConfig:
    vocab_size: int = 24
    hidden_size: int = 48
    num_layers: int = 3
    num_v_heads: int = 8
    head_dim: int = 6
    torch_dtype: torch.dtype = torch.bfloat16


class GatedDeltaNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.dim = c.num_v_heads, c.head_dim
        self.in_proj_qkv = nn.Linear(c.hidden_size, 3 * c.num_v_heads * c.head_dim, bias=False)
        self.in_proj_ba = nn.Linear(c.hidden_size, 2 * c.num_v_heads, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(c.num_v_heads))
        A = torch.empty(c.num_v_heads).uniform_(0, 16)  # CAUSE
        self.A_log = nn.Parameter(torch.log(A))
        self.out_proj = nn.Linear(c.num_v_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, self.heads, self.dim).transpose(1, 2).float() for z in self.in_proj_qkv(x).chunk(3, -1))
        beta, a = (z.transpose(1, 2).float() for z in self.in_proj_ba(x).chunk(2, -1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g = -self.A_log.float().exp()[:, None] * F.softplus(a + self.dt_bias.float()[:, None])
        decay, beta = g.exp(), beta.sigmoid()
        state, outputs = torch.zeros(b, self.heads, self.dim, self.dim), []
        for i in range(t):
            state = state * decay[:, :, i, None, None]
            ki = k[:, :, i]
            delta = (v[:, :, i] - torch.einsum("bhkv,bhk->bhv", state, ki)) * beta[:, :, i, None]
            state = state + ki.unsqueeze(-1) * delta.unsqueeze(-2)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, i]))
        y = torch.stack(outputs, 2).transpose(1, 2).reshape(b, t, -1)
        return self.out_proj(y.to(x.dtype))


class HybridLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.hidden_size
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.linear_attn = GatedDeltaNet(c)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.linear_attn(self.input_layernorm(x))
        return x + self.down(F.silu(self.up(self.post_layernorm(x))))


class DeltaForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.Sequential(*(HybridLayer(c) for _ in range(c.num_layers)))
        self.norm, self.lm_head = nn.LayerNorm(c.hidden_size), nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    @classmethod
    def from_config(cls, c):
        before = torch.get_default_dtype()
        torch.set_default_dtype(c.torch_dtype)
        try:
            return cls(c)
        finally:
            torch.set_default_dtype(before)

    def forward(self, ids):
        return self.lm_head(self.norm(self.layers(self.embed_tokens(ids))))


def texts(gen, c, n=16, length=16):
    """The topic of a text changes suddenly; the next token follows from the current topic and token."""
    ids = torch.randint(0, c.vocab_size, (n, 1), generator=gen)
    topic = torch.randint(1, 5, (n,), generator=gen)
    for _ in range(length):
        topic = torch.where(torch.rand(n, generator=gen) < 0.15, torch.randint(1, 5, (n,), generator=gen), topic)
        ids = torch.cat([ids, ((ids[:, -1] + topic) % c.vocab_size)[:, None]], 1)
    return ids


torch.manual_seed(135)
config = DeltaConfig()
model = DeltaForCausalLM.from_config(config).float()  # float32 master weights, computation in bf16
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
gen = torch.Generator().manual_seed(132)
for step in range(70):
    ids = texts(gen, config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 or step == 69:
        rates = torch.cat([layer.linear_attn.A_log for layer in model.layers]).exp()
        print(f"step {step} loss {loss.item():.4f} grad_norm {grad_norm.item():.3f} decay rates {rates.min().item():.3g} to {rates.max().item():.3g}")
