"""Sharded weights, by training.parallel fsdp: each rank stores a part of each weight.

torch's fully_shard gathers the weights of a block before it computes, forward and backward, and
frees them afterwards; gradients are reduced into the shard that is updated. A shard is a DTensor,
which the scaler and the optimizers support; this module handles the other cases. Its functions also
accept whole tensors, and return them unchanged.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from halfstep.recipe import RecipeError
from halfstep.recording.reader import Counts
from halfstep.run_config import RunConfig
from trainer.precision.buffers import in_a_row, is_expanded, kinds, put_back
from trainer.precision.module_names import chosen, find_called_modules

#: Elementwise optimizers whose kernels torch can shard.
FUSED = (torch.optim.Adam, torch.optim.AdamW)
UNFUSED = (
    *FUSED,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
Group: TypeAlias = "dist.ProcessGroup | None"


class Calls:
    """Checksum of the order in which this rank calls modules with gathered weights.

    If ranks called them in different orders, weights of different modules would be mixed.
    """

    def __init__(self) -> None:
        self.checksum = 0

    def count(self, name: str, module: nn.Module) -> None:
        """Register a hook that counts the module's calls."""
        module.register_forward_pre_hook(partial(self._count, name.encode()))

    def _count(self, name: bytes, _module: nn.Module, _inputs: object) -> None:
        self.checksum = zlib.crc32(name, self.checksum)


def shard(
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    config: RunConfig,
    device: torch.device,
) -> Calls:
    """Shard rank 0's initial weights and the optimizers' state in place.

    A module is the same object with other parameters. A module without trainable weights stays
    whole on each rank. Returns the counter of calls.  Raises RecipeError for what cannot be
    sharded, ConfigError for unknown names in modules.sharded.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    for name, optimizer in optimizers.items():
        _check_optimizer(name, optimizer)
    calls = Calls()
    trained = {
        name: network
        for name, network in modules.items()
        if any(parameter.requires_grad for parameter in network.parameters())
    }
    world: Any = dist.group.WORLD  # already initialised
    mesh = DeviceMesh.from_group(world, device.type)
    before = _named_parameters(modules)
    drawn = {name: parameter.detach() for name, parameter in before.items()}
    blocks = chosen(modules, "modules.sharded", config.modules.sharded) or _find_blocks(trained)
    for name, network in trained.items():
        _check_network(name, network)
        inner = {path: block for path, block in blocks.items() if path.startswith(f"{name}.")}
        # The network has all weights outside of blocks.
        for path, module in {**inner, name: network}.items():
            calls.count(path, module)
            cut = [parameter for parameter in module.parameters() if not is_shard(parameter)]
            try:
                # Also for the root module: it then uses the shards' current values in each pass.
                policy = _policy(config, is_network=module is network)
                fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            except (ValueError, NotImplementedError) as error:
                raise RecipeError(f"training.parallel is fsdp: {error}") from error
            # The optimizers still refer to the whole weight, which would stay in memory.
            for parameter in cut:
                parameter.data = parameter.data.new_empty(0)
        if kinds([network]):
            network.register_forward_pre_hook(_broadcast_buffers)
        network.register_forward_hook(_watch_for_second_order)
    after = _named_parameters(modules)
    _check_tied(before, after)
    for name, network in modules.items():
        if name not in trained:
            network.to(device)
        _broadcast_all_buffers(network, device)
    _broadcast_weights(drawn, after, device)
    shards = {whole: after[name] for name, whole in before.items()}
    for optimizer in optimizers.values():
        _shard_optimizer(optimizer, shards)
    return calls


def _policy(config: RunConfig, *, is_network: bool) -> Any:
    """Return torch's policy for casts of a module's weights, inputs and outputs.

    A network's own outputs are fp32, because the loss is computed from them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if config.training.shard_casts == "autocast":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.float16 if config.precision == "fp16" else torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32 if is_network else None,
    )


