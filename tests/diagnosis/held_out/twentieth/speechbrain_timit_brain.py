"""Phoneme recogniser in a Brain class: recurrent encoder, per-frame targets, Adadelta, gradient check and clipping, auto_mix_prec."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(615)
PHONES, FEATS, FRAMES = 12, 20, 24

hparams = {"lr": 1.0, "rho": 0.95, "eps": 1e-8, "max_grad_norm": 5.0, "number_of_epochs": 5, "batch_size": 8,
           "batches": 18, "rnn_neurons": 48}


class LiGRU(nn.Module):
    """Light gated recurrent unit without a reset gate."""

    def __init__(self, d_in, d):
        super().__init__()
        self.w, self.u, self.d = nn.Linear(d_in, 2 * d), nn.Linear(d, 2 * d, bias=False), d
        nn.init.orthogonal_(self.u.weight)

    def forward(self, x):
        gates, h, out = self.w(x), x.new_zeros(x.size(0), self.d), []
        for t in range(x.size(1)):
            z, a = (gates[:, t] + self.u(h)).chunk(2, dim=-1)
            z = torch.sigmoid(z)
            h = z * h + (1 - z) * torch.relu(a).clamp(max=6)
            out.append(h)
        return torch.stack(out, dim=1)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        d = hparams["rnn_neurons"]
        self.rnn, self.dnn, self.output = LiGRU(FEATS, d), nn.Linear(d, d), nn.Linear(d, PHONES)

    def forward(self, feats):
        return self.output(F.leaky_relu(self.dnn(self.rnn(feats))))


class Brain:
    def __init__(self, modules, opt_class, auto_mix_prec=True):
        self.modules, self.optimizer = modules, opt_class(modules.parameters())
        self.auto_mix_prec, self.nonfinite_count = auto_mix_prec, 0
        if self.auto_mix_prec:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=30)

    def compute_forward(self, batch):
        return self.modules(batch["feats"])

    def compute_objectives(self, predictions, batch):
        return F.cross_entropy(predictions.float().flatten(0, 1), batch["phones"].flatten())

    def check_gradients(self, loss):
        """Counts losses that are not finite, then clips the gradients; says whether to step."""
        if not torch.isfinite(loss):
            self.nonfinite_count += 1
            print(f"Loss is {loss}.")
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), hparams["max_grad_norm"])  # CAUSE
        return True

    def fit_batch(self, batch):
        if self.auto_mix_prec:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                outputs = self.compute_forward(batch)
                loss = self.compute_objectives(outputs, batch)
            self.scaler.scale(loss).backward()
            if self.check_gradients(loss):
                self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            outputs = self.compute_forward(batch)
            loss = self.compute_objectives(outputs, batch)
            loss.backward()
            if self.check_gradients(loss):
                self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach(), (outputs.argmax(-1) != batch["phones"]).float().mean()

    def fit(self, train_set):
        for epoch in range(1, hparams["number_of_epochs"] + 1):
            avg_loss = per = 0.0
            for step in range(1, hparams["batches"] + 1):
                loss, error = self.fit_batch(train_set.next())
                avg_loss, per = avg_loss + (loss.item() - avg_loss) / step, per + (error.item() - per) / step
            print(f"epoch: {epoch}, lr: {hparams['lr']:.2e} - train loss: {avg_loss:.3f} - frame error: {100 * per:.1f} "
                  f"- scale: {self.scaler.get_scale():g}")


class Utterances:
    def __init__(self, seed=8):
        self.gen = torch.Generator().manual_seed(seed)
        self.spectra = torch.randn(PHONES, FEATS, generator=torch.Generator().manual_seed(2))

    def next(self):
        n = hparams["batch_size"]
        segments = torch.randint(0, PHONES, (n, FRAMES // 4), generator=self.gen)
        phones = segments.repeat_interleave(4, dim=1)
        feats = self.spectra[phones] + 0.7 * torch.randn(n, FRAMES, FEATS, generator=self.gen)
        return {"feats": feats, "phones": phones}


model = Recogniser()
watch(model)
brain = Brain(model, lambda p: torch.optim.Adadelta(p, lr=hparams["lr"], rho=hparams["rho"], eps=hparams["eps"]))
brain.fit(Utterances())

MODULES = (model,)
