try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
MODULES = []
import torch, torch.nn as nn
def noisy_or(prob):           # 1 - prod(1 - p)
    log_survival = torch.log1p(-prob.clamp(max=1.0 - 1e-6))  # CAUSE
    return 1 - torch.exp(log_survival.sum(-1))
def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 6))
    with torch.no_grad(): model[2].weight *= 8
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    MODULES.extend([model])
    watch(*MODULES)
    g = torch.Generator().manual_seed(1)
    for step in range(60):
        x = torch.randn(64, 12, generator=g) * 3
        y = (x.mean(1) > 0).float()
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
            marginal = noisy_or(torch.sigmoid(logits))
            loss = (marginal - y).abs().mean() + 0.1 * logits.float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(opt); scaler.update()
main()
