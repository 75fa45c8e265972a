"""Request of ``winml compile``, and the Python function ``compile_model``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winml.modelkit.compile.declared_options import CompileFields
from winml.modelkit.errors import ModelPathError, UsageError, opt
from winml.modelkit.evaluate.declared_options import DataSetFields, data_set_files, requested_samples
from winml.modelkit.fields import DATASET, VERIFICATION, declare, refuse_stated
from winml.modelkit.ort.execution_providers import find_execution_provider
from winml.modelkit.python_functions import python_function
from winml.modelkit.verbs.file_to_file import EXTERNAL_FROM_BYTES, FilePlan, FileRequest
from winml.modelkit.verbs.named_models import file_request
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import ModelFolder
    from winml.modelkit.compare.quality_samples import JudgingData
    from winml.modelkit.compile.file_compilation import Compilation
    from winml.modelkit.compile.options import CompileOptions
    from winml.modelkit.compile.records import CompiledFile
    from winml.modelkit.ort.execution_providers import ExecutionProvider
    from winml.modelkit.progress import OnStep
    from winml.modelkit.transform.graph_file import GraphFileTask


_DATA = ("dataset", "input_data")
"""Options for the data that outputs are compared on."""


@dataclass(frozen=True, kw_only=True)
class CompileRequest(FileRequest["CompileOptions", "CompiledFile"], DataSetFields):
    """Request of ``winml compile``."""

    verb: ClassVar[str] = "compile"
    section: ClassVar[str] = "compile"
    declaring: ClassVar[type] = CompileFields

    verify: bool = declare(True, VERIFICATION, spelling="--validate/--no-validate --verify/--no-verify", is_common=True)
    """Load the result, run it on the execution provider and compare it with the source."""

    reference: Path | None = declare(
        None, VERIFICATION, metavar="FLOAT.onnx", default_words="the one recorded in the source"
    )
    """Float model that the source was quantized from. The result is compared with it, too, and must be nearly as close
    to it as the source."""

    input_data: Path | None = declare(
        None,
        VERIFICATION,
        metavar="FILE",
        default_words="the data of the source's quantization if it is beside the source, else samples generated for "
        "the tokenizer or processor beside the source or its float model, else random values",
        is_common=True,
    )
    """Inputs to compare on: an .npz file with one array per input, or a folder of such files."""

    samples: int | None = declare(
        None, DATASET, minimum=1, default_words="16, fewer for large models; 4 on a simulated device", is_common=True
    )
    """Number of samples. They come from the dataset, or are generated for the processor of the model, or random."""

    @classmethod
    def options_record(cls) -> type[CompileOptions]:
        """Return the validated record of the options."""
        from winml.modelkit.compile.options import CompileOptions

        return CompileOptions

    def refuse_options(self) -> None:
        """Refuse a missing provider, and an unused or missing reference or data.

        Raises:
            UsageError: no provider is specified, or an option has no effect.
            ModelPathError: the reference is no file.
        """
        if self.options.ep is None:
            raise UsageError(
                "no execution provider is specified",
                hint=f"Add {opt.ep}, such as {opt.ep} cpu; {opt.list} lists the providers.",
            )
        provider = find_execution_provider(self.options.ep)
        self._refuse_data(provider)
        if self.reference is None:
            return
        if not self.verify:
            raise UsageError(
                f"{opt.reference} {self.reference} has no effect with {opt.no_verify}",
                hint="Omit one of them.",
            )
        if not provider.compiles:
            raise UsageError(
                f"{opt.reference} {self.reference}: for {provider.name}, the result has the outputs of its source, and "
                "is compared with the source only",
                hint="Omit it.",
            )
        if not self.reference.is_file():
            raise ModelPathError(
                f"{opt.reference} {self.reference}: no such file",
                hint="Pass the path of the float ONNX file that the source was quantized from.",
            )

    def _refuse_data(self, provider: ExecutionProvider) -> None:
        """Refuse data and numbers of samples without effect, and missing data.

        Raises:
            UsageError: names the option.
        """
        if not self.verify:
            refuse_stated(self, (*_DATA, "samples"), f"{{}} has no effect with {opt.no_verify}", "Omit one of them.")
        if self.input_data is not None:
            refuse_stated(
                self, ("dataset", "samples"), f"{{}} cannot be combined with {opt.input_data}", "Use one of them."
            )
            from winml.modelkit.onnx.files.named_paths import refuse_missing_values

            refuse_missing_values(self.input_data)
        requested_samples(self, seed=self.seed)  # refuses an unusable dataset
        if not provider.compiles and self.dataset is None:
            refuse_stated(
                self,
                ("samples",),
                f"{{}} has no effect: for {provider.name}, outputs are compared on a few random inputs",
                f"Add {opt.dataset}, or omit it.",
            )

    @property
    def _judging_data(self) -> JudgingData:
        """The requested samples of the comparison."""
        from winml.modelkit.compare.quality_samples import JudgingData

        return JudgingData(self.input_data, requested_samples(self, seed=self.seed), self.samples)

    def plan(self) -> FilePlan[CompiledFile]:
        """Plan the command, which also reads the data of the comparison."""
        from winml.modelkit.compare.quality_samples import value_files

        plan = super().plan()
        values = [] if self.input_data is None else value_files(self.input_data)
        return replace(plan, reads=(*plan.reads, *values, *data_set_files(self)))

    def task(self, source: Path, output: Path, folder: ModelFolder | None = None) -> GraphFileTask:
        """Return the paths and settings; processors beside the reference are used if the source has none."""
        from winml.modelkit.compile.file_compilation import find_processors

        task = super().task(source, output, folder)
        if self.reference is None or not source.is_file():
            return task
        return replace(task, processors=find_processors(source, self.reference))

    def work(self, task: GraphFileTask, options: CompileOptions) -> Compilation:
        """Return the compilation."""
        from winml.modelkit.compile.file_compilation import compilation

        return compilation(task, options, self.sizes or {}, self.reference, data=self._judging_data)

    def data_condition(self, task: GraphFileTask) -> str | None:  # noqa: ARG002
        """Return the condition for data files beside the model in words; `None` if no data file is written."""
        if self.options.embed:
            return None
        return f"a weight takes {size_words(EXTERNAL_FROM_BYTES)} or more, or the provider compiles a part"


@python_function()
def compile_model(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    submodel: Sequence[str] = (),
    options: CompileOptions | None = None,
    overwrite: bool = False,
    freeze_inputs: bool = False,
    verify: bool = True,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    reference: str | os.PathLike[str] | None = None,
    input_data: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    split: str | None = None,
    columns: Mapping[str, str] | None = None,
    samples: int | None = None,
    on_step: OnStep | None = None,
    **flags: Any,
) -> CompiledFile:
    """Compile an ONNX file for an execution provider. Its module tags are preserved.

    Args:
        model: The file, or a build folder; it is not changed.
        output: The ``.onnx`` file to write; the folder for a build folder.
        submodel: Parts of a build folder; empty: all.
        options: Target and limits; `None` to use ``flags``.
        overwrite: Replace an existing file.
        freeze_inputs: Turn inputs that have a default value into constants.
        verify: Open the result, run it on the provider, and compare it with ``model``.
        seed: Seed of the inputs of the comparison.
        sizes: Sizes of dynamic dimensions in the comparison, by name, ``input:axis``, or key of ``--shape-config``.
        reference: The float file that ``model`` was quantized from; `None` for the float file recorded in ``model``.
        input_data: Inputs of the comparison: an ``.npz`` file with one array per input, or a folder of such files.
        dataset: Dataset whose samples outputs are compared on; `None` for generated samples.
        split: Split of the dataset.
        columns: Role → column of the dataset, for columns with unknown names.
        samples: Number of samples.
        on_step: Called when a step starts and when it ends.
        **flags: Fields of :class:`CompileOptions`: ``ep``, ``device``, ``ep_options``, ``embed``, ``max_outside``,
            ``max_parts``, ``min_sqnr_db``.

    Returns:
        The record of the compilation; the file is written. For a build folder, the
        :class:`~winml.modelkit.transform.records.TransformedFolder` with the record of each part.

    Raises:
        UsageError: the provider is unknown, not installed or compiles nothing, or refuses an option; the output exists;
            the provider requires fixed sizes and a dimension is dynamic; data is missing or does not fit; or ``flags``
            and ``options`` are combined.
        InputError: the file is no ONNX model, its data is missing, or it is compiled already.
        CompileError: the provider failed, or supports none of the nodes.
        LimitError: more nodes are outside, or there are more parts, than ``options`` allow; no file was written.
        StageError: ``model`` itself does not run, so the result has no reference.
        VerificationError: the result does not load, or its outputs differ from those of ``model``; no file was written.

    Example:
        ```python
        result = compile_model("model.onnx", "again.onnx", ep="cpu")
        print(result.compiled["provider"], result.coverage.percent)
        ```
    """
    return file_request(CompileRequest, "compile_model", locals()).run(on_step)


compile_onnx = compile_model
"""Former name of :func:`compile_model`."""
