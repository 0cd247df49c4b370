"""PPO on short texts; prints the ratio of new and old policy in every mini-batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(70)

VOCAB, PROMPT, ANSWER = 20, 3, 6


class PolicyWithValueHead(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, d), nn.Embedding(PROMPT + ANSWER, d)
        self.block = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.ln, self.lm_head, self.v_head = nn.LayerNorm(d), nn.Linear(d, VOCAB), nn.Linear(d, 1)

    def forward(self, ids):
        t = ids.size(1)
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        h = self.ln(self.block(self.wte(ids) + self.wpe.weight[:t], src_mask=mask))
        return self.lm_head(h).float(), self.v_head(h).float().squeeze(-1)


class PPOConfig:
    batch_size, mini_batch_size, ppo_epochs, iterations = 32, 8, 2, 12
    cliprange, vf_coef, learning_rate, target_kl = 0.2, 0.2, 1e-3, None


class PPOTrainer:
    def __init__(self, config, model):
        self.config, self.model = config, model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
        self.gen = torch.Generator().manual_seed(71)

    @torch.no_grad()
    def generate(self, prompts):
        ids = prompts
        for _ in range(ANSWER):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits, _ = self.model(ids)
            ids = torch.cat([ids, torch.multinomial(logits[:, -1].softmax(-1), 1, generator=self.gen)], 1)
        return ids

    def logprobs_and_values(self, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, values = self.model(ids)
        logp = logits.log_softmax(-1)[:, PROMPT - 1:-1].gather(2, ids[:, PROMPT:, None]).squeeze(-1)
        return logp, values[:, PROMPT - 1:-1]

    def step(self, iteration, ids, scores):
        with torch.no_grad():
            old_logp, old_values = self.logprobs_and_values(ids)
        returns = scores[:, None].expand_as(old_values)
        advantages = returns - old_values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        ratios = []
        for _ in range(self.config.ppo_epochs):
            for pick in torch.randperm(len(ids), generator=self.gen).split(self.config.mini_batch_size):
                logp, values = self.logprobs_and_values(ids[pick])
                ratio = torch.exp(logp - old_logp[pick])
                clipped = ratio.clamp(1 - self.config.cliprange, 1 + self.config.cliprange)
                policy_loss = -torch.min(ratio * advantages[pick], clipped * advantages[pick]).mean()
                loss = policy_loss + self.config.vf_coef * F.mse_loss(values, returns[pick])
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                ratios.append(ratio.mean().item())
        print(f"iteration {iteration} score {scores.mean().item():.3f} ratio.mean() " + " ".join(f"{r:.4f}" for r in ratios))


def sentiment(ids):
    """Share of the answer's tokens that are friendly (below 6)."""
    return (ids[:, PROMPT:] < 6).float().mean(1)


config = PPOConfig()
model = PolicyWithValueHead()
watch(model)
trainer = PPOTrainer(config, model)
prompt_gen = torch.Generator().manual_seed(72)
for iteration in range(config.iterations):
    prompts = torch.randint(0, VOCAB, (config.batch_size, PROMPT), generator=prompt_gen)
    ids = trainer.generate(prompts)
    trainer.step(iteration, ids, sentiment(ids))
