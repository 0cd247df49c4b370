"""Group-relative policy optimisation of a small token policy with illegal actions masked, bf16."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)
VOCAB, LENGTH, GROUP, PROMPTS = 12, 6, 5, 1


class Policy(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH + 1, d)
        self.mix = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.norm, self.logits = nn.LayerNorm(d), nn.Linear(d, VOCAB)

    def forward(self, tokens):
        h = self.embed(tokens) + self.position.weight[: tokens.size(1)]
        h = h.cumsum(1) / torch.arange(1, tokens.size(1) + 1)[:, None]
        return self.logits(self.norm(h + self.mix(h)))


def legal(tokens):
    """A token may not repeat: -inf for those already written."""
    seen = F.one_hot(tokens, VOCAB).cumsum(1) > 0
    return torch.zeros(seen.shape).masked_fill(seen, float("-inf"))


@torch.no_grad()
def roll_out(policy, prompt, generator):
    tokens = prompt
    for _ in range(LENGTH):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = policy(tokens)[:, -1]
        p = (logits.float() + legal(tokens)[:, -1]).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    return tokens


def reward(tokens):
    """1 if the answer is increasing over its last three tokens."""
    tail = tokens[:, -3:]
    return (tail.diff(dim=1) > 0).all(1).float()


def token_statistics(policy, tokens):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = policy(tokens[:, :-1])
    log_p = (logits.float() + legal(tokens[:, :-1])).log_softmax(-1)
    chosen = log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    finite = log_p.masked_fill(log_p.isneginf(), 0.0)
    entropy = -(finite.exp() * finite * ~log_p.isneginf()).sum(-1)
    return chosen, entropy


def advantages(r):
    r = r.view(PROMPTS, GROUP)
    centred = r - r.mean(1, keepdim=True)
    return (centred / (r.std(1, keepdim=True) + 1e-4)).flatten()


policy = Policy()
watch(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
generator = torch.Generator().manual_seed(102)
idle = 0

for step in range(100):
    prompt = torch.randint(0, VOCAB, (PROMPTS, 1), generator=generator).repeat_interleave(GROUP, 0)
    tokens = roll_out(policy, prompt, generator)
    r = reward(tokens)
    adv = advantages(r)
    chosen, entropy = token_statistics(policy, tokens)
    ratio = (chosen - chosen.detach()).exp()
    loss = -torch.minimum(ratio * adv[:, None], ratio.clamp(0.8, 1.2) * adv[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    idle += norm.item() == 0
    optimizer.step()
    if step % 10 == 9:
        print(f"{step + 1:3d} reward {r.mean():.2f} loss {loss.item():.4f} entropy {entropy.mean():.3f} "
              f"norm {norm:.3f} steps without a signal {idle}")
