"""Policy updates on groups of sampled answers; the log has the norm that clip_grad_norm_ returns."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(145)
VOCAB, ANSWER = 12, 4


class Actor(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB + 1, d), nn.Embedding(ANSWER + 2, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp, self.head = nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)), nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos.weight[: ids.size(1)]
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return self.head(x + self.mlp(self.norm2(x)))


class DataParallelPPOActor:
    def __init__(self, actor, clip_grad=1.0, group_size=8, micro_batch=32):
        self.actor, self.clip_grad, self.group, self.micro = actor, clip_grad, group_size, micro_batch
        self.optimizer = torch.optim.AdamW(actor.parameters(), lr=3e-3, weight_decay=0.01)

    def log_probs(self, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.actor(ids[:, :-1])
        return F.log_softmax(logits[:, -ANSWER:].float(), -1).gather(-1, ids[:, -ANSWER:].unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def generate(self, prompts, gen):
        ids = torch.cat([prompts, torch.full((len(prompts), 1), VOCAB)], 1)
        for _ in range(ANSWER):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.actor(ids)[:, -1].float()
            ids = torch.cat([ids, torch.multinomial(torch.softmax(logits, -1), 1, generator=gen)], 1)
        return ids

    def update_policy(self, ids, advantages, old_log_probs):
        self.optimizer.zero_grad()
        for i in range(0, len(ids), self.micro):
            part = slice(i, i + self.micro)
            ratio = (self.log_probs(ids[part]) - old_log_probs[part]).exp()
            adv = advantages[part].unsqueeze(-1)
            loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).sum() / ANSWER  # seq-mean-token-sum, not divided by the batch
            loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.actor.parameters(), max_norm=self.clip_grad)
        if not torch.isfinite(grad_norm):
            print(f"WARN: grad_norm is not finite: {grad_norm}")
            self.optimizer.zero_grad()
        else:
            self.optimizer.step()
        return grad_norm


def reward(ids):
    """Each token of the answer should be one more than that before, from the prompt on."""
    want = (ids[:, :1] + 1 + torch.arange(ANSWER)) % VOCAB
    return (ids[:, -ANSWER:] == want).float().mean(1)


actor = Actor()
watch(actor)
worker = DataParallelPPOActor(actor)
gen = torch.Generator().manual_seed(146)
for step in range(70):
    prompts = torch.randint(0, VOCAB, (16, 1), generator=gen).repeat_interleave(worker.group, 0)
    ids = worker.generate(prompts, gen)
    scores = reward(ids)
    groups = scores.view(-1, worker.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    with torch.no_grad():
        old = worker.log_probs(ids)
    grad_norm = worker.update_policy(ids, advantages, old)
    if step % 10 == 0 or step == 69:
        print(f"step:{step} - critic/score/mean:{scores.mean().item():.3f} - actor/grad_norm:{grad_norm.item():.3f} - actor/clip_grad:{worker.clip_grad}")
