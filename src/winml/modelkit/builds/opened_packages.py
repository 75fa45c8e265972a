"""Opens a model package as the folder of an export: the models of one variant, with their weights and companion files.

The weights of a variant are in a folder that variants share, where only ONNX Runtime's session option finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from winml.modelkit import file_names
from winml.modelkit.builds.layouts import package
from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.file_names import MODEL_SUFFIX
from winml.modelkit.models.checkpoints.companion_files import companion_files
from winml.modelkit.onnx.files.foreign_names import file_within
from winml.modelkit.options import read_json_file

_CPU = package.VARIANTS["cpu"].providers[0]


def opened_variant_files(folder: Path) -> Mapping[str, Path]:
    """Return name → file of the opened variant; ``{}`` for a folder that is no package.

    The folder of a package has its first variant for the CPU, the folder of a variant this one.

    Args:
        folder: A package (``pkg``), or a variant of one component (``pkg/model/webgpu``).

    Raises:
        ModelPathError: the package has no variant for the CPU; names its variants.
        InputError: the package is damaged.
    """
    is_variant = (folder.parent / file_names.PACKAGE_COMPONENT_NAME).is_file()
    root = folder.parent.parent if is_variant else folder
    components = _components(root)
    if is_variant:
        components = {name: path for name, path in components.items() if path == folder.parent.name}
    files: dict[str, Path] = {}
    for name, path in components.items():
        entries = _read_variants(
            file_within(root, f"{path}/{file_names.PACKAGE_COMPONENT_NAME}", f"{root}: component {name!r}")
        )
        entry = next(
            (
                entry
                for entry in entries
                if (entry.get("variant_directory") == folder.name if is_variant else entry.get("ep") == _CPU)
            ),
            None,
        )
        if entry is None:
            variants = dict.fromkeys(f"{root / path / str(entry.get('variant_directory'))}" for entry in entries)
            raise ModelPathError(
                f"{folder}: the model package has no variant for {_CPU}",
                hint=f"Pass the folder of a variant: {', '.join(variants)}.",
            )
        files |= _variant_files(root, name, path, entry)
    return {**companion_files(root), **files} if files else {}


def _variant_files(root: Path, name: str, path: str, entry: Mapping[str, Any]) -> dict[str, Path]:
    """Return the model of a component, named by the component, and its data files.

    Raises:
        InputError: a file is missing or outside of the package.
    """
    try:
        directory, runtime = entry["variant_directory"], entry["executor_info"]["ort"]
        model_name, weights = runtime["model_file"], runtime.get("session_options", {}).get(package.WEIGHTS_OPTION)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(root / path / file_names.PACKAGE_COMPONENT_NAME) from error
    source = f"{root}: component {name!r}"
    model = file_within(root, f"{path}/{directory}/{model_name}", source)
    data = root / package.shared_folder(str(weights)) if weights else model.parent
    beside = {file.name: file for file in sorted(data.iterdir())} if data.is_dir() else {}
    beside = {file_name: file for file_name, file in beside.items() if file != model and file.is_file()}
    return {**beside, f"{name}{MODEL_SUFFIX}": model}


def _components(root: Path) -> dict[str, str]:
    """Return component → folder of a package; ``{}`` for a folder that is no package."""
    path = root / file_names.PACKAGE_MANIFEST_NAME
    if not path.is_file():
        return {}
    try:
        record: Any = read_json_file(path)
    except (OSError, ValueError):
        return {}
    components = record.get("components") if isinstance(record, dict) and "schema_version" in record else None
    if not isinstance(components, dict):
        return {}
    return {name: path for name, path in components.items() if isinstance(path, str)}


def _read_variants(path: Path) -> list[Mapping[str, Any]]:
    """Return the entries of a component.

    Raises:
        InputError: the file is damaged.
    """
    try:
        record: Any = read_json_file(path)
        entries = [*record["variants"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    return [entry for entry in entries if isinstance(entry, dict)]


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged", hint="Build the package again: winml build --layout package.")