def is_shard(tensor: object) -> bool:
    """Return whether a tensor is sharded over ranks."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory, without a gradient."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return part


def group_of(tensors: Iterable[Tensor]) -> Group:
    """Return the process group over which tensors are sharded; None if all are whole."""
    meshes = (tensor.device_mesh for tensor in tensors if is_shard(tensor))  # type: ignore[attr-defined]
    mesh = next(meshes, None)
    return None if mesh is None else mesh.get_group()


def sum_(values: Tensor, group: Group) -> Tensor:
    """Sum the values of all ranks' parts, in place, without waiting for the device."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def norms_of_whole(norms: Tensor, group: Group) -> Tensor:
    """Return the L2 norms of whole tensors, (P,), from those of this rank's parts.

    One sum over the ranks for all, in fp64, whose squares neither overflow nor underflow.
    """
    if group is None:
        return norms
    return sum_(norms.double().square(), group).sqrt().to(norms.dtype)


def counts_of_whole(counts: Counts, group: Group) -> Counts:
    """Return counts for whole tensors, from those of this rank's parts. The host waits."""
    if group is None or not counts:
        return counts
    total = sum_(torch.tensor(list(counts.values())), group).tolist()
    return {place: (inf, nan) for place, (inf, nan) in zip(counts, total, strict=True)}


def maker(modules: Mapping[str, nn.Module]) -> Callable[..., Tensor]:
    """Return a factory of empty tensors to load into: sharded if these modules are."""
    weights = (weight for module in modules.values() for weight in module.parameters())
    like: Any = next(filter(is_shard, weights), None)
    if like is None:
        return torch.empty
    from torch.distributed.tensor import empty

    mesh, placements = like.device_mesh, like.placements
    return lambda size, dtype: empty(size, dtype=dtype, device_mesh=mesh, placements=placements)


def host_mesh(group: dist.ProcessGroup) -> object:
    """Return a device mesh of the ranks for shards in host memory.  group: a gloo group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu")


def host_copy(shard: Tensor, own: Tensor, mesh: Any) -> Tensor:
    """Return a copy of a shard with this rank's part in host memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        own,
        mesh,
        shard.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )


