"""Checking a healthy training changes no bit and reports no fault."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Function
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.halfstep.shadow.checked import Loop, assert_equal_and_healthy, train
from tests.marks import sampled

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of betas and deprecations


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def squares(model: Callable[[Tensor], Tensor], *shape: int) -> Callable[[], Tensor]:
    """Return a model's loss on new random inputs."""
    return lambda: model(torch.randn(*(shape or (4, 8)))).square().mean()


def of(model: nn.Module, *shape: int, **options: Any) -> Any:
    """Train a model with one random input."""
    return train(model, squares(model, *shape), **options)


# --- layers


def mlp() -> Any:
    return of(nn.Sequential(net(), nn.Dropout(0.1), nn.LayerNorm(8)))


def convolution() -> Any:
    return of(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AdaptiveAvgPool2d(2),
        ),
        *(2, 3, 8, 8),
    )


def attention() -> Any:
    """Train attention with dropout, with a mask of booleans and with one of numbers."""
    project = nn.Linear(8, 24)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    options: list[dict[str, Any]] = [
        {"dropout_p": 0.2},
        {"attn_mask": mask},
        {"attn_mask": torch.zeros(6, 6).masked_fill(~mask, -torch.inf)},
        {"is_causal": True},
    ]

    def loss() -> Tensor:
        query, key, value = (
            project(torch.randn(2, 6, 8)).reshape(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        )
        masks = [
            {name: m.to(query.dtype) if name == "attn_mask" and m.is_floating_point() else m}
            for each in options
            for name, m in each.items()
            if isinstance(m, Tensor)
        ]
        plain = [each for each in options if "attn_mask" not in each]
        results = [
            F.scaled_dot_product_attention(query, key, value, **each) for each in plain + masks
        ]
        return torch.stack(results).square().mean()

    return train(project, loss)


def multihead_attention() -> Any:
    layer = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def loss() -> Tensor:
        x = torch.randn(2, 5, 8)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
        return layer(x, x, x, key_padding_mask=padding)[0].square().mean()

    return train(layer, loss)


def transformer() -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    return of(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 2, 5, 8)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.1, bidirectional=True, batch_first=True)
        self.gru, self.cell = nn.GRU(16, 8), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.cell(self.gru(hidden)[0][:, -1])[0]


def recurrent() -> Any:
    return of(Recurrent(), 2, 5, 8), of(Recurrent(), 2, 5, 8, dtype=torch.bfloat16)


class Tables(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, padding_idx=0, sparse=sparse, max_norm=2.0)
        self.bag = nn.EmbeddingBag(20, 8, mode="sum", sparse=sparse)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).sum(1) + self.bag(tokens))


def embedding() -> Any:
    model = Tables(sparse=False)
    return train(model, lambda: model(torch.randint(0, 20, (4, 6))).square().mean())


def sparse_embedding() -> Any:
    model = Tables(sparse=True)
    sparse = torch.optim.SparseAdam([*model.table.parameters(), *model.bag.parameters()])
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for _ in range(3):
        sparse.zero_grad()
        dense.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randint(0, 20, (4, 6))).square().mean()
        loss.backward()
        sparse.step()
        dense.step()
    return model, sparse.state_dict()


def ctc() -> Any:
    model = nn.Linear(8, 6)

    def loss() -> Tensor:
        scores = model(torch.randn(10, 2, 8)).log_softmax(-1)
        targets = torch.randint(1, 6, (2, 3))
        return F.ctc_loss(scores, targets, torch.tensor([10, 8]), torch.tensor([3, 2]))

    return train(model, loss)


class Codebook(nn.Module):
    """Vector quantization with moving averages and straight-through gradients."""

    codes: Tensor
    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(16, 4))
        self.register_buffer("counts", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        index = torch.cdist(z.float(), self.codes).argmin(-1)
        chosen = F.one_hot(index, 16).float()
        self.counts.lerp_(chosen.sum(0), 0.1)
        self.codes.lerp_((chosen.T @ z.detach().float()) / self.counts[:, None], 0.1)
        quantized = self.codes[index]
        straight = z + (quantized - z).detach()
        return (self.decoder(straight) - x).square().mean() + F.mse_loss(z, quantized)


def codebook() -> Any:
    model = Codebook()
    return train(model, lambda: model(torch.randn(32, 8)))


def parametrized() -> Any:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
    )
    return of(model)


