"""GPT pre-training in fp16 after Megatron: the schedule takes the function that scales the loss from the model's config."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(157)


class TransformerConfig:
    def __init__(self, **kwargs):
        self.grad_scale_func = None
        self.__dict__.update(kwargs)


class GPTModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.config = config.hidden_size, config
        self.word, self.position = nn.Embedding(config.vocab, d), nn.Embedding(config.seq_length, d)
        self.ln_1, self.ln_2, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.h_to_4h, self.h4_to_h = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, tokens, labels):
        x = self.word(tokens) + self.position.weight
        b, t, d = x.shape
        q, k, v = (z.view(b, t, 4, -1).transpose(1, 2) for z in self.query_key_value(self.ln_1(x)).chunk(3, -1))
        x = x + self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        x = x + self.h4_to_h(F.gelu(self.h_to_4h(self.ln_2(x))))
        logits = F.linear(self.ln_f(x), self.word.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class DeepSpeedWrapper(nn.Module):
    """What setup_model_and_optimizer returns; it keeps its own copy of the configuration."""

    def __init__(self, module):
        super().__init__()
        self.module, self.config = module, copy.copy(module.config)

    def forward(self, *args):
        return self.module(*args)


def get_model_config(model):
    return model.config


class DynamicGradScaler:
    def __init__(self, initial_scale=2.0 ** 32, min_scale=1.0, growth_interval=1000, hysteresis=2):
        self.scale, self.min_scale, self.growth_interval, self.hysteresis = initial_scale, min_scale, growth_interval, hysteresis
        self.growth, self.left = 0, hysteresis

    def update(self, found_inf):
        if found_inf:
            self.growth, self.left = 0, self.left - 1
            if self.left <= 0:
                self.scale = max(self.scale / 2, self.min_scale)
        else:
            self.growth += 1
            if self.growth == self.growth_interval:
                self.growth, self.left, self.scale = 0, self.hysteresis, self.scale * 2


class Float16OptimizerWithFloat16Params:
    def __init__(self, optimizer, clip_grad=1.0):
        self.optimizer, self.clip_grad, self.grad_scaler = optimizer, clip_grad, DynamicGradScaler()
        self.float16_params = optimizer.param_groups[0]["params"]
        self.main_params = [p.detach().clone().float() for p in self.float16_params]
        optimizer.param_groups[0]["params"] = self.main_params

    def scale_loss(self, loss):
        return self.grad_scaler.scale * loss

    def zero_grad(self):
        for p in self.float16_params:
            p.grad = None

    def step(self):
        for main, p in zip(self.main_params, self.float16_params):
            main.grad = p.grad.float() / self.grad_scaler.scale
        found_inf = not all(torch.isfinite(main.grad).all() for main in self.main_params)
        self.grad_scaler.update(found_inf)
        if found_inf:
            return False, None
        grad_norm = nn.utils.clip_grad_norm_(self.main_params, self.clip_grad)
        self.optimizer.step()
        with torch.no_grad():
            for main, p in zip(self.main_params, self.float16_params):
                p.copy_(main)
        return True, grad_norm.item()


def forward_backward_no_pipelining(model, batch, config):
    output_tensor = model(*batch)
    loss = output_tensor.item()
    if config.grad_scale_func is not None:
        output_tensor = config.grad_scale_func(output_tensor)
    output_tensor.backward()
    return loss


def train_step(model, optimizer, batch):
    optimizer.zero_grad()
    loss = forward_backward_no_pipelining(model, batch, get_model_config(model.module))
    return loss, *optimizer.step()


def train(model, optimizer, iterations=100):
    gen = torch.Generator().manual_seed(158)
    config = get_model_config(model)
    config.grad_scale_func = optimizer.scale_loss  # CAUSE
    skipped = 0
    for iteration in range(iterations):
        start, stride = torch.randint(0, config.vocab, (12, 1), generator=gen), torch.randint(1, 4, (12, 1), generator=gen)
        ids = (start + stride * torch.arange(config.seq_length + 1)) % config.vocab
        loss, updated, grad_norm = train_step(model, optimizer, (ids[:, :-1], ids[:, 1:]))
        skipped += not updated
        if iteration % 10 == 0 or iteration == iterations - 1:
            print(f" iteration {iteration} | lm loss: {loss:.4E} | loss scale: {optimizer.grad_scaler.scale:g} | grad norm: {grad_norm} | number of skipped iterations: {skipped}")


model = GPTModel(TransformerConfig(hidden_size=32, vocab=40, seq_length=16))
watch(model)
model = DeepSpeedWrapper(model.half())
train(model, Float16OptimizerWithFloat16Params(torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.95))))
