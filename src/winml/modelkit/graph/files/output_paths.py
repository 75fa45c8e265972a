"""Names the files of an export, and refuses those that may not be written.

Looks at paths only, so wrong ones are refused before anything heavy is imported.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import BUILT_MODEL_NAME, report_path, sidecar_path
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.graph.files.output_files import refuse_existing

__all__ = ["ExportPaths", "files_of_model"]


@dataclass(frozen=True)
class ExportPaths:
    """The files one export writes."""

    model: Path
    sidecar: Path | None
    """``<stem>_htp_metadata.json``; None without a hierarchy."""
    report: Path | None
    """``<stem>_htp_export_report.md``; None where it was not asked for."""

    @classmethod
    def for_output(cls, output: str | os.PathLike[str], *, with_sidecar: bool, with_report: bool) -> ExportPaths:
        """Name the files that go with a model path.

        Raises:
            UsageError: the path is a directory, is none at all, or does not end in ``.onnx``.
        """
        model = Path(output)
        named_path(model)
        if model.is_dir():
            raise UsageError(f"output {model} is a directory", hint=f"Name the file: {model / BUILT_MODEL_NAME}")
        if model.suffix != ".onnx":
            inside = "" if model.suffix else f", or {model / BUILT_MODEL_NAME} for a folder of that name"
            raise UsageError(
                f"output {model} does not end in .onnx",
                hint=f"Name it {model.with_name(model.name + '.onnx')}{inside}",
            )
        return cls(
            model=model,
            sidecar=sidecar_path(model) if with_sidecar else None,
            report=report_path(model) if with_report else None,
        )

    def refuse_existing(self, *, overwrite: bool) -> None:
        """Refuse to go on if a file is there already and may not be replaced, or its place cannot be written.

        Raises:
            OutputExistsError: names the first file that exists.
            UsageError: names the first that is no regular file.
        """
        outputs = (self.model, self.sidecar, self.report)
        refuse_existing([path for path in outputs if path], overwrite=overwrite)


def files_of_model(path: Path) -> tuple[Path, ...]:
    """Return the ONNX file, the data files it names, and where an export puts what goes with it, there or not."""
    from winml.modelkit.graph.files.placing import external_files

    try:
        data = external_files(path)
    except InputError:
        data = ()  # whoever runs the model tells what is wrong with it
    return (path, *data, sidecar_path(path), report_path(path))