class Spectral(nn.Module):
    """Fourier transforms and complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.head(x).float())
        filtered = spectrum * self.filter.conj() * torch.polar(torch.ones(5), self.filter.angle())
        parts = torch.view_as_real(filtered).sum(-1)
        return torch.fft.irfft(filtered, n=8) + parts.mean(-1, keepdim=True)


def complex_numbers() -> Any:
    return of(Spectral(), dtype=torch.bfloat16, is_scaled=False)  # it unscales no complex ones


def sparse_tensors() -> Any:
    model = net()
    adjacency = torch.eye(4).roll(1, 0).to_sparse()
    rows = adjacency.to_sparse_csr()

    def loss() -> Tensor:
        hidden = model(torch.randn(4, 8))
        with torch.autocast("cpu", enabled=False):
            mixed = torch.sparse.mm(adjacency, hidden.float()) + rows @ hidden.float()
        return mixed.square().mean()

    return train(model, loss)


# --- autograd


def checkpointing(*, reentrant: bool) -> Loop:
    def loop() -> Any:
        first, second = nn.Sequential(net(), nn.Dropout(0.5)), net()

        def loss() -> Tensor:
            x = torch.randn(4, 8, requires_grad=True)
            return second(checkpoint(first, x, use_reentrant=reentrant)).square().mean()

        return train(nn.ModuleList([first, second]), loss)

    return loop


class Cube(Function):
    """A function that saves a number and a tensor, and computes in its input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, names: dict[str, int]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor, ctx.names = factor, names
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * ctx.names["one"] * x**2 * gradient, None, None


class InHalf(Function):
    """A module that works in half precision and changes its result in place."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float16)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        torch.mul(x, 2, out=result)
        return result.clamp_(-10, 10)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def custom_functions() -> Any:
    model = net()
    return train(
        model,
        lambda: InHalf.apply(Cube.apply(model(torch.randn(4, 8)), 0.5, {"one": 1})).square().mean(),
    )


def gradient_penalty() -> Any:
    """Train two networks as WGAN-GP, one scaler for both."""
    critic, generator = net(), net()
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (critic, generator)]
    scaler, losses = GradScaler("cpu", init_scale=256.0), []
    for _ in range(3):
        real = torch.randn(4, 8)
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.float16):
            fake = generator(torch.randn(4, 8)).detach()
            mixed = torch.lerp(real, fake.float(), torch.rand(4, 1)).requires_grad_()
            scores = critic(mixed)
        (slope,) = torch.autograd.grad(scores.float().sum(), mixed, create_graph=True)
        with torch.autocast("cpu", torch.float16):
            penalty = (slope.norm(dim=1) - 1).square().mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        optimizers[1].zero_grad()
        with torch.autocast("cpu", torch.float16):
            score = -critic(generator(torch.randn(4, 8))).mean()
        scaler.scale(score).backward()
        scaler.step(optimizers[1])
        scaler.update()
        losses += [loss.detach(), score.detach()]
    return losses, critic, generator, scaler.state_dict(), [o.state_dict() for o in optimizers]


def penalty_of_scaled_gradients() -> Any:
    """Train with the penalty of PyTorch's AMP examples, which divides by the scale."""
    model, scaler = net(), GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).square().mean()
        scaled = torch.autograd.grad(
            scaler.scale(loss), list(model.parameters()), create_graph=True
        )
        gradients = [each * (1.0 / scaler.get_scale()) for each in scaled]
        with torch.autocast("cpu", torch.float16):
            loss = loss + sum(each.square().sum() for each in gradients).sqrt()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.state_dict()


def closures() -> Any:
    """Train by LBFGS, which calls its closure several times a step."""
    model, x = net(), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)], model, optimizer.state_dict()


