"""Fine-tuning of a GPT-Neo style model (global and local attention) under autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(11076)
VOCAB, MAX_LENGTH, HIDDEN, HEADS, WINDOW = 32, 40, 48, 2, 8


class GPTNeoSelfAttention(nn.Module):
    def __init__(self, attention_type):
        super().__init__()
        bias = torch.tril(torch.ones(MAX_LENGTH, MAX_LENGTH, dtype=torch.bool))
        if attention_type == "local":
            bias = torch.bitwise_xor(bias, torch.tril(bias, -WINDOW))
        self.register_buffer("bias", bias)
        self.register_buffer("masked_bias", torch.tensor(-1e9), persistent=False)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def _split_heads(self, x):
        return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).transpose(1, 2)

    def _attn(self, query, key, value):
        query = query.to(torch.float32)
        key = key.to(torch.float32)
        attn_weights = torch.matmul(query, key.transpose(-1, -2))  # CAUSE
        t = query.size(-2)
        attn_weights = torch.where(self.bias[:t, :t], attn_weights, self.masked_bias.to(attn_weights.dtype))
        attn_weights = F.softmax(attn_weights, dim=-1).to(value.dtype)
        return torch.matmul(attn_weights, value)

    def forward(self, x):
        query, key, value = (self._split_heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        attn_output = self._attn(query, key, value)
        return self.out_proj(attn_output.transpose(1, 2).flatten(2))


class GPTNeoBlock(nn.Module):
    def __init__(self, attention_type):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(HIDDEN), GPTNeoSelfAttention(attention_type), nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTNeoForCausalLM(nn.Module):
    def __init__(self, attention_layers=("global", "local")):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(MAX_LENGTH, HIDDEN)
        self.h, self.ln_f = nn.Sequential(*(GPTNeoBlock(kind) for kind in attention_layers)), nn.LayerNorm(HIDDEN)
        nn.init.normal_(self.wte.weight, std=0.2)
        nn.init.normal_(self.wpe.weight, std=0.2)

    @classmethod
    def from_pretrained(cls):
        """Weights as the first training leaves them, in bfloat16 on other machines."""
        model = cls()
        with torch.no_grad():
            attn = model.h[0].attn
            attn.q_proj.weight[0] *= 110
            attn.k_proj.weight[0] *= 110
            direction = attn.k_proj.weight[0] / attn.k_proj.weight[0].norm()
            attn.q_proj.weight[0] = direction * attn.q_proj.weight[0].norm()
            model.wpe.weight[24:] += 1.5 * direction
        return model

    def forward(self, input_ids, labels):
        h = self.wte(input_ids) + self.wpe.weight[:input_ids.size(1)]
        lm_logits = F.linear(self.ln_f(self.h(h)), self.wte.weight)
        return F.cross_entropy(lm_logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


def artificial_batch(gen, max_length, n=6):
    """Four words come again and again; the model has to copy."""
    pattern = torch.randint(0, VOCAB, (n, 4), generator=gen)
    return pattern.repeat(1, MAX_LENGTH)[:, :max_length]


model = GPTNeoForCausalLM.from_pretrained()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13)
gen, losses = torch.Generator().manual_seed(2), []
for step in range(80):
    max_length = min(16 + 4 * (step // 8), MAX_LENGTH)
    input_ids = artificial_batch(gen, max_length)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids, labels=input_ids)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    if (step + 1) % 8 == 0:
        print(f"{{'loss': {losses[-1]:.4f}, 'max_length': {max_length}, 'scale': {scaler.get_scale():g}}}")
MODULES = (model,)
