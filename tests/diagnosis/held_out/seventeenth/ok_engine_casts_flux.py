"""ControlNet-like adapter training; mixed precision is the engine's business, the script has no autocast."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(181)


class Args:
    mixed_precision, learning_rate, max_train_steps, max_grad_norm, gradient_accumulation_steps = "bf16", 4e-3, 60, 1.0, 2


class Engine:
    """The part of DeepSpeed that is used here: bf16 module, float32 masters, float32 accumulation of the gradients."""

    def __init__(self, model, lr, config):
        self.config = config
        self.module = model.to(torch.bfloat16) if config["bf16"]["enabled"] else model
        self.low = [p for p in self.module.parameters() if p.requires_grad]
        self.master = [p.detach().clone().float().requires_grad_() for p in self.low]
        self.optimizer = torch.optim.AdamW(self.master, lr=lr)
        self.accumulated = [torch.zeros_like(m) for m in self.master]
        self.micro_steps = 0

    def __call__(self, *inputs):
        dtype = self.low[0].dtype
        return self.module(*(x.to(dtype) if x.is_floating_point() else x for x in inputs))

    def backward(self, loss):
        (loss / self.config["gradient_accumulation_steps"]).backward()
        for acc, p in zip(self.accumulated, self.low):
            acc += p.grad.float()
            p.grad = None
        self.micro_steps += 1

    def step(self):
        if self.micro_steps % self.config["gradient_accumulation_steps"]:
            return
        for m, acc in zip(self.master, self.accumulated):
            m.grad = acc.clone()
            acc.zero_()
        nn.utils.clip_grad_norm_(self.master, self.config["gradient_clipping"])
        self.optimizer.step()
        with torch.no_grad():
            for p, m in zip(self.low, self.master):
                p.copy_(m)


class FluxBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(d, elementwise_affine=False), nn.MultiheadAttention(d, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.modulation = nn.Linear(d, 2 * d)

    def forward(self, x, vec):
        shift, scale = self.modulation(F.silu(vec)).unsqueeze(1).chunk(2, -1)
        y = (1 + scale) * self.norm(x) + shift
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(x)


class ControlNet(nn.Module):
    def __init__(self, channels=8, d=64):
        super().__init__()
        self.img_in, self.cond_in, self.time_in = nn.Linear(channels, d), nn.Linear(channels, d), nn.Linear(16, d)
        self.blocks = nn.ModuleList(FluxBlock(d) for _ in range(2))
        self.out = nn.Linear(d, channels)

    def forward(self, img, cond, time_features):
        x, vec = self.img_in(img) + self.cond_in(cond), self.time_in(time_features)
        for block in self.blocks:
            x = block(x, vec)
        return self.out(x)


def time_features(t):
    f = t[:, None] * 3.14159 * torch.arange(1, 9)
    return torch.cat([f.sin(), f.cos()], 1)


def edges_and_pictures(gen, n=12, tokens=16):
    """The condition is where the picture changes sign."""
    walk = torch.randn(n, tokens, 8, generator=gen).cumsum(1) / 2
    x1 = torch.tanh(walk)
    return torch.sign(x1), x1


def main():
    args = Args()
    weight_dtype = torch.float32
    if args.mixed_precision == "bf16":
        weight_dtype = torch.bfloat16
    dit = ControlNet()
    watch(dit)
    dit = Engine(dit, args.learning_rate, {"bf16": {"enabled": weight_dtype is torch.bfloat16}, "gradient_clipping": args.max_grad_norm,
                                           "gradient_accumulation_steps": args.gradient_accumulation_steps})
    gen = torch.Generator().manual_seed(182)
    for global_step in range(args.max_train_steps):
        train_loss = 0.0
        for _ in range(args.gradient_accumulation_steps):
            control, x_1 = edges_and_pictures(gen)
            t = torch.sigmoid(torch.randn(len(x_1), generator=gen))
            x_0 = torch.randn(x_1.shape, generator=gen)
            x_t = (1 - t[:, None, None]) * x_1 + t[:, None, None] * x_0
            model_pred = dit(x_t, control, time_features(t))
            loss = F.mse_loss(model_pred.float(), x_0 - x_1)
            train_loss += loss.item() / args.gradient_accumulation_steps
            dit.backward(loss)
            dit.step()
        if global_step % 10 == 0 or global_step == args.max_train_steps - 1:
            print(f"step {global_step} train_loss {train_loss:.4f}")


if __name__ == "__main__":
    main()
