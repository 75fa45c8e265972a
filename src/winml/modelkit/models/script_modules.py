"""TorchScript modules as Python modules, which torch's exporters can trace module by module.

Every scripted module becomes a module of the same class name, path, parameters and buffers. The forward runs the nodes
of the TorchScript graph in order and calls the submodules, so that hooks and scopes see the calls. A branch on the
value of a tensor is decided by the traced value, as in Python.

Needed for archives of ``torch.jit.save``, such as those of silero-vad and of detectors in torchvision.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._recursive import wrap_cpp_module  # not public
from torch.jit._script import RecursiveScriptModule  # not public; torch.jit.script returns it

from winml.modelkit.errors import ExportError

_CALL = "winml::call"
"""Kind of the nodes that replace calls of methods while calls of functions are inlined."""


def module_with_forward(
    base: type[nn.Module], name: str, package: str, parameters: Mapping[str, object]
) -> type[nn.Module]:
    """Return a subclass of a module class, with a class name and with named parameters of its forward.

    Args:
        base: The class; its forward takes positional and keyword arguments.
        name: Name of the subclass.
        package: Module that the subclass seems to be defined in: it determines whether the class is torch's.
        parameters: Positional parameter of the forward → default value; ``inspect.Parameter.empty`` without one.
    """
    kinds = inspect.Parameter
    named = {"self": kinds.empty, **parameters}
    signature = inspect.Signature(
        [kinds(parameter, kinds.POSITIONAL_OR_KEYWORD, default=value) for parameter, value in named.items()]
    )

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        # Arguments that are left out have the defaults of the base.
        values = signature.bind_partial(self, *args, **keywords).arguments
        return base.forward(self, *list(values.values())[1:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return type(name, (base,), {"forward": forward, "__module__": package})


def as_python_module(program: nn.Module) -> nn.Module:
    """Return a scripted or traced module as a Python module that shares its parameters and buffers."""
    # The submodules of a traced module cannot be called, those of its wrapped C++ module can.
    scripted: RecursiveScriptModule = wrap_cpp_module(program._c)
    qualified_name = str(scripted._c._type().qualified_name()).removeprefix("__torch__.")
    package = ".".join(part for part in qualified_name.split(".")[:-1] if "mangle" not in part)
    schema = scripted._c._get_method("forward").schema if scripted._c._has_method("forward") else None
    arguments = () if schema is None else schema.arguments[1:]
    empty = inspect.Parameter.empty
    parameters = {
        argument.name: argument.default_value if argument.has_default_value() else empty for argument in arguments
    }
    kind = module_with_forward(_InterpretedModule, scripted.original_name, package, parameters)
    return kind(scripted)


class _InterpretedModule(nn.Module):
    """A TorchScript module whose methods run in Python."""

    def __init__(self, scripted: RecursiveScriptModule) -> None:
        super().__init__()
        for name, parameter in scripted.named_parameters(recurse=False):
            # Of a loaded archive they are plain tensors.
            is_own = isinstance(parameter, nn.Parameter)
            self.register_parameter(name, parameter if is_own else nn.Parameter(parameter, requires_grad=False))
        for name, buffer in scripted.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        for name, child in scripted.named_children():
            self.add_module(name, as_python_module(child))
        self.training = getattr(scripted, "training", False)  # a frozen module has no mode
        # In a tuple, so that it is no submodule of this one.
        self._scripted = (scripted,)

    def forward(self, *args: Any) -> Any:
        """Run the graph of the forward."""
        return self.call_method("forward", args)

    def call_method(self, name: str, args: Sequence[Any]) -> Any:
        """Run the graph of a method."""
        method = self._scripted[0]._c._get_method(name)
        defaults = [argument.default_value for argument in method.schema.arguments[1 + len(args) :]]
        graph = _without_functions(method.graph)
        return _run_graph(graph, (self, *args, *defaults))

    def read_attribute(self, name: str) -> Any:
        """Return a parameter, buffer, submodule or other attribute."""
        if name in self._parameters or name in self._buffers or name in self._modules or name == "training":
            return getattr(self, name)
        return getattr(self._scripted[0], name)


def _without_functions(graph: Any) -> Any:
    """Return a copy of a graph with the calls of scripted functions inlined; calls of methods remain, as a new kind."""
    copy = graph.copy()
    for block_node in list(_all_nodes(copy)):
        if block_node.kind() != "prim::CallMethod":
            continue
        call = copy.create(_CALL, list(block_node.inputs()), 1)
        call.s_("name", block_node.s("name"))
        call.insertBefore(block_node)
        call.output().setType(block_node.output().type())
        block_node.output().replaceAllUsesWith(call.output())
        block_node.destroy()
    torch._C._jit_pass_inline(copy)
    return copy


def _all_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _all_nodes(inner)


_Values = dict[str, Any]
"""Name of a value → value."""


def _run_graph(graph: Any, args: Sequence[Any]) -> Any:
    values = {value.debugName(): argument for value, argument in zip(graph.inputs(), args, strict=True)}
    results = _run_block(graph, values)
    return results[0] if len(results) == 1 else tuple(results)


def _run_block(block: Any, values: _Values) -> list[Any]:
    """Run the nodes of a graph or block in order; return its outputs."""
    for node in block.nodes():
        results = _run_node(node, values)
        for output, result in zip(node.outputs(), results, strict=True):
            values[output.debugName()] = result
    outputs = block.outputs() if hasattr(block, "outputs") else block.returnNode().inputs()
    return [values[output.debugName()] for output in outputs]


def _run_node(node: Any, values: _Values) -> Sequence[Any]:
    """Run one node; return its outputs.

    Raises:
        ExportError: Python has no counterpart of the operator.
    """
    kind = node.kind()
    inputs = [values[value.debugName()] for value in node.inputs()]
    if kind == "prim::Constant":
        return [node.output().toIValue()]
    if kind == "prim::GetAttr":
        holder, name = inputs[0], node.s("name")
        return [holder.read_attribute(name) if isinstance(holder, _InterpretedModule) else getattr(holder, name)]
    if kind == "prim::SetAttr":
        setattr(inputs[0], node.s("name"), inputs[1])
        return []
    if kind == _CALL:
        module, name = inputs[0], node.s("name")
        if name == "forward":
            return [module(*inputs[1:])]
        return [module.call_method(name, inputs[1:])]
    if kind == "prim::If":
        is_true = bool(inputs[0])
        return _run_block(list(node.blocks())[0 if is_true else 1], values)
    if kind == "prim::Loop":
        return _run_loop(node, inputs, values)
    if kind in ("prim::ListUnpack", "prim::TupleUnpack"):
        return list(inputs[0])
    if kind == "prim::DictConstruct":
        return [dict(zip(inputs[::2], inputs[1::2], strict=True))]
    if kind in _CONSTRUCTORS:
        return [_CONSTRUCTORS[kind](*inputs)]
    return _call_operator(node, inputs)


def _run_loop(node: Any, inputs: Sequence[Any], values: _Values) -> list[Any]:
    """Run a loop: its inputs are the largest number of rounds, the first condition and the carried values."""
    (body,) = node.blocks()
    most, is_going_on, carried = int(inputs[0]), bool(inputs[1]), list(inputs[2:])
    number = 0
    while is_going_on and number < most:
        for value, argument in zip(body.inputs(), (number, *carried), strict=True):
            values[value.debugName()] = argument
        condition, *carried = _run_block(body, values)
        is_going_on = bool(condition)
        number += 1
    return carried


def _call_operator(node: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """Call the operator of a node: with Python on numbers and lists, with torch on tensors."""
    kind = node.kind()
    name = kind.partition("::")[2]
    schema = None if node.schema() == "(no schema)" else torch._C.parse_schema(node.schema())
    # The declaration decides: while torch traces, a size is a tensor, which an operator of numbers would make constant.
    has_tensors = schema is not None and any(argument.type.kind() == "TensorType" for argument in schema.arguments)
    function = _OF_TENSORS.get(kind) or (None if has_tensors and kind not in _OF_ANYTHING else _OF_NUMBERS.get(name))
    if function is not None:
        result = function(*inputs)
        return [result] if node.outputsSize() else []
    if schema is None:
        raise ExportError(
            f"TorchScript operator {kind}: it has no counterpart in Python",
            hint="Pass the nn.Module before torch.jit.script; load the weights with load_state_dict().",
        )
    positional = [value for value, argument in zip(inputs, schema.arguments, strict=True) if not argument.kwarg_only]
    keywords = {
        argument.name: value
        for value, argument in zip(inputs, schema.arguments, strict=True)
        if argument.kwarg_only and value is not None
    }
    namespace, _, operator_name = schema.name.partition("::")
    overloads = getattr(getattr(torch.ops, namespace), operator_name)
    call = getattr(overloads, schema.overload_name or "default")
    if any(map(_has_traced_number, schema.arguments, inputs)):
        # The overload would make it constant, or refuse it; functions of torch keep it.
        call = next((getattr(owner, operator_name) for owner in _OWNERS if hasattr(owner, operator_name)), overloads)
        if isinstance(keywords.get("dtype"), int):
            keywords["dtype"] = _DTYPES[keywords["dtype"]]
        keywords.pop("layout", None)
    result = call(*positional, **keywords)
    count = node.outputsSize()
    return [] if not count else [result] if count == 1 else list(result)


def _has_traced_number(argument: Any, value: object) -> bool:
    """Return True for a tensor, or a list with one, that is an argument of numbers: a size while torch traces."""
    values = value if isinstance(value, list) else [value]
    return "Tensor" not in str(argument.type) and any(isinstance(entry, torch.Tensor) for entry in values)


_OWNERS = (torch.Tensor, torch, torch._C._nn)
"""Classes and modules with the functions of operators."""

_DTYPE_CODES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
"""Specified by torch: dtype → its number in TorchScript."""
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


def _raise_exception(message: str, *_: object) -> None:
    raise ValueError(message)


_CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "prim::ListConstruct": lambda *values: list(values),
    "prim::TupleConstruct": lambda *values: tuple(values),
    "prim::TupleIndex": lambda values, index: values[index],
    "prim::RaiseException": _raise_exception,
    "prim::unchecked_cast": lambda value: value,
    "prim::unchecked_unwrap_optional": lambda value: value,
    "prim::Uninitialized": lambda: None,
    "prim::NumToTensor": torch.as_tensor,
    "prim::Print": lambda *_: None,
}


def _slice(values: Any, *bounds: Any) -> Any:
    """Return a slice of a tensor along an axis, or of a list."""
    if isinstance(values, torch.Tensor):
        axis, *ends = bounds
        return values[(slice(None),) * (axis % values.dim()) + (slice(*ends),)]
    return values[slice(*bounds)]


_OF_TENSORS: Mapping[str, Callable[..., Any]] = {
    "aten::slice": _slice,
    # While torch traces, the methods of a tensor return sizes that stay dynamic.
    "aten::size": lambda tensor, axis=None: list(tensor.size()) if axis is None else tensor.size(axis),
    "aten::dim": lambda tensor: tensor.dim(),
    "aten::Int": int,
    "aten::Float": float,
    "aten::Bool": bool,
    "aten::IntImplicit": int,
    "aten::FloatImplicit": float,
    "aten::ScalarImplicit": lambda tensor: tensor.item(),
    "aten::item": lambda tensor: tensor.item(),
    # Layers of torch.nn with gradients do not call fused kernels, which have no ONNX form.
    "aten::is_grad_enabled": lambda: True,
    "prim::requires_grad": lambda _: True,
    "prim::device": lambda tensor: tensor.device,
    "prim::dtype": lambda tensor: _DTYPE_CODES[tensor.dtype],
    "prim::layout": lambda _: 0,
    "prim::is_cuda": lambda tensor: tensor.is_cuda,
    "prim::data": lambda tensor: tensor.detach(),
}

_OF_ANYTHING = frozenset({
    "aten::__is__", "aten::__isnot__", "aten::__getitem__", "aten::append", "aten::extend", "aten::insert", "aten::pop",
    "aten::__contains__", "aten::keys", "aten::values", "aten::items", "aten::_set_item", "aten::list", "aten::format",
    "aten::__not__",
})  # fmt: skip
"""Operators on lists, dictionaries and flags, which may contain tensors."""


def _set_item(values: Any, key: Any, value: Any) -> Any:
    values[key] = value
    return values


def _make_tensor(data: Any, dtype: int | None, device: Any, *_: object) -> torch.Tensor:
    return torch.tensor(data, dtype=None if dtype is None else _DTYPES[dtype], device=device)


_OF_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "floordiv": operator.floordiv, "remainder": operator.mod, "mod": operator.mod, "neg": operator.neg,
    "pow": operator.pow, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "__and__": operator.and_, "__or__": operator.or_,
    "__not__": operator.not_, "__is__": operator.is_, "__isnot__": operator.is_not, "len": len,
    "__getitem__": operator.getitem, "__contains__": operator.contains, "_set_item": _set_item,
    "append": lambda values, value: (values.append(value), values)[1],
    "extend": lambda values, others: values.extend(others), "insert": lambda values, i, value: values.insert(i, value),
    "pop": lambda values, index=-1: values.pop(index), "keys": lambda values: list(values.keys()),
    "values": lambda values: list(values.values()), "items": lambda values: list(values.items()), "list": list,
    "str": str,
    "format": lambda text, *values: text.format(*values), "ceil": math.ceil, "floor": math.floor, "sqrt": math.sqrt,
    "log": math.log, "exp": math.exp, "abs": abs, "round": round, "min": min, "max": max, "sum": sum,
    "sorted": sorted, "copy": list, "warn": lambda *_: None, "add_": operator.iadd, "tensor": _make_tensor,
    "reverse": lambda values: values.reverse(), "clear": lambda values: values.clear(),
    "sort": lambda values, descending=False: values.sort(reverse=descending),
}  # fmt: skip
