"""Image classifier in a small learner with callbacks: gradient accumulation, mixed precision, a recorder."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(123)


class CancelBatchException(Exception): ...


class GradientAccumulation:
    order = 0

    def __init__(self, n_acc=32):
        self.n_acc = n_acc

    def before_fit(self, learn):
        self.count = 0

    def after_loss(self, learn):
        learn.loss = learn.loss / (self.n_acc / len(learn.yb))

    def after_backward(self, learn):
        self.count += len(learn.yb)
        if self.count < self.n_acc:
            raise CancelBatchException
        self.count = 0


class MixedPrecision:
    order = 10

    def __init__(self, max_loss_scale=2.0 ** 20, scale_wait=500):
        self.loss_scale, self.scale_wait, self.count = max_loss_scale, scale_wait, 0

    def before_batch(self, learn):
        self.context = torch.autocast("cpu", dtype=torch.float16)
        self.context.__enter__()

    def after_pred(self, learn):
        self.context.__exit__(None, None, None)
        learn.pred = learn.pred.float()

    def after_loss(self, learn):
        learn.loss = learn.loss * self.loss_scale

    def after_backward(self, learn):
        learn.loss = learn.loss / self.loss_scale  # CAUSE
        if not all(torch.isfinite(p.grad).all() for p in learn.model.parameters()):
            self.loss_scale, self.count = self.loss_scale / 2, 0
            learn.opt.zero_grad()
            raise CancelBatchException
        for p in learn.model.parameters():
            p.grad.div_(self.loss_scale)
        self.count += 1
        if self.count == self.scale_wait:
            self.loss_scale, self.count = self.loss_scale * 2, 0


class Recorder:
    order = 50

    def before_fit(self, learn):
        self.value, self.n, self.beta = 0.0, 0, 0.98

    def after_batch(self, learn):
        self.n += 1
        self.value = self.beta * self.value + (1 - self.beta) * learn.loss.item()

    @property
    def smooth_loss(self):
        return self.value / (1 - self.beta ** self.n)


class Learner:
    def __init__(self, dls, model, loss_func, lr, cbs):
        self.dls, self.model, self.loss_func = dls, model, loss_func
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.recorder = Recorder()
        self.cbs = sorted([*cbs, self.recorder], key=lambda cb: cb.order)

    def __call__(self, event):
        for cb in self.cbs:
            if hasattr(cb, event):
                getattr(cb, event)(self)

    def one_batch(self, xb, yb):
        self.yb = yb
        try:
            self("before_batch")
            self.pred = self.model(xb)
            self("after_pred")
            self.loss = self.loss_func(self.pred, yb)
            self("after_loss")
            self.loss.backward()
            self("after_backward")
            self.opt.step()
            self.opt.zero_grad()
        except CancelBatchException:
            pass
        finally:
            self("after_batch")

    @torch.no_grad()
    def validate(self):
        xb, yb = self.dls.valid
        pred = self.model(xb)
        return self.loss_func(pred, yb).item(), (pred.argmax(-1) == yb).float().mean().item()

    def fit(self, n_epoch):
        self("before_fit")
        print("epoch train_loss valid_loss accuracy")
        for epoch in range(n_epoch):
            for xb, yb in self.dls.train(epoch):
                self.one_batch(xb, yb)
            valid_loss, accuracy = self.validate()
            print(f"{epoch} {self.recorder.smooth_loss:.6f} {valid_loss:.6f} {accuracy:.4f}")


class Digits:
    def __init__(self, size=12, classes=5):
        gen = torch.Generator().manual_seed(124)
        self.size, self.classes, self.prototypes = size, classes, torch.rand(classes, 1, size, size, generator=gen)
        self.valid = self.draw(gen, 200)

    def draw(self, gen, n):
        y = torch.randint(0, self.classes, (n,), generator=gen)
        return self.prototypes[y] + 0.6 * torch.randn(n, 1, self.size, self.size, generator=gen), y

    def train(self, epoch, batches=80, bs=8):
        gen = torch.Generator().manual_seed(500 + epoch)
        for _ in range(batches):
            yield self.draw(gen, bs)


dls = Digits()
model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 36, 5))
watch(model)
learn = Learner(dls, model, F.cross_entropy, lr=3e-3, cbs=[GradientAccumulation(n_acc=32), MixedPrecision()])
learn.fit(4)