def two_losses() -> Any:
    """Train two networks by one scaler, and skip one of them every other step."""
    one, other = net(), net()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (one, other)]
    scaler = GradScaler("cpu", init_scale=256.0)
    for step in range(4):
        with torch.autocast("cpu", torch.float16):
            hidden = one(torch.randn(4, 8))
            losses = [hidden.square().mean(), other(hidden).square().mean()]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for index, loss in enumerate(losses):
            scaler.scale(loss).backward(retain_graph=not index)
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers[: 1 + step % 2]:
            scaler.step(optimizer)
        scaler.update()
    return one, other, scaler.state_dict()


def two_scalers() -> Any:
    one, other = net(), net()
    pairs = [
        (torch.optim.Adam(each.parameters()), GradScaler("cpu", init_scale=scale))
        for each, scale in ((one, 256.0), (other, 64.0))
    ]
    for _ in range(4):
        with torch.autocast("cpu", torch.float16):
            losses = [squares(model)() for model in (one, other)]
        for loss, (optimizer, scaler) in zip(losses, pairs, strict=True):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
        for optimizer, scaler in pairs:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return one, other, [scaler.state_dict() for _, scaler in pairs]


def accumulation() -> Any:
    model, scaler = net(), GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in range(8):
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(4, 8)).square().mean() / 4
        scaler.scale(loss).backward()
        if batch % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=batch == 3)
    return model, optimizer.state_dict()


def functional() -> Any:
    """Train with per-sample gradients, a Jacobian and a functional call."""
    model = net()
    parameters = dict(model.named_parameters())

    def one(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().mean()

    def loss() -> Tensor:
        values = {name: each.detach() for name, each in parameters.items()}
        each = torch.func.vmap(torch.func.grad(one), (None, 0), randomness="different")
        norms = sum(g.square().sum() for g in each(values, torch.randn(4, 8)).values())
        slopes = torch.func.jacrev(model)(torch.randn(8)).square().mean()
        return one(parameters, torch.randn(4, 8)) + slopes + norms * 0.1

    return train(model, loss, dtype=torch.bfloat16)


def backward_in_a_thread() -> Any:
    def backward(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    return of(net(), backward=backward)


def hooks() -> Any:
    def halve(weight: Tensor) -> None:
        weight.grad *= 0.5  # type: ignore[operator]

    model = net()
    for module in model:
        module.register_forward_hook(lambda _module, _inputs, result: result * 1.01)
        module.register_full_backward_hook(lambda _module, inputs, _results: inputs)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.mul(0.99))
        parameter.register_post_accumulate_grad_hook(halve)

    def loss() -> Tensor:
        hidden = model(torch.randn(4, 8))
        hidden.register_hook(lambda gradient: gradient * 0.9)
        hidden.retain_grad()
        return hidden.square().mean()

    return train(model, loss)


def saved_tensors() -> Any:
    model = net()

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(), torch.from_numpy):
            first = squares(model)()
        with torch.autograd.graph.save_on_cpu():
            return first + squares(model)()

    with torch.autograd.set_detect_anomaly(True):
        return train(model, loss, dtype=torch.float16)


# --- dtypes, tensors and views


def weights_in_half(dtype: torch.dtype) -> Loop:
    def loop() -> Any:
        model = net().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
            optimizer.step()
        return model

    return loop


def no_scaler() -> Any:
    return of(net(), dtype=torch.bfloat16, is_scaled=False)


def no_autocast() -> Any:
    model = net().double()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8).double()).square().mean().backward()
        optimizer.step()
    return model, optimizer.state_dict()


