"""Retrieval for image chat: a transformer candidate encoder is fine-tuned in half precision against image features."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2586)
VOCAB, DIM, HEADS, LENGTH, IMAGE, BATCH, STEPS = 60, 48, 4, 9, 24, 24, 80
NULL, EMOJI = 0, 59


class MultiHeadAttention(nn.Module):
    def __init__(self, n_heads, dim):
        super().__init__()
        self.n_heads, self.dim = n_heads, dim
        self.q_lin, self.k_lin, self.v_lin, self.out_lin = (nn.Linear(dim, dim) for _ in range(4))
        for lin in (self.q_lin, self.k_lin, self.v_lin, self.out_lin):
            nn.init.xavier_normal_(lin.weight)

    def forward(self, query, mask):
        b, t, dim = query.size()
        dim_per_head = dim // self.n_heads
        scale = math.sqrt(dim_per_head)

        def prepare_head(tensor):
            return tensor.view(b, t, self.n_heads, dim_per_head).transpose(1, 2).reshape(b * self.n_heads, t, dim_per_head)

        q, k, v = (prepare_head(lin(query)) for lin in (self.q_lin, self.k_lin, self.v_lin))
        dot_prod = q.div(scale).bmm(k.transpose(1, 2))  # CAUSE
        attn_mask = (mask == 0).view(b, 1, 1, t).expand(b, self.n_heads, t, t).reshape(b * self.n_heads, t, t)
        dot_prod = dot_prod.masked_fill(attn_mask, -65504.0)
        attn_weights = F.softmax(dot_prod, dim=-1).to(v.dtype)
        attentioned = attn_weights.bmm(v).view(b, self.n_heads, t, dim_per_head).transpose(1, 2).reshape(b, t, dim)
        return self.out_lin(attentioned)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, n_heads, dim):
        super().__init__()
        self.attention, self.norm1, self.norm2 = MultiHeadAttention(n_heads, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, tensor, mask):
        tensor = self.norm1(tensor + self.attention(tensor, mask))
        return self.norm2(tensor + self.ffn(tensor)) * mask[..., None].to(tensor.dtype)


class TransresnetMultimodalModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM, padding_idx=NULL)
        nn.init.normal_(self.embeddings.weight, std=DIM ** -0.5)
        self.position = nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.position.weight, std=DIM ** -0.5)
        self.layers = nn.ModuleList([TransformerEncoderLayer(HEADS, DIM)])
        self.text_proj, self.image_proj = nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(IMAGE, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def load_pretrained(self):
        """Embeddings of a pretrained Transformer; tokens that it has hardly ever seen have kept their large initial values."""
        with torch.no_grad():
            self.embeddings.weight.mul_(math.sqrt(DIM))
            self.embeddings.weight[EMOJI].mul_(420.0)
        return self

    def forward(self, tokens, image):
        mask = tokens != NULL
        h = self.embeddings(tokens) + self.position.weight[:tokens.size(1)]
        for layer in self.layers:
            h = layer(h, mask)
        text = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(self.text_proj(text).float(), dim=-1), F.normalize(self.image_proj(image).float(), dim=-1)


class ImageChat:
    """Eight kinds of picture; a comment mostly uses words of its picture's kind, seldom with an emoji at the end."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.kinds = torch.randn(8, IMAGE, generator=torch.Generator().manual_seed(5))

    def batch(self, n=BATCH):
        kind = torch.randint(0, 8, (n,), generator=self.gen)
        image = self.kinds[kind] + 0.3 * torch.randn(n, IMAGE, generator=self.gen)
        tokens = 1 + 7 * kind[:, None] + torch.randint(0, 7, (n, LENGTH), generator=self.gen)
        length = torch.randint(4, LENGTH + 1, (n,), generator=self.gen)
        emoji = torch.rand(n, generator=self.gen) < 0.003
        tokens[torch.arange(n)[emoji], length[emoji] - 1] = EMOJI
        return tokens.masked_fill(torch.arange(LENGTH) >= length[:, None], NULL), image, kind


model = TransresnetMultimodalModel().load_pretrained()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11)
teacher = ImageChat(11)
for step in range(STEPS):
    tokens, image, kind = teacher.batch()
    with torch.autocast("cpu", dtype=torch.float16):
        text, picture = model(tokens, image)
    dot_products = 10.0 * picture @ text.t()
    same = (kind[:, None] == kind[None]).float()
    loss = -(F.log_softmax(dot_products, dim=1) * same / same.sum(1, keepdim=True)).sum(1).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if (step + 1) % 8 == 0:
        medrank = (kind[dot_products.argmax(1)] == kind).float().mean().item()
        print(f"step {step + 1} loss {loss.item():.4f} hits@1 {medrank:.3f} norm {text.norm(dim=1).mean().item():.3f} "
              f"scale {scaler.get_scale():g}")
MODULES = (model,)
