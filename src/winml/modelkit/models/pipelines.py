"""Modules of a diffusers pipeline: built without storage, or loaded with their weights.

Only this module imports diffusers, which an extra of winml installs.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from winml.modelkit.errors import CheckpointError, InputError, first_line
from winml.modelkit.models.checkpoints.pipeline_files import LEFT_OUT, Component, PipelineFiles
from winml.modelkit.models.families.diffusion import PipelineModules, join_modules
from winml.modelkit.ort.foreign_libraries import library_folder, local_libraries
from winml.modelkit.version import install_command


def diffusers_version() -> str:
    """Return the version of diffusers."""
    return str(_import_diffusers().__version__)


def build_modules(files: PipelineFiles, dtype: torch.dtype) -> PipelineModules:
    """Build the modules of a pipeline from their configs, on the ``meta`` device.

    Raises:
        CheckpointError: a config has values that its class refuses.
        InputError: diffusers is not installed.
    """

    def build(component: Component) -> nn.Module:
        with torch.device("meta"):
            if component.library == "transformers":
                module_class = _class_of(component)
                config = module_class.config_class.from_pretrained(component.folder)
                return module_class._from_config(config, dtype=dtype)  # type: ignore[no-any-return]
            module: nn.Module = _class_of(component).from_config(_class_of(component).load_config(component.folder))
            return module.to(dtype)

    return _join(files, build)


def load_modules(files: PipelineFiles, dtype: torch.dtype) -> PipelineModules:
    """Load the modules of a pipeline with their weights.

    Raises:
        CheckpointError: the weights cannot be read, or do not fit the config.
        InputError: diffusers is not installed.
    """

    def load(component: Component) -> nn.Module:
        keyword = "dtype" if component.library == "transformers" else "torch_dtype"
        return _class_of(component).from_pretrained(  # type: ignore[no-any-return]
            component.folder, variant=component.variant, local_files_only=True, **{keyword: dtype}
        )

    return _join(files, load)


def assemble_pipeline(folder: Path, modules: nn.Module) -> Any:
    """Return a pipeline of diffusers with these modules, and the tokenizers and scheduler of a folder.

    Raises:
        CheckpointError: a file of the folder cannot be read.
        InputError: diffusers is not installed.
    """
    diffusers = _import_diffusers()
    with (
        local_libraries(),
        _quiet_diffusers(),
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
        with local_libraries(), _quiet_diffusers(), library_folder(component.folder, words, error=CheckpointError):
            modules[component.name] = make(component)
    return join_modules(files, modules)


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
def _quiet_diffusers() -> Iterator[None]:
    """Keep diffusers from writing to stderr."""
    from diffusers.utils import logging as messages

    level, has_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity(logging.CRITICAL)
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if has_bars:
            messages.enable_progress_bar()
