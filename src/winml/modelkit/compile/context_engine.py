"""Lets an execution provider compile a file for its device, and writes what it made as an ``EPContext`` model.

Opens no session to run a graph. What the provider made is not looked at.
"""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from winml.modelkit.errors import CompileError, UsageError
from winml.modelkit.runtime.bindings.ort_errors import ORT_ERRORS, ort_reason
from winml.modelkit.runtime.bindings.plug_ins import add_plug_in, installed_plug_ins
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.sessions import SEVERITY_FATAL

__all__ = ["compile_context", "failure_hint"]


def compile_context(source: Path, target: Path, chosen: ChosenProvider, *, embed: bool) -> None:
    """Write the model that a provider makes of a file: a node for each part it compiled, and the nodes it left.

    Args:
        source: An ONNX file, with its data beside it.
        target: The file to write; what was compiled goes to a file beside it, unless it is embedded.
        chosen: The provider and its options.
        embed: Keep what was compiled inside the model.

    Raises:
        UsageError: the provider does not take its options, or the installed ONNX Runtime cannot compile.
        CompileError: the provider fails, or ONNX Runtime cannot load the graph; gives the reason.
    """
    name = chosen.provider.name
    options = ort.SessionOptions()
    options.log_severity_level = SEVERITY_FATAL
    if name not in installed_plug_ins():
        try:
            options.add_provider(name, dict(chosen.options))
        except ORT_ERRORS as error:
            raise UsageError(f"{name} does not take {dict(chosen.options)}: {ort_reason(error)}") from error
    else:
        add_plug_in(options, name, chosen.options)
    try:
        compiler = ort.ModelCompiler(options, str(source), embed_compiled_data_into_model=embed)
        compiler.compile_to_file(str(target))
    except ORT_ERRORS as error:
        raise CompileError(
            f"{name} cannot compile the graph: {ort_reason(error)}",
            hint=failure_hint(name, ort_reason(error), chosen),
        ) from error


def failure_hint(name: str, reason: str, chosen: ChosenProvider) -> str:
    """Return what to do where a provider failed to compile, by its name, its reason and its options."""
    if name == "QNNExecutionProvider" and "MEM_ALLOC" in reason and "soc_model" not in chosen.options:
        return (
            "Without a processor's name QNN may take one with too little memory on chip. Name the one it is for: "
            "--ep-options soc_model=N, by the number Qualcomm gives it."
        )
    return (
        "winml inspect shows the operators and types of the file. Some devices take float16 or integers only: "
        "winml quantize makes them; others need other --ep-options."
    )
