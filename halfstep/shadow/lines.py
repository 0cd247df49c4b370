"""Source lines, modules and variables of operators. This module imports torch."""

import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType, FrameType, ModuleType
from weakref import ref

from torch import Tensor, is_grad_enabled, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from halfstep.shadow.loop_variables import tensors_of_callers, variables_of
from halfstep.shadow.operations import Held, Place
from halfstep.shadow.operators import is_readable
from halfstep.shadow.source_files import is_of_script, is_own

ENGINE = "_engine_run_backward"  # of torch.autograd; Tensor.backward and autograd.grad end there
GRAPH = "graph.py"  # of torch.autograd, where the engine is called
MOST_FRAMES = 200
MODULE_CALL, MODULE_FILE = "_call_impl", nn.Module._call_impl.__code__.co_filename
MODES = ("__torch_dispatch__", "__torch_function__")  # pass on what another line calls
_STDLIB = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


def place_of_caller(*, is_backward: bool = False) -> Place:
    """Return the innermost line outside of torch, and that of the script.

    is_backward: only lines within the backward pass count, as of a custom Function.
    """
    inner: FrameType | None = None
    for frame in _frames():
        code = frame.f_code
        if is_backward and code.co_name == ENGINE and code.co_filename.endswith(GRAPH):
            break
        kind = _kind(code.co_filename) if code.co_name not in MODES else ""
        if kind == "script":
            line = frame.f_lineno or 0
            return _place(frame) if inner is None else _place(inner, code.co_filename, line)
        if kind == "package" and inner is None:
            inner = frame
    return Place() if inner is None else _place(inner)


def place_of_outermost_module() -> Place | None:
    """Return the script's line that calls the outermost module; None outside of modules."""
    found: FrameType | None = None
    is_in_call = False  # of a module, whose caller is not met yet
    for frame in _frames():
        code = frame.f_code
        if code.co_name == MODULE_CALL and code.co_filename == MODULE_FILE:
            is_in_call = True
        elif is_in_call and _kind(code.co_filename) == "script":
            found, is_in_call = frame, False
    return None if found is None else _place(found)


def loop_code() -> CodeType | None:
    """Return the innermost function of the script, as that which calls a backward pass."""
    return next((frame.f_code for frame in _script_frames()), None)


def outer_line(code: CodeType | None) -> tuple[str, int]:
    """Return the line of a function that called the innermost one; ("", 0) if it is that one."""
    for depth, frame in enumerate(_script_frames()):
        if frame.f_code is code:
            return (code.co_filename, frame.f_lineno or 0) if depth else ("", 0)
    return "", 0


def _script_frames() -> Iterator[FrameType]:
    """Yield the script's frames, the innermost first."""
    return (frame for frame in _frames() if _kind(frame.f_code.co_filename) == "script")


