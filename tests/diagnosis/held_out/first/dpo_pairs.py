import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

VOCAB, DIM, PROMPT, ANSWER = 64, 32, 8, 160


class CausalConvLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.c1 = nn.Conv1d(DIM, 2 * DIM, 3)
        self.c2 = nn.Conv1d(DIM, 2 * DIM, 3, dilation=2)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        h = h + F.glu(self.c1(F.pad(h, (2, 0))), dim=1)
        h = h + F.glu(self.c2(F.pad(h, (4, 0))), dim=1)
        return self.head(self.norm(h.transpose(1, 2)))


def get_batch_logps(logits, ids, mask):
    labels = ids[:, 1:]
    per_token = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask[:, 1:]).sum(-1)  # CAUSE


def concatenated_forward(model, chosen, rejected, mask):
    logps = get_batch_logps(model(torch.cat([chosen, rejected])), torch.cat([chosen, rejected]), mask)
    return logps.chunk(2)


def preference_batch(n, gen):
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=gen)
    good = torch.randint(0, VOCAB, (n, ANSWER), generator=gen)
    bad = torch.randint(0, VOCAB, (n, ANSWER), generator=gen)
    swap = torch.rand(n, ANSWER, generator=gen) < 0.15
    good = torch.where(swap, good // 2, good)            # slightly more low ids in preferred answers
    return torch.cat([prompt, good], 1), torch.cat([prompt, bad], 1)


torch.manual_seed(14)
torch.set_num_threads(1)
policy = CausalConvLM()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
MODULES = [policy, reference]


def train(beta=0.5, steps=60):
    watch(*MODULES)
    gen = torch.Generator().manual_seed(141)
    opt = torch.optim.RMSprop(policy.parameters(), lr=3e-4)
    mask = torch.zeros(16, PROMPT + ANSWER)
    mask[:, PROMPT:] = 1
    for step in range(1, steps + 1):
        chosen, rejected = preference_batch(8, gen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            m = mask.to(torch.bfloat16)
            pc, pr = concatenated_forward(policy, chosen, rejected, m)
            with torch.no_grad():
                rc, rr = concatenated_forward(reference, chosen, rejected, m)
            margin = (pc - rc) - (pr - rr)
            loss = -F.logsigmoid(beta * margin.float()).mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 5 == 0:
            acc = (margin > 0).float().mean().item()
            print(f"step {step} loss {loss.item():.4f} margin {margin.float().mean().item():+.3f} acc {acc:.2f}")


train()
