"""Reading of the folder of a diffusers pipeline: its index, the folders of its components, and its files.

Imports no model library and runs no code of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, ModelPathError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, PIPELINE_INDEX_NAME, VAE_DECODER, VAE_PARTS, is_plain_name
from winml.modelkit.models.checkpoints.weight_files import check_safetensors
from winml.modelkit.onnx.files.foreign_files import check_library_files, is_companion_name, library_file
from winml.modelkit.options import JsonError, read_json_file

DENOISERS = ("unet", "transformer")
"""Specified by diffusers: components that predict the noise, of which a pipeline has one."""
VAE = "vae"
TEXT_ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")
_CLASSES = {
    "diffusers": frozenset(
        {"UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel", "AutoencoderKL"}
    ),
    "transformers": frozenset({"CLIPTextModel", "CLIPTextModelWithProjection", "T5EncoderModel"}),
}
"""Library → classes of modules with known inputs."""
_SCHEDULER = "scheduler"
_COPIED = ("tokenizer", "tokenizer_2", "tokenizer_3", _SCHEDULER, "feature_extractor", "image_processor")
"""Specified by diffusers: components without weights."""
LEFT_OUT = ("safety_checker", "image_encoder")
"""Specified by diffusers: components that a pipeline works without."""
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model|pytorch_model)(?:\.(?P<variant>[a-zA-Z]\w*))?(?:-\d+-of-\d+)?"
    r"\.(?:safetensors|bin)"
)
"""Names of weight files of both libraries, ``diffusion_pytorch_model.fp16-00001-of-00002.safetensors`` for example."""
_LORA_NAME = "pytorch_lora_weights.safetensors"


@dataclass(frozen=True)
class Component:
    """A component of a pipeline that is a module."""

    name: str
    """Name in the index and of the folder, such as ``text_encoder``."""
    library: str
    """``diffusers`` or ``transformers``."""
    class_name: str
    folder: Path

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The weight files that are loaded: those without a variant if there are any, safetensors before pickles."""
        files = sorted(path for path in self.folder.iterdir() if _WEIGHTS.fullmatch(path.name))
        plain = [path for path in files if _variant_of(path) == ""] or files
        safe = [path for path in plain if path.suffix == ".safetensors"] or plain
        return tuple(path for path in safe if _variant_of(path) == _variant_of(safe[0]))

    @property
    def variant(self) -> str | None:
        """Variant of the weight files, such as ``fp16``; `None` for files without one."""
        return _variant_of(self.weight_files[0]) or None


def _variant_of(path: Path) -> str:
    match = _WEIGHTS.fullmatch(path.name)
    return "" if match is None else match["variant"] or ""


@dataclass(frozen=True)
class PipelineFiles:
    """The folder of a diffusers pipeline."""

    folder: Path
    class_name: str
    """Class of the pipeline, such as ``StableDiffusionPipeline``."""
    modules: tuple[Component, ...]
    """Components that become graphs."""
    copied: tuple[str, ...]
    """Names of components whose files are copied."""
    left_out: tuple[str, ...]
    """Names of components that are neither exported nor copied."""
    scheduler_class: str
    """Class of the scheduler."""
    has_aesthetic_score: bool
    """True if an aesthetic score takes the place of the target size in ``time_ids``: refiner of Stable Diffusion XL."""

    @property
    def upcasts_vae(self) -> bool:
        """True if the pipeline runs its autoencoder in float32 if the weights are float16: Stable Diffusion XL."""
        vae, unet = self.find(VAE), self.find("unet")
        if vae is None or unet is None:
            return False
        is_xl = _read_config(unet.folder).get("addition_embed_type") == "text_time"
        return is_xl and bool(_read_config(vae.folder).get("force_upcast", True))

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on components that are left out."""
        return tuple(
            f"{name} is left out: the pipeline works without it. Check the images in your application if it is needed."
            if name == "safety_checker"
            else f"{name} is left out: the pipeline works without it, except with images as prompts."
            for name in self.left_out
        )

    def find(self, name: str) -> Component | None:
        """Return the module of a name; `None` if the pipeline has no such component."""
        return next((component for component in self.modules if component.name == name), None)

    def read_files(self) -> dict[str, Path]:
        """Return the files that a build reads: name in the folder, with ``/`` → file."""
        weights = (file for component in self.modules for file in component.weight_files)
        files = (*self.companions().values(), *weights)
        return {path.relative_to(self.folder).as_posix(): path for path in files}

    def companions(self) -> dict[str, Path]:
        """Return the files that accompany the graphs: name, ``/`` between folder and file → file.

        These are the index, the files of tokenizers and scheduler, and the config of each module beside its graph.
        """
        files = {PIPELINE_INDEX_NAME: self.folder / PIPELINE_INDEX_NAME}
        for component in self.modules:
            for part in VAE_PARTS if component.name == VAE else (component.name,):
                files[f"{part}/{CHECKPOINT_CONFIG_NAME}"] = component.folder / CHECKPOINT_CONFIG_NAME
        for name in self.copied:
            files |= {f"{name}/{path.name}": path for path in _plain_files(self.folder / name)}
        return files


def _plain_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a tokenizer, scheduler or image processor that are copied, by name."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_config = path.suffix == ".json" or is_companion_name(path.name)
        if is_config and library_file(folder, path.name, error=CheckpointError) is not None:
            yield path


def _read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config of a component; `{}` if damaged, which its loader reports."""
    try:
        record = read_json_file(folder / CHECKPOINT_CONFIG_NAME)
    except (OSError, JsonError):
        return {}
    return record if isinstance(record, dict) else {}


