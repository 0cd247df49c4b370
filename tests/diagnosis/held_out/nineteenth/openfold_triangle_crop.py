"""Pair representation with triangle multiplicative updates, trained on distograms of small synthetic chains."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(222)
C_Z, C_HIDDEN, BINS = 24, 16, 10


def permute_final_dims(t, inds):
    first = t.dim() - len(inds)
    return t.permute(*range(first), *[first + i for i in inds])


class TriangleMultiplicativeUpdate(nn.Module):
    def __init__(self, c_z, c_hidden, outgoing=True):
        super().__init__()
        self.outgoing = outgoing
        self.linear_a_p, self.linear_a_g = nn.Linear(c_z, c_hidden), nn.Linear(c_z, c_hidden)
        self.linear_b_p, self.linear_b_g = nn.Linear(c_z, c_hidden), nn.Linear(c_z, c_hidden)
        self.linear_g, self.linear_z = nn.Linear(c_z, c_z), nn.Linear(c_hidden, c_z)
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(c_z), nn.LayerNorm(c_hidden)
        for gate in (self.linear_a_g, self.linear_b_g, self.linear_g):
            nn.init.zeros_(gate.weight), nn.init.ones_(gate.bias)

    def combine_projections(self, a, b):
        if self.outgoing:
            p = torch.matmul(permute_final_dims(a, (2, 0, 1)), permute_final_dims(b, (2, 1, 0)))  # CAUSE
        else:
            p = torch.matmul(permute_final_dims(a, (2, 1, 0)), permute_final_dims(b, (2, 0, 1)))  # CAUSE
        return permute_final_dims(p, (1, 2, 0))

    def forward(self, z, mask):
        mask = mask.unsqueeze(-1)
        z = self.layer_norm_in(z)
        a = self.linear_a_p(z) * torch.sigmoid(self.linear_a_g(z)) * mask
        b = self.linear_b_p(z) * torch.sigmoid(self.linear_b_g(z)) * mask
        x = self.combine_projections(a, b)
        x = self.linear_z(self.layer_norm_out(x))
        return x * torch.sigmoid(self.linear_g(z))


class PairTransition(nn.Module):
    def __init__(self, c_z, n=2):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(c_z), nn.Linear(c_z, n * c_z), nn.Linear(n * c_z, c_z)

    def forward(self, z):
        return self.down(torch.relu(self.up(self.norm(z))))


class PairStack(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.embed_i, self.embed_j = nn.Embedding(21, C_Z), nn.Embedding(21, C_Z)
        self.relpos = nn.Embedding(17, C_Z)
        self.tri_out = nn.ModuleList(TriangleMultiplicativeUpdate(C_Z, C_HIDDEN, True) for _ in range(blocks))
        self.tri_in = nn.ModuleList(TriangleMultiplicativeUpdate(C_Z, C_HIDDEN, False) for _ in range(blocks))
        self.transition = nn.ModuleList(PairTransition(C_Z) for _ in range(blocks))
        self.distogram = nn.Linear(C_Z, BINS)

    def load_pretrained_scale(self, gain=46.0):
        """The projections of a trained trunk are much larger than at initialisation."""
        for tri in (*self.tri_out, *self.tri_in):
            for lin in (tri.linear_a_p, tri.linear_b_p):
                lin.weight.data.mul_(gain)

    def forward(self, aatype, mask):
        n = aatype.size(1)
        offset = (torch.arange(n)[:, None] - torch.arange(n)[None]).clamp(-8, 8) + 8
        z = self.embed_i(aatype)[:, :, None] + self.embed_j(aatype)[:, None] + self.relpos(offset)
        for out, inc, trans in zip(self.tri_out, self.tri_in, self.transition):
            z = z + out(z, mask)
            z = z + inc(z, mask)
            z = z + trans(z)
        return self.distogram(z + z.transpose(1, 2))


def chains(gen, step, batch=2):
    """Random coils whose step length depends on the residue; crops of 12 to 20 residues, sometimes a whole chain."""
    n = 48 if step % 16 == 13 else int(torch.randint(12, 21, (1,), generator=gen))
    aatype = torch.randint(0, 20, (batch, n), generator=gen)
    direction = F.normalize(torch.randn(batch, n, 3, generator=gen).cumsum(1) * 0.6 + torch.randn(batch, n, 3, generator=gen), dim=-1)
    xyz = (direction * (2.5 + 0.15 * aatype[..., None])).cumsum(1)
    bins = torch.bucketize(torch.cdist(xyz, xyz), torch.linspace(3, 30, BINS - 1))
    lengths = torch.tensor([n] + [n - 2] * (batch - 1))
    seq = torch.arange(n)[None] < lengths[:, None]
    return aatype, (seq[:, :, None] & seq[:, None]).float(), bins


def distogram_loss(logits, bins, mask):
    errors = F.cross_entropy(logits.float().permute(0, 3, 1, 2), bins, reduction="none")
    return (errors * mask).sum() / mask.sum()


model = PairStack()
model.load_pretrained_scale()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
gen = torch.Generator().manual_seed(223)

for step in range(80):
    aatype, pair_mask, bins = chains(gen, step)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = distogram_loss(model(aatype, pair_mask), bins, pair_mask)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if step % 8 in (0, 5):
        print(f"step {step} residues {aatype.size(1)} distogram {loss.item():.4f} scale {scaler.get_scale():g}")