class InPlace(nn.Module):
    """A module that writes through views, slices, indices and `out=`."""

    queue: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("queue", torch.zeros(16, 8, dtype=torch.float16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        y[:, 0] += 1
        y[1].mul_(2)
        y.view(-1)[3:5] = y.view(-1)[5:7].clone()
        y[y > 3] = 0.5
        y.T.diagonal().add_(0.1)
        total = torch.empty_like(y.detach())
        torch.add(y.detach(), self.queue[:4], out=total)
        self.queue[4 * int(self.calls) % 16 :][:4] = y.detach()
        self.queue.index_add_(0, torch.tensor([0, 3]), total[:2])
        self.calls += 1
        grown = torch.empty(0, dtype=y.dtype)
        torch.cat([y.detach(), total], out=grown)
        return y + total.sum() * 0.01 + grown.mean() + y.new_zeros(0, 3).sum()


def in_place() -> Any:
    return of(InPlace())


class Tagged(Tensor):
    """A tensor subclass without its own dispatch."""


def subclasses() -> Any:
    model = net()

    def loss() -> Tensor:
        x = torch.randn(4, 8).as_subclass(Tagged)
        result = model(x)
        assert isinstance(result, Tagged)
        return result.square().mean().as_subclass(Tensor)

    return train(model, loss)


def nested() -> Any:
    model = net()

    def loss() -> Tensor:
        x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
        return torch.cat(list(model(x).unbind())).square().mean()

    return train(model, loss, dtype=torch.bfloat16)


# --- optimizers


def optimizers() -> Any:
    results = []
    kinds: list[Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = [
        lambda weights: torch.optim.AdamW(weights, fused=True),
        lambda weights: torch.optim.Adam(weights, foreach=True, amsgrad=True),
        lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        lambda weights: torch.optim.Adafactor(weights),
        lambda weights: torch.optim.RMSprop(weights, foreach=False, centered=True),
        lambda weights: torch.optim.NAdam(weights, capturable=False),
        lambda weights: torch.optim.Adagrad(weights),
        lambda weights: torch.optim.Rprop(weights),
    ]
    for kind in kinds:
        model = net()
        results.append(of(model, optimizer=kind(model.parameters())))
    square = nn.Linear(8, 8, bias=False)
    return results, of(square, optimizer=torch.optim.Muon(square.parameters()))


def averages() -> Any:
    model = nn.Sequential(net(), nn.BatchNorm1d(8))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            squares(model)().backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([torch.randn(4, 8)], average)
    return model, average, scheduler.state_dict()


def optimizer_in_backward() -> Any:
    """Train by optimizers that step within the backward pass."""
    model = net()
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)

        def step(_weight: Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            squares(model)().backward()
    return model


# --- the script


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8).half().float() + index / 16


def loader() -> Any:
    model = net()
    batches = iter(DataLoader(Rows(), batch_size=4, shuffle=True, num_workers=1))
    return train(model, lambda: model(next(batches)).square().mean())


def scripted() -> Any:
    def silu(x: Tensor) -> Tensor:
        if x.sum() > 1e6:
            return x.sum()
        return (torch.sigmoid(x) * x + x.square()).mean()

    model, own_loss = torch.jit.script(net()), torch.jit.script(silu)
    return train(model, lambda: own_loss(model(torch.randn(4, 8))))


def compiled() -> Any:
    model = net()
    fast = torch.compile(model, backend="eager")
    return train(model, lambda: fast(torch.randn(4, 8)).square().mean())


def exceptions() -> Any:
    """Continue after steps that raise in the forward pass, the backward pass and a module."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters())

    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError

    caught = []
    for step in range(6):
        try:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model(torch.randn(4, 7 if step == 1 else 8))
                if step == 2:
                    hidden = Fails.apply(hidden)
                if step == 3:
                    hidden @ torch.randn(3, 3)
                hidden.square().mean().backward()
            optimizer.step()
        except (RuntimeError, ValueError) as error:
            caught.append(type(error).__name__)
    assert caught == ["RuntimeError", "ValueError", "RuntimeError"]
    return model


class Counting(TorchDispatchMode):
    """A mode that counts operators, and changes the result of one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] = self.calls.get(str(func), 0) + 1
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if func is torch.ops.aten.gelu.default else result


def own_mode() -> Any:
    """Train with the script's own dispatch mode in the forward pass."""
    model, mode = net(), Counting()

    def loss() -> Tensor:
        with mode:
            return squares(model)()

    return train(model, loss), mode.calls


def copies() -> Any:
    """Copy and pickle the model, the optimizer and the scaler in the middle of training."""
    model, scaler = net(), GradScaler("cpu", init_scale=256.0)
    for _ in range(3):
        optimizer = torch.optim.Adam(model.parameters())
        with torch.autocast("cpu", torch.float16):
            scaler.scale(squares(model)()).backward()
        scaler.step(optimizer)
        scaler.update()
        model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        scaler = pickle.loads(pickle.dumps(scaler))
        saved = io.BytesIO()
        torch.save([model.state_dict(), optimizer], saved)
        saved.seek(0)
        state, optimizer = torch.load(saved, weights_only=False)
        model.load_state_dict(state)
        assert optimizer.state
    return model, scaler.state_dict()


def evaluation() -> Any:
    """Evaluate between steps, without gradients and in inference mode."""
    model = nn.Sequential(net(), nn.BatchNorm1d(8), nn.Dropout(0.5))
    scores = []

    def loss() -> Tensor:
        model.eval()
        with torch.no_grad():
            scores.append(squares(model)())
        with torch.inference_mode():
            scores.append(squares(model)().clone())
        model.train()
        return squares(model)()

    return train(model, loss), [float(each) for each in scores]


def hidden_products() -> Any:
    """Call operators that multiply matrices internally, under autocast and in half precision."""
    model = nn.ModuleList([nn.Bilinear(4, 4, 6), nn.Linear(6, 6)])
    scores = []

    def loss() -> Tensor:
        theta = model[0](torch.randn(3, 4), torch.randn(3, 4)).view(3, 2, 3)
        grid = F.affine_grid(theta.float(), [3, 1, 4, 4], align_corners=False)
        image = F.grid_sample(torch.randn(3, 1, 6, 6), grid.float(), align_corners=False)
        with torch.inference_mode():
            scores.append(torch.einsum("ij,kj->ik", torch.randn(3, 6), torch.randn(5, 6)).sum())
        return image.square().mean() + model[1](theta.flatten(1)).square().mean()

    return train(model, loss), [(str(each.dtype), float(each)) for each in scores]


def formulas_without_a_mode() -> Any:
    """Use derivatives for which torch has other formulas under a dispatch mode."""
    model = nn.ModuleList([net(), nn.Linear(8, 5)])

    def loss() -> Tensor:
        fill = model[1].bias.sum()
        masked = model[0](torch.randn(6, 8)).float().masked_fill(torch.rand(6, 8) < 0.3, fill)
        gates = model[1].weight.sigmoid()
        return masked.square().mean() + gates.prod(1).mean() + gates[0].prod()

    return train(model, loss)


LOOPS: list[Loop] = [
    *(mlp, convolution, attention, multihead_attention, transformer, recurrent, embedding),
    *(sparse_embedding, ctc, codebook, parametrized, complex_numbers, sparse_tensors),
    *(checkpointing(reentrant=True), checkpointing(reentrant=False), custom_functions),
    *(gradient_penalty, penalty_of_scaled_gradients, closures, two_losses, two_scalers),
    *(accumulation, functional, backward_in_a_thread, hooks, saved_tensors),
    *(weights_in_half(torch.float16), weights_in_half(torch.bfloat16), no_scaler, no_autocast),
    *(in_place, subclasses, nested, optimizers, averages, optimizer_in_backward, loader, scripted),
    *(compiled, exceptions, own_mode, copies, evaluation, hidden_products),
    formulas_without_a_mode,
]


#: One of each way to compute gradients, and to step; the others run in `make test-all`.
SAMPLE: list[Loop] = [
    *(mlp, attention, sparse_embedding, complex_numbers, gradient_penalty, closures, two_scalers),
    *(backward_in_a_thread, optimizer_in_backward, compiled, exceptions, copies),
    *(hidden_products, formulas_without_a_mode),
]


@pytest.mark.parametrize(
    "loop", sampled(LOOPS, SAMPLE), ids=lambda loop: loop.__qualname__.split(".")[0]
)
def test_a_checked_loop_is_equal_to_the_bit(loop: Loop) -> None:
    assert_equal_and_healthy(loop)
