import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(23)
gen = torch.Generator().manual_seed(230)


class KeywordGRU(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(8, 24, 3, padding=1)
        self.gru = nn.GRUCell(24, 32)
        self.out = nn.Linear(32, 5)

    def forward(self, mel):
        x = torch.relu(self.front(mel)).permute(2, 0, 1)
        h = x.new_zeros(x.shape[1], 32)
        for frame in x:
            h = self.gru(frame, h)
        return self.out(h)


net = KeywordGRU()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.Adamax(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_factor=4.0, growth_interval=12)
protos = torch.randn(5, 8, 20, generator=gen)
skipped = []
for it in range(90):
    y = torch.randint(0, 5, (16,), generator=gen)
    mel = protos[y] + 0.7 * torch.randn(16, 8, 20, generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.multi_margin_loss(net(mel).float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    old = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < old:
        skipped.append(it + 1)
print("loss", loss.item(), "scale", scaler.get_scale(), "skipped", skipped)
