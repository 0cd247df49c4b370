"""The auxiliary task is only used while its gradient points the same way as that of the main task."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(80)
gen = torch.Generator().manual_seed(81)
V, LEN = 30, 14


class Tagger(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.rnn = nn.GRU(d, d, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * d, 5)
        self.next = nn.Linear(2 * d, V)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.tag(h), self.next(h)


def sentences(n=24):
    ids = torch.randint(0, V, (n, LEN), generator=gen)
    tags = (ids + torch.roll(ids, 1, dims=1)) % 5
    noisy = (ids * 7 + 3) % V
    return ids, tags, noisy


class Trainer:
    def __init__(self, model):
        self.model = model
        self.shared = [p for n, p in model.named_parameters() if n.startswith(("emb", "rnn"))]
        self.opt = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=25)
        self.used = 0

    def flat(self, grads):
        return torch.cat([g.float().flatten() for g in grads])

    def step(self, ids, tags, noisy):
        with torch.autocast("cpu", dtype=torch.float16):
            tag_logits, next_logits = self.model(ids)
            main = F.cross_entropy(tag_logits.flatten(0, 1), tags.flatten())
            aux = 0.3 * F.cross_entropy(next_logits.flatten(0, 1), noisy.flatten())
        main, aux = self.scaler.scale(main), self.scaler.scale(aux)
        g_main = self.flat(torch.autograd.grad(main, self.shared, retain_graph=True))
        g_aux = self.flat(torch.autograd.grad(aux, self.shared, retain_graph=True))
        agree = F.cosine_similarity(g_main, g_aux, dim=0)
        total = main + aux if agree > 0 else main
        self.used += bool(agree > 0)
        self.opt.zero_grad(set_to_none=False)
        total.backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        return main.item() / scale, agree.item()


model = Tagger()
MODULES = [model]
watch(*MODULES)
trainer = Trainer(model)
for i in range(1, 81):
    main, agree = trainer.step(*sentences())
    if i % 16 == 0:
        print(f"{i} main {main:.4f} cosine {agree:.3f} used {trainer.used} scale {trainer.scaler.get_scale():.0f}")
