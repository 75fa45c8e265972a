"""Building, loading and calling of a model in one line, as with transformers' classes.

``WinMLAutoModel`` takes any model; a ``WinMLModelFor…`` class for each task of the task table takes models of that
task. ``built_model.py`` defines calls.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from winml.modelkit.builds.build_model import build_onnx_model, build_with_open_sizes
from winml.modelkit.builds.config import WinMLBuildConfig, check_load_keywords
from winml.modelkit.builds.found_models import onnx_file_in, part_files
from winml.modelkit.errors import InputError, TaskError, UsageError, opt
from winml.modelkit.file_names import (
    BUILD_MANIFEST_NAME,
    DECODER,
    EMBEDDING,
    ENCODER,
    MASK_DECODER,
    VISION,
    VISION_ENCODER,
    answering_part,
    files_folder,
    prompt_parts,
)
from winml.modelkit.generate.built_model import WinMLModel, as_array
from winml.modelkit.generate.generation.transformers_loop import (
    DecoderModel,
    EncoderDecoderModel,
    VisionLanguageModel,
    generation_config_beside,
)
from winml.modelkit.generate.graph_model import config_beside, pad_token_beside
from winml.modelkit.models.caches.layout import CACHE_ARGUMENTS
from winml.modelkit.models.checkpoints.task import canonical_task, inference_class, inference_classes
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.bundle import described_model
from winml.modelkit.ort.decoding.decoder import DecoderGraph
from winml.modelkit.ort.decoding.inputs import state_feeds
from winml.modelkit.python_functions import python_function

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.utils.generic import ModelOutput

Config = WinMLBuildConfig | Mapping[str, Any] | str | os.PathLike[str] | None
Device = Literal["cpu", "gpu", "npu"] | None


class _BuiltModel(WinMLModel):
    """A model that is built in the cache on first use, and loaded from there."""

    @classmethod
    @python_function()
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        config: Config = None,
        precision: str | None = None,
        task: str | None = None,
        ep: str | None = None,
        device: Device = None,
        pad_token_id: int | None = None,
        **load: Any,
    ) -> WinMLModel:
        """Build a PyTorch or Hugging Face model and load it.

        Args:
            model: Hub id, checkpoint folder, config.json, ``file.py:function`` or ``package.module:function``; or the
                folder of a build, which is opened unchanged unless ``config`` is passed, or of an export, whose file is
                built by :meth:`from_onnx`.
            config: Config of the build; see :func:`~winml.modelkit.build_hf_model`. Without sizes in it, batch and
                sequence are dynamic if the model and the provider support that.
            precision: Bits of the result, such as ``int8``; None: as in the config.
            task: Task of the model; None: the task of this class, else decided from the model's config.
            ep: Execution provider to run it on; None: the provider for the device.
            device: Kind of processor; None: the provider's default, or the CPU without a provider.
            pad_token_id: Padding token of short rows, if the graph takes a fixed number of tokens; None: the config's,
                else the tokenizer's.
            **load: Options of loading; see :func:`~winml.modelkit.build_hf_model`.

        Raises:
            TaskError: the class is for another task.
            WinMLError: the model cannot be built or loaded.
        """
        check_load_keywords(load, f"{cls.__name__}.from_pretrained")
        name = os.fspath(model) if isinstance(model, os.PathLike) else model
        request = ModelRequest(name, **{**load, "task": cls._resolve_task(task)})
        if _are_run_together(parts := part_files(request.model)):
            cls._refuse_for_onnx(parts[answering_part(parts)], {"precision": precision, "task": task, **load})
            return cls._open_parts(parts, ep=ep, device=device)
        if (path := onnx_file_in(request.model)) is not None:
            cls._refuse_for_onnx(path, {"precision": precision, "task": task, **load})
            if config is None and (files_folder(path) / BUILD_MANIFEST_NAME).is_file():  # a finished build
                return cls._open_file(path, ep=ep, device=device, pad_token_id=pad_token_id)
            return cls.from_onnx(path, config=config, ep=ep, device=device, pad_token_id=pad_token_id)
        result = build_with_open_sizes(request, config, ep=ep, precision=precision)
        if _are_run_together(result.part_paths):
            return cls._open_parts(result.part_paths, ep=ep, device=device)
        return cls._open_file(result.model_path, ep=ep, device=device, pad_token_id=pad_token_id)

    @classmethod
    @python_function()
    def from_onnx(
        cls,
        model: str | os.PathLike[str],
        *,
        config: Config = None,
        precision: str | None = None,
        ep: str | None = None,
        device: Device = None,
        pad_token_id: int | None = None,
    ) -> WinMLModel:
        """Build from an ONNX file and load the result; see :meth:`from_pretrained`."""
        result = build_onnx_model(model, config=config, precision=precision)
        if pad_token_id is None:
            pad_token_id = pad_token_beside(Path(model), config_beside(Path(model)))
        return cls._open_file(result.model_path, ep=ep, device=device, pad_token_id=pad_token_id)

    @classmethod
    def open_files(cls, files: Mapping[str, Path], **options: Any) -> WinMLModel:
        """Open the ONNX files of a model without building.

        Args:
            files: Part → file; ``model`` alone for a model of one part.
            **options: ``ep``, ``device``, ``ep_options`` and ``threads`` of the sessions.

        Raises:
            TaskError: the class is for another task.
            WinMLError: a file cannot be loaded.
        """
        if len(files) == 1:
            return cls._open_file(next(iter(files.values())), **options)
        return cls._open_parts(files, **options)

    @staticmethod
    def _refuse_for_onnx(path: Path, load: Mapping[str, Any]) -> None:
        """Refuse options for exporting a checkpoint with an ONNX file.

        Raises:
            UsageError: names the first such option.
        """
        name = next((name for name, value in load.items() if value is not None), None)
        if name is not None:
            raise UsageError(
                f"{name} does not apply to {path}, an ONNX file",
                hint="Omit it, or pass the checkpoint that the file was exported from.",
            )

    @classmethod
    def _resolve_task(cls, task: str | None) -> str | None:
        """Return the canonical class task or the requested one.

        Raises:
            TaskError: the requested task is not that of the class.
        """
        if cls.main_task is None or task is None:
            return task or cls.main_task
        if canonical_task(task) != cls.main_task:
            raise TaskError(
                f"{cls.__name__} is for {cls.main_task}, not {task}", hint="Use WinMLAutoModel, or omit task."
            )
        return task

    @classmethod
    def _open_file(cls, path: Path, **options: Any) -> WinMLModel:
        cls._refuse_other_task(path)
        return cls(path, **options)

    @classmethod
    def _open_parts(cls, parts: Mapping[str, Path], **options: Any) -> WinMLModel:
        """Open a decoder and the graphs before it, as an object of this class."""
        cls._refuse_other_task(parts[answering_part(parts)])
        opened: Any
        if MASK_DECODER in parts:
            opened = cls._open_file(parts[MASK_DECODER], **options)
            opened.vision = WinMLModel(parts[VISION_ENCODER], **options)
            mask_model: WinMLModel = opened
            return mask_model
        if prompts := prompt_parts(parts):
            opened = cls._open_file(parts[DECODER], **options)
            opened.prompt_paths = [parts[name] for name in prompts]
            pair_model: WinMLModel = opened
            return pair_model
        base = VisionLanguageModel if VISION in parts else EncoderDecoderModel
        opened = _generating_class(base, cls.__name__)(parts, **options)
        opened.inputs = opened.graph.first_inputs
        opened.path = str(parts[DECODER])
        opened.task = described_model(parts[DECODER]).get("task")
        model: WinMLModel = opened
        return model

    @classmethod
    def _refuse_other_task(cls, path: Path) -> None:
        """Refuse a model that was exported for another task.

        Raises:
            TaskError: the model states another task.
        """
        task = described_model(path).get("task")
        if task is not None and canonical_task(task) != cls.main_task:
            raise TaskError(
                f"{cls.__name__} is for {cls.main_task}, but the model was exported for {task}",
                hint="Use WinMLAutoModel, which selects the matching class.",
            )


@functools.cache
def _generating_class(base: type[DecoderModel], name: str) -> Any:
    """Return the class of a task by name, with ``base`` as the base class that runs its parts."""
    cls = INFERENCE_CLASSES[name]
    return type(cls.__name__, (base, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def _are_run_together(parts: Collection[str]) -> bool:
    """Return True if these are the parts of a model that generates, or of one that finds masks."""
    pairs = ((ENCODER, DECODER), (VISION, EMBEDDING, DECODER), (VISION_ENCODER, MASK_DECODER))
    return any(set(needed) <= set(parts) for needed in pairs) or (DECODER in parts and bool(prompt_parts(parts)))


class WinMLAutoModel(_BuiltModel):
    """Loads a built model as the class for its task.

    Example:
        ```python
        model = WinMLAutoModel.from_pretrained("built")  # called like a model of transformers
        ```
    """

    @classmethod
    def _open_parts(cls, parts: Mapping[str, Path], **options: Any) -> WinMLModel:
        description = described_model(parts[answering_part(parts)])
        name = inference_class(
            description.get("task") or "", description.get("class", ""), description.get("model_type", "")
        )
        return INFERENCE_CLASSES[name]._open_parts(parts, **options)

    @classmethod
    def _open_file(cls, path: Path, **options: Any) -> WinMLModel:
        description = described_model(path)
        task = description.get("task")
        if task is None:
            return WinMLModel(path, **options)
        name = inference_class(task, description.get("class", ""), description.get("model_type", ""))
        return INFERENCE_CLASSES[name](path, **options)


class _GeneratingModel(DecoderModel, _BuiltModel):
    """A built model with transformers' ``generate()``."""

    prompt_paths: Sequence[Path] = ()
    """Graphs of fixed sizes that read a prompt; none: the model's graph also reads prompts."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        _BuiltModel.__init__(self, path, **options)
        self._has_cache = bool(state_feeds(self._session))

    @functools.cached_property
    def graph(self) -> DecoderGraph:  # type: ignore[override]  # opened the first time it is needed
        """The graph in its session; ``generate()`` is slow without a cache in it."""
        return DecoderGraph(self._session, prompts=map(self._opened, self.prompt_paths))

    @functools.cached_property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]  # as above
        """The generation settings in the files next to the model.

        Raises:
            InputError: there is no config beside the model.
        """
        if self.config is None:
            raise InputError(
                f"{self.path}: the generation loop of transformers needs a config beside the model",
                hint=f"Build the model again without {opt.no_tokenizer}.",
            )
        return generation_config_beside(Path(self.path).parent, self.config, has_cache=self._has_cache)

    def __call__(self, *tensors: Any, **by_name: Any) -> ModelOutput:  # type: ignore[override]  # takes them in order, too
        if self._has_cache:
            names = [spec.name for spec in self.inputs]
            positional = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], Mapping) else zip(names, tensors)  # noqa: B905  # the rest is named
            return self.forward(**{**dict(positional), **by_name})
        arguments = {key: value for key, value in by_name.items() if value is not None and key not in _OF_LOOPS}
        return _BuiltModel.__call__(self, *tensors, **arguments)

    @classmethod
    def from_onnx(cls, model: str | os.PathLike[str], **options: Any) -> WinMLModel:
        """Load an ONNX file with config and tokenizer next to it; with ``config`` or ``precision``, build it first."""
        if options.get("config") is not None or options.get("precision") is not None:
            return super().from_onnx(model, **options)
        load_options = {key: value for key, value in options.items() if key not in ("config", "precision")}
        return cls._open_file(Path(model), **load_options)


_OF_LOOPS = {"use_cache", "return_dict", *CACHE_ARGUMENTS, "logits_to_keep"}
"""Arguments of transformers' loop that a graph without a cache does not take."""


