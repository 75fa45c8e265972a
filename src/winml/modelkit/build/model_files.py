"""Which ONNX file does a name mean? A file itself, or the model in the folder of a build."""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.errors import InputError, ModelPathError
from winml.modelkit.graph.files import data_path

__all__ = ["EXTRACT_MANIFEST", "files_of_model", "onnx_file"]

BUILT_MODEL = "model.onnx"
MANIFEST = "build_manifest.json"
EXTRACT_MANIFEST = "extract_manifest.json"
"""Names the models in a folder of cut out modules."""


def onnx_file(name: str) -> Path | None:
    """Return the ONNX file a name means; None where it means a model that is still to be exported.

    Raises:
        ModelPathError: there is no such file, or a folder of a build lacks its model.
    """
    path = Path(name.strip()).expanduser()
    if path.is_dir():
        if (path / BUILT_MODEL).is_file():
            # A checkpoint may hold an export beside its weights; the weights are the model then.
            return None if (path / "config.json").is_file() and not (path / MANIFEST).is_file() else path / BUILT_MODEL
        if (path / MANIFEST).is_file():
            raise ModelPathError(
                f"{path}: is the folder of a build and has no {BUILT_MODEL}", hint="Build it again: winml build."
            )
        return None
    if path.suffix.lower() != ".onnx":
        return None
    if not path.is_file():
        raise ModelPathError(f"{path}: no such file", hint="Give the path of an ONNX file.")
    return path


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the ONNX file, the data files it names, and where an export puts what goes with it, there or not."""
    from winml.modelkit.build.output_paths import ExportPaths
    from winml.modelkit.graph.placing import external_files

    try:
        data = external_files(path)
    except InputError:
        data = ()  # whoever runs the model tells what is wrong with it
    paths = ExportPaths(
        path, path.with_name(f"{path.stem}_htp_metadata.json"), path.with_name(f"{path.stem}_htp_export_report.md")
    )
    beside = (data_path(path), paths.sidecar, paths.report)
    return (path, *data, *(file for file in beside if file is not None))