def read_pipeline_files(folder: Path, *, is_built: bool = False) -> PipelineFiles:
    """Read the index of a pipeline, and check that its components are known and complete.

    Args:
        folder: The folder.
        is_built: True for the folder of a build: graphs are in place of weights, and the autoencoder has two folders.

    Raises:
        CheckpointError: the index or a weight file is damaged, a component is of an unknown class, or code of the
            folder would have to run.
        ModelPathError: the folder, config or weights of a component are missing.
    """
    path = folder / PIPELINE_INDEX_NAME
    check_library_files(folder, error=CheckpointError)
    try:
        index = read_json_file(path)
    except (OSError, JsonError) as error:
        raise CheckpointError(f"{path}: {error}", hint="Save the pipeline again with save_pretrained().") from error
    class_name = index.get("_class_name") if isinstance(index, dict) else None
    if isinstance(class_name, list):
        raise CheckpointError(
            f"{path}: the pipeline is defined by Python code of the folder, {class_name[0]}, which winml does not run",
            hint="Save it as a pipeline of a class of diffusers.",
        )
    if not isinstance(class_name, str):
        raise CheckpointError(f"{path}: names no pipeline class", hint="Save the pipeline with save_pretrained().")
    entries = {
        name: entry
        for name, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)
    }
    modules = tuple(
        _read_component(folder, name, library, component_class, is_built=is_built)
        for name, (library, component_class) in entries.items()
        if name not in (*_COPIED, *LEFT_OUT)
    )
    files = PipelineFiles(
        folder,
        class_name,
        tuple(sorted(modules, key=lambda component: _ORDER.index(component.name))),
        tuple(name for name in entries if name in _COPIED),
        tuple(name for name in entries if name in LEFT_OUT),
        entries.get(_SCHEDULER, ("", ""))[1],
        bool(index.get("requires_aesthetics_score")),
    )
    if sum(files.find(name) is not None for name in DENOISERS) != 1 or not files.find(VAE) or not files.scheduler_class:
        raise CheckpointError(
            f"{path}: {class_name} has {', '.join(entries)}; expected one of {' and '.join(DENOISERS)}, {VAE} and "
            f"{_SCHEDULER}",
            hint="Stable Diffusion 1 and 2, XL and 3, and Flux have them.",
        )
    return files


_ORDER = (*TEXT_ENCODERS, *DENOISERS, VAE)
"""Components in the order in which they run."""


def _read_component(folder: Path, name: str, library: str, class_name: str, *, is_built: bool) -> Component:
    """Check one component of the index.

    Raises:
        CheckpointError: its class is not known, or a weight file is damaged.
        ModelPathError: its folder, config or weights are missing.
    """
    component = Component(name, library, class_name, folder / (VAE_DECODER if is_built and name == VAE else name))
    if library not in _CLASSES and (folder / name).joinpath(f"{library}.py").is_file():
        raise CheckpointError(
            f"{folder}: component {name} is defined by Python code of the folder, {library}.py, which winml does not "
            "run",
            hint="Save it with a class of diffusers.",
        )
    if name not in _ORDER or class_name not in _CLASSES.get(library, ()):
        known = ", ".join(sorted(known for classes in _CLASSES.values() for known in classes))
        raise CheckpointError(
            f"{folder}: component {name} of class {class_name} is not supported",
            hint=f"Supported are {known}. Export the module alone, from a script: file.py:function.",
        )
    assert is_plain_name(name)  # one of the known names
    subfolder = component.folder
    if not subfolder.is_dir():
        raise ModelPathError(
            f"{folder}: has no folder {subfolder.name}, which {PIPELINE_INDEX_NAME} names",
            hint="Download the whole pipeline.",
        )
    check_library_files(subfolder, error=CheckpointError)
    if not (subfolder / CHECKPOINT_CONFIG_NAME).is_file():
        raise ModelPathError(f"{subfolder}: has no {CHECKPOINT_CONFIG_NAME}", hint="Download the whole pipeline.")
    if is_built:
        return component
    if not component.weight_files:
        raise ModelPathError(
            f"{subfolder}: has no weights (*.safetensors or *.bin)", hint="Download the whole pipeline."
        )
    for file in component.weight_files:
        library_file(subfolder, file.name, error=CheckpointError)
        if file.suffix == ".safetensors":
            check_safetensors(file)
    return component


def lora_hint(folder: Path) -> str:
    """Return a hint for a folder with a LoRA of diffusers and no pipeline; ``""`` for other folders."""
    return fused_lora_hint() if (folder / _LORA_NAME).is_file() else ""


def fused_lora_hint() -> str:
    """Return the way to build a pipeline with a LoRA."""
    return (
        "Fuse it into the pipeline with diffusers, and build the result: pipe.load_lora_weights(FOLDER); "
        f"pipe.fuse_lora(); pipe.unload_lora_weights(); pipe.save_pretrained(NEW). {opt.adapter} is for models of "
        "transformers."
    )