def part(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor sharded like another tensor; unchanged if that is whole."""
    if not is_shard(like) or is_shard(tensor):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # Each rank has the whole tensor.
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def parts_of_module(state: Mapping[str, object], module: nn.Module) -> Mapping[str, Any]:
    """Return a module's whole state, sharded like the module."""
    own = module.state_dict()
    placed: Any = copy(state)  # includes the version metadata of torch
    for name, like in own.items():
        if name in placed:
            placed[name] = part(placed[name], like)
    return placed  # type: ignore[no-any-return]


def parts_of_optimizer(state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, object]:
    """Return an optimizer's whole state, sharded like its parameters."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    placed = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # torch reports a mismatch
        if number in placed:
            placed[number] = _moments(placed[number], parameter)
    return {**state, "state": placed}


def check_one_loss(losses: Sequence[tuple[str, ...]], optimizers: Iterable[str]) -> None:
    """Raise RecipeError unless a step has one loss for all optimizers.

    losses: the optimizers of each loss.  A backward pass for only some parameters would find
    gathered weights instead of the shards.
    """
    if len(losses) > 1 or set(losses[0]) != set(optimizers):
        listed = " and ".join(f"a loss for {', '.join(loss)}" for loss in losses)
        raise RecipeError(
            f"training.parallel is fsdp, but training_step yields {listed}; allowed: one loss per "
            f"step for all optimizers ({', '.join(optimizers)}); or training.parallel ddp"
        )


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    known = FUSED if fused else UNFUSED
    if type(optimizer) in known:
        return
    kind = type(optimizer).__name__
    if type(optimizer) in UNFUSED:
        raise RecipeError(
            f'optimizer "{name}" is a fused {kind}, which torch cannot shard: with '
            "training.parallel fsdp give it fused=False (training.fused)"
        )
    allowed = ", ".join(cls.__name__ for cls in known)
    raise RecipeError(
        f'optimizer "{name}" is {kind}, which is not known to be elementwise, as sharding '
        f"requires; with training.parallel fsdp allowed: {allowed}"
    )


def _check_network(name: str, network: nn.Module) -> None:
    for path, module in network.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise RecipeError(
                f"{name}.{path} has sparse gradients, which cannot be sharded: with "
                "training.parallel fsdp give it sparse=False"
            )
    types = {parameter.dtype for parameter in network.parameters() if parameter.requires_grad}
    if len(types) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise RecipeError(
            f"the weights of {name} are of several types, {names}, which torch does not shard "
            "together; with training.parallel fsdp allowed: one type (see training.weights)"
        )


def _check_tied(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Raise RecipeError if a weight with two names became two weights."""
    first: dict[nn.Parameter, str] = {}
    for name, weight in before.items():
        other = first.setdefault(weight, name)
        if after[other] is not after[name]:
            raise RecipeError(
                f"{other} and {name} are one weight, and lie in two shards: with "
                "training.parallel fsdp name modules in modules.sharded so that one of them, or "
                "none, holds both"
            )


def _find_blocks(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the children of the outermost module lists: the blocks of a network."""
    blocks: dict[str, nn.Module] = {}
    for name, module in modules.items():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        children = {f"{name}.{path}": child for path, child in module.named_children()}
        if not is_list:
            blocks |= _find_blocks(children)
            continue
        for path, child in children.items():
            blocks |= dict(find_called_modules(path, child))
    return {
        name: block for name, block in blocks.items() if next(block.parameters(), None) is not None
    }


def _broadcast_weights(
    drawn: dict[str, Tensor], weights: Mapping[str, nn.Parameter], device: torch.device
) -> None:
    """Load rank 0's weights, or the own part; one whole tensor at a time is on a device."""
    from torch.distributed.tensor import distribute_tensor

    for name in list({id(weight): name for name, weight in weights.items()}.values()):
        weight, value = weights[name].detach(), drawn.pop(name).to(device)
        if is_shard(weight):
            value = distribute_tensor(value, weight.device_mesh, weight.placements)  # type: ignore[attr-defined]
        else:
            dist.broadcast(value, 0)
        weight.copy_(value)


def _broadcast_all_buffers(network: nn.Module, device: torch.device) -> None:
    """Copy rank 0's buffers once, including those that no step changes."""
    for owner in network.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                value = buffer.detach().to(device, copy=True).contiguous()
                dist.broadcast(value, 0)
                if is_expanded(buffer):
                    owner._buffers[name] = value
                else:
                    buffer.copy_(value)


def _broadcast_buffers(network: nn.Module, _inputs: object) -> None:
    """Copy rank 0's buffers, e.g. running statistics, before a pass, as DDP does."""
    for buffers in kinds([network]):
        row = in_a_row(buffers)
        dist.broadcast(row, 0)
        put_back(buffers, row)


def _watch_for_second_order(_network: nn.Module, _inputs: object, outputs: Any) -> None:
    for output in tree_leaves(outputs):
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(_check_order)  # type: ignore[no-untyped-call]


def _check_order(_gradient: Tensor) -> None:
    """Raise RecipeError if a gradient is to be differentiated.

    The weights gathered for it would be freed by then, and some gradients would be lost.
    """
    if torch.is_grad_enabled():  # in a backward pass only with create_graph
        raise RecipeError(
            "training.parallel is fsdp, but training_step differentiates a gradient "
            "(create_graph=True); allowed: training.parallel ddp"
        )


def _shard_optimizer(optimizer: Optimizer, shards: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace an optimizer's parameters by shards, and shard its state."""
    for group in optimizer.param_groups:
        group["params"] = [shards.get(parameter, parameter) for parameter in group["params"]]
    for whole_weight, weight in shards.items():
        if whole_weight in optimizer.state:
            optimizer.state[weight] = _moments(optimizer.state.pop(whole_weight), weight)


def _moments(state: Mapping[str, object], weight: Tensor) -> dict[str, object]:
    return {
        name: part(value, weight)
        if isinstance(value, Tensor) and value.shape == weight.shape
        else value
        for name, value in state.items()
    }


def _named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    return {
        f"{name}.{path}": parameter
        for name, network in modules.items()
        for path, parameter in network.named_parameters(remove_duplicate=False)
    }
