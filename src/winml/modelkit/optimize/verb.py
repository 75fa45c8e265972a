"""Command ``winml optimize`` as a library function: optimizes a graph; outputs and tags are preserved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from winml.modelkit.errors import opt
from winml.modelkit.fields import MODEL, OUTPUT, VERIFICATION, declare, refuse_stated
from winml.modelkit.file_names import OPTIMIZED_SUFFIX, optimized_path
from winml.modelkit.optimize.declared_options import OptimizeFields
from winml.modelkit.python_functions import python_function
from winml.modelkit.verbs.file_to_file import FilePlan, WeightsRequest
from winml.modelkit.verbs.named_models import file_request

if TYPE_CHECKING:
    from winml.modelkit.builds.found_models import ModelFolder
    from winml.modelkit.optimize.file_optimization import SingleOptimization
    from winml.modelkit.optimize.options import OptimizeOptions
    from winml.modelkit.optimize.records import OptimizedFile
    from winml.modelkit.progress import OnStep
    from winml.modelkit.transform.graph_file import GraphFileTask


@dataclass(frozen=True, kw_only=True)
class OptimizeRequest(WeightsRequest["OptimizeOptions", "OptimizedFile"]):
    """Request of ``winml optimize``."""

    verb: ClassVar[str] = "optimize"
    section: ClassVar[str] = "optim"
    declaring: ClassVar[type] = OptimizeFields

    output: Path | None = declare(
        None, OUTPUT, short="-o", default_words=f"STEM{OPTIMIZED_SUFFIX}.onnx beside the input", is_common=True
    )
    """File to write; for a build folder, the folder."""
    functions: str | None = declare(None, OUTPUT, metavar="SELECTOR")
    """Write modules as ONNX functions. all: every module; classes: one function for modules of a class with equal
    graphs; or the modules of a selector."""
    dataset: str | None = declare(None, VERIFICATION, metavar="PATH|NAME", min_length=1, default_words="random values")
    """Dataset whose samples outputs are compared on: a file, a folder, or a name on the Hub. It requires the tokenizer
    or image processor beside the model."""
    input_data: Path | None = declare(
        None,
        VERIFICATION,
        metavar="FILE",
        default_words="samples beside the model, else random values",
        is_common=True,
    )
    """Inputs to compare on: an .npz file with one array per input, or a folder of such files."""
    skip_normalization: bool = declare(False, MODEL, in_command=False)
    """Treat the graph as normalized although its metadata does not state it."""

    @classmethod
    def options_record(cls) -> type[OptimizeOptions]:
        """Return the validated record of the options."""
        from winml.modelkit.optimize.options import OptimizeOptions

        return OptimizeOptions

    def refuse_options(self) -> None:
        """Refuse capabilities unsupported by the execution provider, and selected modules with whole-graph options.

        Raises:
            UsageError: the message names the option.
        """
        list(self.options.enabled())
        if self.input_data is not None:
            refuse_stated(self, ("dataset",), f"{{}} cannot be combined with {opt.input_data}", "Use one of them.")
            from winml.modelkit.onnx.files.named_paths import refuse_missing_values

            refuse_missing_values(self.input_data)
        if self.dataset is not None:
            from winml.modelkit.samples.data_sources import find_source, refuse_missing_datasets

            find_source(self.dataset)
            refuse_missing_datasets(f"{opt.dataset} {self.dataset}")
        self.options.refuse_whole_graph_options()

    def default_output(self, model: Path) -> Path:
        """Return a name with a suffix beside the source."""
        if not model.is_dir():
            return optimized_path(model)
        folder = model if model.name else model.absolute()  # the working directory is "."
        return folder.with_name(f"{folder.name}{OPTIMIZED_SUFFIX}")

    def task(self, source: Path, output: Path, folder: ModelFolder | None = None) -> GraphFileTask:
        """Return the task, with the functions of modules."""
        task = super().task(source, output, folder)
        return replace(task, skip_normalization=self.skip_normalization, functions=self.functions)

    def plan(self) -> FilePlan[OptimizedFile]:
        """Plan the command, which also reads the inputs of the comparison."""
        plan = super().plan()
        if self.input_data is None:
            return plan
        from winml.modelkit.compare.quality_samples import value_files

        return replace(plan, reads=(*plan.reads, *value_files(self.input_data)))

    def work(self, task: GraphFileTask, options: OptimizeOptions) -> SingleOptimization:  # noqa: ARG002
        """Return the optimization."""
        from winml.modelkit.compare.quality_samples import JudgingData, judging_request
        from winml.modelkit.optimize.file_optimization import optimization

        data = JudgingData(self.input_data, judging_request(self.dataset, seed=self.seed))
        return optimization(options, self.sizes or {}, data)


@python_function(opset="opset")
def optimize_model(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    submodel: Sequence[str] = (),
    options: OptimizeOptions | None = None,
    overwrite: bool = False,
    freeze_inputs: bool = False,
    verify: bool = True,
    skip_normalization: bool = False,
    external_data: bool | None = None,
    seed: int = 0,
    sizes: Mapping[str, int] | None = None,
    dataset: str | None = None,
    input_data: str | os.PathLike[str] | None = None,
    functions: str | None = None,
    on_step: OnStep | None = None,
    **flags: Any,
) -> OptimizedFile:
    """Optimize an ONNX file. Its module tags are preserved.

    Without flags, a normalized file is copied, and any other file is normalized.

    Args:
        model: The file, or a build folder; it is not changed.
        output: The ``.onnx`` file to write; the folder for a build folder.
        submodel: Parts of a build folder; empty: all.
        options: Options; None: the options in ``flags``.
        overwrite: Replace an existing file.
        freeze_inputs: Turn inputs that have a default value into constants.
        verify: Compare the result with ``model`` in ONNX Runtime.
        skip_normalization: Treat the graph as normalized even if it is not stamped so.
        external_data: Store weights in a separate data file (True) or in the model (False); None: a separate file from
            ``EXTERNAL_BYTES`` on.
        seed: Seed of the inputs that outputs are compared on.
        sizes: Sizes of dynamic dimensions to compare at, by name, by ``input:axis``, or by key of ``--shape-config``.
        dataset: Dataset whose samples outputs are compared on; None: samples beside the model, or random values.
        input_data: Inputs of the comparison: an ``.npz`` file with one array per input, or a folder of such files.
        functions: Modules to write as ONNX functions: ``all``, ``classes`` (modules of one class whose graphs are
            equal share one) or a selector.
        on_step: Called when a step starts and when it ends.
        **flags: ``level``, ``ep``, ``operators``, ``opset``, ``module``, ``exclude``, names of capabilities
            (``gelu_fusion=True``).

    Returns:
        The record of the optimization; the file is written. For a build folder, the
        :class:`~winml.modelkit.transform.records.TransformedFolder` with the record of each part.

    Raises:
        UsageError: an unknown flag, contradictory flags, or an output that exists.
        InputError: the file is no ONNX model, or its data is missing.
        OptimizeError: an engine could not read the graph, or failed.
        StageError: ``model`` itself does not run, so that the result cannot be compared.
        VerificationError: the outputs of the result differ from those of ``model``; no file was written.

    Example:
        ```python
        optimize_model("model.onnx", "fast.onnx", level="full")
        ```
    """
    return file_request(OptimizeRequest, "optimize_model", locals()).run(on_step)


optimize_onnx = optimize_model
"""Former name of :func:`optimize_model`."""
