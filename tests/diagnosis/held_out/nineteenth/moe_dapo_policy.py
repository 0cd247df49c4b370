"""Group-relative policy optimisation (DAPO style) of a small mixture-of-experts policy that is loaded in bfloat16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2322)
VOCAB, DIM, PROMPT, ANSWER = 20, 48, 5, 4
GROUPS, GROUP_SIZE, STEPS = 8, 8, 90


class Experts(nn.Module):
    def __init__(self, d, n_experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.top_k, self.n_experts = top_k, n_experts
        self.up = nn.Parameter(torch.randn(n_experts, d, 2 * d) * d ** -0.5)
        self.down = nn.Parameter(torch.randn(n_experts, 2 * d, d) * (2 * d) ** -0.5)

    def forward(self, x):
        weights, index = self.gate(x).float().softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        route = (F.one_hot(index, self.n_experts) * weights[..., None]).sum(-2).to(x.dtype)
        hidden = F.silu(torch.einsum("btd,edf->btef", x, self.up))
        return torch.einsum("btef,efd,bte->btd", hidden, self.down, route)


class MoELayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o, self.experts = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False), Experts(d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.experts(self.n2(x))


class MoEPolicy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(PROMPT + ANSWER, DIM)
        self.layers = nn.Sequential(MoELayer(DIM), MoELayer(DIM))
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        h = self.layers(self.embed(ids) + self.pos.weight[:ids.size(1)])
        return self.lm_head(self.norm(h)).float()

    @classmethod
    def from_pretrained(cls, torch_dtype):
        return cls().to(torch_dtype)


@torch.no_grad()
def rollout(policy, prompts, gen):
    ids, logps = prompts, []
    for _ in range(ANSWER):
        logp = policy(ids)[:, -1].log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=gen)
        logps.append(logp.gather(1, token))
        ids = torch.cat((ids, token), dim=1)
    return ids, torch.cat(logps, dim=1)


def reward_fn(ids):
    """Share of answer tokens that are digits (the first five tokens)."""
    return (ids[:, PROMPT:] < 5).float().mean(dim=1)


def dapo_loss(policy, ids, old_logps, advantages, low=0.2, high=0.28):
    logps = policy(ids[:, :-1])[:, PROMPT - 1:].log_softmax(-1).gather(2, ids[:, PROMPT:, None]).squeeze(-1)
    ratio = torch.exp(logps - old_logps)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -surrogate.mean(), logps


def main(lr=1.5e-4, precision=torch.bfloat16):
    policy = MoEPolicy.from_pretrained(precision)
    watch(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.01, betas=(0.9, 0.95))  # CAUSE
    gen = torch.Generator().manual_seed(2323)
    history = []
    for step in range(STEPS):
        prompts = torch.randint(0, VOCAB, (GROUPS, PROMPT), generator=gen).repeat_interleave(GROUP_SIZE, dim=0)
        ids, old_logps = rollout(policy, prompts, gen)
        rewards = reward_fn(ids)
        groups = rewards.view(GROUPS, GROUP_SIZE)
        keep = (groups.std(dim=1) > 0).repeat_interleave(GROUP_SIZE)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        loss, logps = dapo_loss(policy, ids[keep], old_logps[keep], advantages[keep])
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        history.append(rewards.mean().item())
        if (step + 1) % 10 == 0:
            print(f"step {step + 1} reward {sum(history[-10:]) / 10:.4f} grad_norm {grad_norm.item():.3f} "
                  f"kept {int(keep.sum()) // GROUP_SIZE}/{GROUPS}")


if __name__ == "__main__":
    main()