def _frames() -> Iterator[FrameType]:
    """Yield the frames that have called the function that iterates over them, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _place(frame: FrameType, caller_file: str = "", caller_line: int = 0) -> Place:
    code, line = frame.f_code, frame.f_lineno or 0
    return Place(code.co_filename, line, code, frame.f_lasti, caller_file, caller_line)


@cache
def _kind(file: str) -> str:
    """Return "script", "package" for an installed one, or "" for torch and what is below it."""
    if is_of_script(file):
        return "script"
    if file.startswith("<") or is_own(file):
        return ""
    is_package = not file.startswith(_STDLIB) or any(part in file for part in _INSTALLED)
    return "package" if is_package else ""


class ModuleNames:
    """The module under way, by hooks on all modules."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        #: Modules that no other module has called, with the names of those in them, by id.
        self._roots: dict[int, tuple[ref[nn.Module], dict[int, str]]] = {}
        self._given: dict[int, tuple[ref[nn.Module], str]] = {}  # modules with names, by id
        self._handles: list[RemovableHandle] = []
        #: Whether a module in training mode ran in this step, with gradients.
        self.is_training = False
        self.on_root: Callable[[nn.Module], None] = lambda _: None  # called with each new root
        #: Called before each call of a module that no other module makes.
        self.on_outermost: Callable[[nn.Module], None] = lambda _: None

    def add(self, names: Mapping[nn.Module, str]) -> None:
        """Set the names of modules."""
        self._given |= {id(module): (ref(module), name) for module, name in names.items()}

    def list_given(self) -> Iterator[str]:
        """Yield the names that were set."""
        yield from (name for _reference, name in self._given.values())

    def install(self) -> None:
        """Begin to observe calls of modules."""
        self._stack.clear()
        self._handles = [
            register_module_forward_pre_hook(self._begins),
            # A recomputation of a checkpoint ends early, by an exception.
            register_module_forward_hook(self._ends, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def current(self) -> str:
        """Return the name of the innermost module under way; "" outside of modules."""
        return self._stack[-1] if self._stack else ""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all modules."""
        for _name, module in self._all():
            yield from (
                parameter for parameter in module._parameters.values() if parameter is not None
            )

    def lasting(self) -> Iterator[Tensor]:
        """Yield what outlives a step: parameters, buffers, and the variables of the loop."""
        for _name, module in self._all():
            own = (*module._parameters.values(), *module._buffers.values())
            yield from (value for value in own if value is not None)
        yield from (tensor for _name, tensor in (*tensors_of_callers(), *_attributes()))

    def _all(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that have names, and those in modules that no other one has called."""
        for reference, name in list(self._given.values()):
            if (module := reference()) is not None:
                yield name, module
        for root in self._modules():
            yield from _named_modules(root)

    def _modules(self) -> list[nn.Module]:
        roots = [reference() for reference, _names in self._roots.values()]
        return [root for root in roots if root is not None]

    def _begins(self, module: nn.Module, _arguments: object) -> None:
        if not self._stack:
            self.on_outermost(module)
        try:
            name = self._name(module)
        except Exception:  # a class of the script may override anything
            name = type(module).__name__
        self._stack.append(name)
        self.is_training = self.is_training or (module.training and is_grad_enabled())

    def _ends(self, _module: nn.Module, _arguments: object, _result: object) -> None:
        if self._stack:
            self._stack.pop()

    def _name(self, module: nn.Module) -> str:
        given = self._given.get(id(module))
        if given is not None and given[0]() is module:
            return given[1] or type(module).__name__
        for key, (reference, names) in list(self._roots.items()):
            if reference() is None:
                del self._roots[key]
            elif (name := names.get(id(module))) is not None:
                return name or type(module).__name__
        if not self._stack:
            names = {id(child): name for name, child in _named_modules(module)}
            self._roots[id(module)] = ref(module), names
            self.on_root(module)
        return type(module).__name__

    def variable(self, tensor: Tensor) -> tuple[str, Held]:
        """Return the name under which modules or the loop hold a tensor, and what it is there."""
        for prefix, module in self._all():
            for name, own in (*module._parameters.items(), *module._buffers.items()):
                if own is not None and _is_same(own, tensor):
                    held_as: Held = "weight" if name in module._parameters else "buffer"
                    return f"{prefix}.{name}" if prefix else name, held_as
        for name, own in (*tensors_of_callers(), *_attributes()):
            if _is_same(own, tensor):
                return name, ""
        return "", ""


def _named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules like named_modules, also those that are not hashable."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{prefix}.{name}" if prefix else name)


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if not (is_readable(one) and is_readable(other) and one.numel()):
        return False
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _attributes() -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that variables of the script's own classes hold."""
    for frame in _script_frames():
        with variables_of(frame) as variables:
            owners = [variable for variable in variables.items() if _is_own(variable[1])][
                :MOST_FRAMES
            ]
        for owner, value in owners:
            for name, held in list(vars(value).items()):
                yield from _held(f"{owner}.{name}", held)


def _is_own(value: object) -> bool:
    """Return whether a value is an object of a class of the script."""
    if isinstance(value, type | ModuleType) or not isinstance(getattr(value, "__dict__", 0), dict):
        return False
    module = sys.modules.get(type(value).__module__)
    return is_of_script(getattr(module, "__file__", None) or "<")


def _held(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value[:MOST_FRAMES]):
            if isinstance(item, Tensor):
                yield f"{name}[{index}]", item
    elif isinstance(value, dict):
        for key, item in list(value.items())[:MOST_FRAMES]:
            if isinstance(item, Tensor):
                yield f"{name}[{key!r}]"[:100], item
