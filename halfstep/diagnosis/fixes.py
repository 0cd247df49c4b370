"""Code changes to a training script that fix a cause."""

ZERO_GRAD = """\
optimizer.zero_grad()          # at the start of every iteration
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""
ZERO_GRAD_UNSCALED = """\
optimizer.zero_grad()          # at the start of every iteration
loss.backward()
optimizer.step()
"""
SCALED_LOSS = """\
scaler.scale(loss).backward()  # every loss of this optimizer, not loss.backward()
scaler.step(optimizer)
scaler.update()
"""
CALL_ORDER = """\
for _ in range(accumulated):
    scaler.scale(loss).backward()
scaler.unscale_(optimizer)     # once, after the last backward pass
scaler.step(optimizer)
scaler.update()                # once, after the steps of all optimizers
"""
CLIP = """\
scaler.scale(loss).backward()
scaler.unscale_(optimizer)     # before the clip
torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
scaler.step(optimizer)
scaler.update()
"""
DIRECT_STEP = """\
scaler.step(optimizer)         # this calls optimizer.step(), unless a gradient is not finite
scaler.update()
# no optimizer.step() of its own
"""
STEP_LEFT_OUT = """\
if is_last_micro_batch:
    scaler.step(optimizer)
    scaler.update()            # once for each scaler.step
"""
GRADIENTS_DROPPED = """\
scaler.scale(loss).backward()
scaler.unscale_(optimizer)     # before the norm is read
norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
if norm < limit or not torch.isfinite(norm):
    scaler.step(optimizer)     # of gradients that are not finite it skips itself, and then
    scaler.update()            # update() lowers the scale
optimizer.zero_grad()
"""
SCALER_STATE = """\
scaler = torch.amp.GradScaler(device)                 # once, before all epochs
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, path)
scaler.load_state_dict(torch.load(path)["scaler"])    # on resume
"""
SINGULAR = """\
safe = torch.where(x > 0, x, 1.0)           # before the root, whose gradient at 0 is infinite
root = torch.where(x > 0, safe.sqrt(), 0.0)
norm = (x.square().sum(-1) + 1e-4).sqrt()   # or with an eps; fp16 rounds one below 3e-8 to 0
unit = F.normalize(x, dim=-1, eps=1e-2)
log = x.clamp_min(1e-4).log()
"""
INPUTS = """\
for batch in loader:
    bad = ~torch.isfinite(batch["input"]).flatten(1).all(1)
    if bad.any():
        print("not finite:", batch["index"][bad])
"""
FORWARD = """\
with torch.autocast(device, enabled=False):           # around the module that overflows
    out = module(x.float())
"""
DIVERGED = """\
optimizer = torch.optim.AdamW(model.parameters(), lr=rate / 10)
"""
BACKWARD = """\
scaler = torch.amp.GradScaler(device, growth_interval=10_000)
"""
ADAM_EPS = """\
model.float()                                         # weights in float32, autocast for the rest
# or: torch.optim.Adam(model.parameters(), eps=1e-4)
"""
FIRST_NONFINITE = """\
with torch.autograd.detect_anomaly():                 # from a state before that step
    loss.backward()
"""
FP16_GRADIENTS = """\
model = model.float()                                 # not model.half()
with torch.autocast(device, dtype=torch.float16):
    loss = loss_function(model(x), y)
"""
NO_GRADIENT = """\
for name, parameter in model.named_parameters():
    print(name, parameter.requires_grad, parameter.grad is None)
"""
METRIC = """\
if len(values):                                       # log nothing over no examples
    watch.log({"val/loss": values.mean()})
"""
STATE = """\
torch.save({"optimizer": optimizer.state_dict()}, path)  # as it is, not in half precision
"""
NO_INF_CHECKS = """\
ours = {id(parameter) for parameter in model.parameters()}
for parameter in (p for group in optimizer.param_groups for p in group["params"]):
    print(id(parameter) in ours, parameter.requires_grad, parameter.grad is None)
"""
NO_OPTIMIZER = """\
optimizer = torch.optim.SGD(model.parameters())
loss.backward()
optimizer.step()
"""
ZERO_GRADIENTS = """\
print(loss.grad_fn, loss.requires_grad)               # is the model part of the graph?
"""
SCHEDULE = """\
before = scaler.get_scale()
scaler.step(optimizer)
scaler.update()
if scaler.get_scale() >= before:                      # the step was applied
    scheduler.step()
"""
SCALER_WITHOUT_FP16 = """\
with torch.autocast(device, dtype=torch.bfloat16):
    loss = loss_function(model(x), y)
loss.backward()
optimizer.step()
"""
