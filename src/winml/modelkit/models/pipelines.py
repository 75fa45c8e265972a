"""Modules of a diffusers pipeline: built without storage, or loaded with their weights.

Only this module imports diffusers, which an extra of winml installs.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from winml.modelkit.errors import CheckpointError, InputError, first_line
from winml.modelkit.models.checkpoints.pipeline_files import LEFT_OUT, VAE, Component, PipelineFiles
from winml.modelkit.models.families.diffusion import PipelineModules, join_modules
from winml.modelkit.ort.foreign_libraries import library_folder, local_libraries
from winml.modelkit.version import install_command

_PROBED_STEPS = 7
"""Chosen: no divisor of the number of training steps, which is 1000."""


def diffusers_version() -> str:
    """Return the version of diffusers."""
    return str(_import_diffusers().__version__)


def build_modules(files: PipelineFiles, requested: torch.dtype) -> PipelineModules:
    """Build the modules of a pipeline from their configs, on the ``meta`` device.

    Raises:
        CheckpointError: a config has values that its class refuses.
        InputError: diffusers is not installed.
    """

    def build(component: Component) -> nn.Module:
        dtype = _dtype_of(files, component, requested)
        with torch.device("meta"):
            module_class = _class_of(component)
            module: nn.Module
            if component.library == "transformers":
                module = module_class(module_class.config_class.from_pretrained(component.folder))
            else:
                module = module_class.from_config(module_class.load_config(component.folder))
            return module.to(dtype)

    return _join(files, build)


def load_modules(files: PipelineFiles, requested: torch.dtype) -> PipelineModules:
    """Load the modules of a pipeline with their weights.

    Raises:
        CheckpointError: the weights cannot be read, or do not fit the config.
        InputError: diffusers is not installed.
    """

    def load(component: Component) -> nn.Module:
        keyword = "dtype" if component.library == "transformers" else "torch_dtype"
        dtype = _dtype_of(files, component, requested)
        return _class_of(component).from_pretrained(  # type: ignore[no-any-return]
            component.folder, variant=component.variant, local_files_only=True, **{keyword: dtype}
        )

    return _join(files, load)


def has_fractional_timesteps(files: PipelineFiles) -> bool:
    """Return True if the scheduler of a pipeline makes timesteps between integers, as Euler schedulers may.

    Raises:
        CheckpointError: the scheduler cannot be read.
    """
    diffusers = _import_diffusers()
    folder = files.folder / "scheduler"
    with (
        local_libraries(),
        quiet_diffusers(),
        library_folder(folder, f"{folder}: the scheduler cannot be read", error=CheckpointError),
    ):
        scheduler = getattr(diffusers, files.scheduler_class).from_pretrained(folder, local_files_only=True)
        scheduler.set_timesteps(_PROBED_STEPS)
        timesteps = scheduler.timesteps
    return bool((timesteps != timesteps.floor()).any()) if timesteps.is_floating_point() else False


def assemble_pipeline(folder: Path, modules: nn.Module) -> Any:
    """Return a pipeline of diffusers with these modules, and the tokenizers and scheduler of a folder.

    Raises:
        CheckpointError: a file of the folder cannot be read.
        InputError: diffusers is not installed.
    """
    diffusers = _import_diffusers()
    with (
        local_libraries(),
        quiet_diffusers(),
        library_folder(folder, f"{folder}: the pipeline cannot be assembled", error=CheckpointError),
    ):
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            folder, local_files_only=True, **dict(modules.named_children()), **dict.fromkeys(LEFT_OUT)
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _join(files: PipelineFiles, make: Callable[[Component], nn.Module]) -> PipelineModules:
    """Return the modules that a function makes of each component, without network and messages of libraries."""
    _import_diffusers()
    modules = {}
    for component in files.modules:
        words = f"{component.folder}: {component.class_name} cannot be loaded"
        with local_libraries(), quiet_diffusers(), library_folder(component.folder, words, error=CheckpointError):
            modules[component.name] = make(component)
    return join_modules(files, modules)


def _dtype_of(files: PipelineFiles, component: Component, requested: torch.dtype) -> torch.dtype:
    """Return the type of the weights of a component: the requested one, unless it overflows in float16.

    for: the autoencoder of Stable Diffusion XL, which diffusers also runs in float32.
    """
    is_float16 = requested == torch.float16
    return torch.float32 if is_float16 and files.upcasts_vae and component.name == VAE else requested


def _class_of(component: Component) -> Any:
    """Return the class of a component.

    Raises:
        CheckpointError: the installed library does not have the class.
    """
    library = importlib.import_module(component.library)
    found = getattr(library, component.class_name, None)
    if found is None:
        raise CheckpointError(
            f"{component.folder}: {component.class_name} is not in the installed {component.library} "
            f"{library.__version__}",
            hint=f"Upgrade {component.library}.",
        )
    return found


def _import_diffusers() -> Any:
    """Import diffusers.

    Raises:
        InputError: it is not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise InputError(
            f"a diffusers pipeline requires the package diffusers: {first_line(error)}",
            hint=f"Install it: {install_command('diffusion')}",
        ) from error
    return diffusers


@contextmanager
def quiet_diffusers() -> Iterator[None]:
    """Keep diffusers from writing to stderr, and ignore its warnings, which concern its own code."""
    from diffusers.utils import logging as messages

    level, has_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        messages.set_verbosity(level)
        if has_bars:
            messages.enable_progress_bar()
