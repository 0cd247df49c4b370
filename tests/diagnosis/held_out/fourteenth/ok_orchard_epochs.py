"""Apple counting from tree crops; every epoch builds its tools anew and loads their state from the last one."""
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


def crops(n, seed):
    r = torch.Generator().manual_seed(seed)
    img = 0.15 * torch.rand(n, 3, 16, 16, generator=r)
    img[:, 1] += 0.4
    count = torch.randint(0, 7, (n,), generator=r)
    for i in range(n):
        for _ in range(int(count[i])):
            y, x = torch.randint(1, 14, (2,), generator=r).tolist()
            img[i, 0, y:y + 2, x:x + 2] = 0.9
            img[i, 1, y:y + 2, x:x + 2] = 0.1
    return img, count.float()


class Counter(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2),
                                  nn.ReLU(), nn.Conv2d(width, 1, 1))

    def forward(self, img):
        return F.softplus(self.body(img).float()).sum((1, 2, 3)) * 0.05


def tools(model, saved):
    colour = [p for n, p in model.named_parameters() if n.startswith("body.0")]
    other = [p for n, p in model.named_parameters() if not n.startswith("body.0")]
    kit = {"a": torch.optim.SGD(colour, lr=0.01, momentum=0.9), "b": torch.optim.AdamW(other, lr=6e-3),
           "scaler": torch.amp.GradScaler("cpu", init_scale=2.0 ** 22, growth_interval=30)}
    if saved is not None:
        saved.seek(0)
        for name, state in torch.load(saved).items():
            kit[name].load_state_dict(state)
    return kit


def epoch(model, batches, saved):
    kit = tools(model, saved)
    scaler, done = kit["scaler"], []
    for img, count in batches:
        kit["a"].zero_grad(set_to_none=True)
        kit["b"].zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            guess = model(img)
        loss = F.poisson_nll_loss(guess, count, log_input=False, full=True)
        scaler.scale(loss).backward()
        scaler.step(kit["a"])
        scaler.step(kit["b"])
        scaler.update()
        done.append(loss.item())
    out = io.BytesIO()
    torch.save({name: tool.state_dict() for name, tool in kit.items()}, out)
    return sum(done) / len(done), scaler.get_scale(), out


def main():
    torch.manual_seed(7)
    model = Counter()
    watch(model)
    img, count = crops(240, seed=70)
    batches = list(zip(img.split(20), count.split(20)))
    saved = None
    for number in range(8):
        loss, scale, saved = epoch(model, batches, saved)
        print(f"epoch {number} loss {loss:.4f} scale {scale:g} checkpoint {saved.getbuffer().nbytes} bytes")


if __name__ == "__main__":
    main()