class _MaskModel(_BuiltModel):
    """A built model that finds the masks of points: the graph of prompts, after a graph that encodes images."""

    vision: WinMLModel | None = None
    """Graph that encodes images; None: the model is one graph."""
    _positions: torch.Tensor

    def get_image_embeddings(self, pixel_values: Any) -> torch.Tensor:
        """Return the vectors of images, which a call takes as ``image_embeddings``, of shape [batch, size, rows,
        columns].

        Args:
            pixel_values: Images of shape [batch, channels, height, width].
        """
        assert self.vision is not None  # called for two graphs
        encoded = self.vision(pixel_values=pixel_values)
        self._positions = encoded["image_positional_embeddings"]  # the same for every image
        vectors: torch.Tensor = encoded["image_embeddings"]
        return vectors

    def __call__(self, *tensors: Any, **by_name: Any) -> ModelOutput:
        if self.vision is None or tensors:
            return super().__call__(*tensors, **by_name)
        if "pixel_values" in by_name:
            by_name["image_embeddings"] = self.get_image_embeddings(by_name.pop("pixel_values"))
        if "image_embeddings" in by_name and hasattr(self, "_positions"):
            by_name.setdefault("image_positional_embeddings", self._positions)
        if "input_points" in by_name and "input_labels" not in by_name:  # every point is inside of its object
            by_name["input_labels"] = torch.ones(as_array(by_name["input_points"]).shape[:-1], dtype=torch.int64)
        return super().__call__(**by_name)


def _make_class(name: str, task: str) -> type[_BuiltModel]:
    docstring = f"A model for {task} with the interface of transformers, run by ONNX Runtime."
    base = {"text-generation": _GeneratingModel, "mask-generation": _MaskModel}.get(task, _BuiltModel)
    return type(name, (base,), {"main_task": task, "__doc__": docstring, "__module__": "winml.modelkit"})


INFERENCE_CLASSES: Mapping[str, type[_BuiltModel]] = {
    name: _make_class(name, task) for name, task in inference_classes().items()
}
"""Name as printed by ``winml inspect`` → class, one for each entry of the task table."""
