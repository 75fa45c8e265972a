"""Opens a built model of several parts and runs them one after another.

Which files there are is said by the manifest of the build; which output of one is which input of another, by the files.
"""

from __future__ import annotations

from typing import Any, Literal

from transformers.utils.generic import ModelOutput

from winml.modelkit.errors import UsageError
from winml.modelkit.graph.bundle import ModelBundle
from winml.modelkit.inference.built_model import WinMLModel
from winml.modelkit.results.build_manifest import BuildResult

__all__ = ["BuiltParts"]


class BuiltParts:
    """A built model of several parts.

    Attributes:
        parts: Each part, to be called by itself, by name, in the order in which they run.
    """

    def __init__(
        self, result: BuildResult, *, ep: str | None = None, device: Literal["cpu", "gpu", "npu"] | None = None
    ) -> None:
        """Open every part; see :class:`WinMLModel` for the arguments.

        Raises:
            InputError: the files do not say how they belong together.
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load a file.
        """
        self._bundle = ModelBundle.read(list(result.part_paths.values()))
        self.parts = {name: WinMLModel(path, ep=ep, device=device) for name, path in self._bundle.paths.items()}

    def __call__(self, **named: object) -> ModelOutput:
        """Run the parts in order; what one answers goes where its file says.

        Args:
            **named: Inputs of any of the parts by name.

        Returns:
            The outputs of all parts, as torch tensors on the CPU; of two with one name, that of the later part.

        Raises:
            UsageError: an input is missing, unknown, or of a shape or type its graph does not take.
        """
        input_names = {name: {item.name for item in part.inputs} for name, part in self.parts.items()}
        unknown = [name for name in named if not any(name in names for names in input_names.values())]
        if unknown:
            raise UsageError(f"no part of the model has an input {unknown[0]!r}", hint="Leave it out.")
        fed: dict[str, dict[str, Any]] = {name: {} for name in self.parts}
        outputs: dict[str, object] = {}
        for name, part in self.parts.items():
            passed = {key: value for key, value in named.items() if key in input_names[name]}
            output = part(**{**fed[name], **passed})
            outputs.update(output)
            for feed in self._bundle.feeds[name]:
                fed[feed.part][feed.input] = output[feed.output]
        return ModelOutput(outputs)  # type: ignore[no-untyped-call]
