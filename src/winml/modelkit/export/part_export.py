"""Export of one part: capture, writing, comparison of the file with PyTorch, and record of the results."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.fidelity import FidelityInfo, QualitySamples
from winml.modelkit.compare.files import refuse_below_minimum_sqnr
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.verification.parts_together import TextParts, TextSample, decodes_for_others
from winml.modelkit.compare.verification.reference_run import (
    PreparedPart,
    prepared_part,
    with_drawn_weights,
    with_values,
)
from winml.modelkit.compare.verification.sizes import WrittenGraph
from winml.modelkit.compare.verification.written_file import (
    measure_written_file,
    verify_with_adapter,
    verify_written_file,
)
from winml.modelkit.compare.words import fidelity_words, verification_notes
from winml.modelkit.errors import ExportError, InternalError, UsageError, VerificationError, WinMLError, opt
from winml.modelkit.export.adapter_files import write_adapters
from winml.modelkit.export.config import (
    EXPORTER_WORDS,
    SECOND_TRY_S,
    ExporterUse,
    WinMLExportConfig,
    configured_request,
    second_choice,
    suggest_other_exporter,
)
from winml.modelkit.export.graph_making import (
    ExportRun,
    TaggedGraph,
    bounded_graph,
    make_tagged_graph,
    refit_tagged_graph,
    streams_weights,
)
from winml.modelkit.export.loading import load_for_export
from winml.modelkit.export.records import STEPS, ExportedPart, ExportResult, NodeRecord
from winml.modelkit.export.sidecar import sidecar_json
from winml.modelkit.export.table import export_report
from winml.modelkit.file_names import ENCODER, ONLY_PART, proof_paths, refit_path, sidecar_path
from winml.modelkit.models.caches.finding import no_cache_hint
from winml.modelkit.models.checkpoints.merging import adapter_merged
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.request import ModelRequest, processor_folder
from winml.modelkit.models.state_restoration import restored_process_state
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.cutting import Cutter
from winml.modelkit.onnx.files.companions import (
    earlier_companions,
    remove_companions,
    reserve_companions,
    settled_companions,
)
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.named_paths import restored_working_directory
from winml.modelkit.onnx.files.output_files import ExportPaths
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.onnx.files.writing import write_model
from winml.modelkit.onnx.fingerprint import fingerprint
from winml.modelkit.onnx.model_metadata import output_specs
from winml.modelkit.onnx.weights import idle_weight_bytes
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.foreign_libraries import local_files_only
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.progress import StepClock
from winml.modelkit.report.markdown import render_markdown
from winml.modelkit.tags.tagging import all_nodes, measure_coverage, read_tag
from winml.modelkit.transform.module_functions import functions_of_modules
from winml.modelkit.transform.records import ModuleFunctions, WrittenFile
from winml.modelkit.words import size_words


def export_part(run: ExportRun, result: ExportResult, part: ModelPart, exporter: ExporterUse) -> ExportResult:
    """Export one part into the files of the run; the last part moves all files to the final names.

    Args:
        run: The export.
        result: Result of the earlier parts.
        part: The part to export.
        exporter: The exporter to begin with.

    Returns:
        ``result`` with the part.

    Raises:
        ExportError: the part cannot be traced or converted.
        VerificationError: the outputs of ONNX Runtime and PyTorch differ.
    """
    try:
        return _export_part(run, result, part, exporter)
    except (ExportError, VerificationError) as error:
        if part.cache is not None:
            error.hint = hint_with_cache(error.hint)
        raise


def hint_with_cache(hint: str) -> str:
    """Extend a hint by the suggestion to export without a cache, if that may help."""
    # Too few bits are too few without a cache, too; and what names the option has said it.
    names_option = any(option in hint for option in (opt.min_sqnr, opt.no_cache))
    return hint if names_option else f"{hint} {no_cache_hint()}".strip()


def _export_part(run: ExportRun, result: ExportResult, part: ModelPart, exporter: ExporterUse) -> ExportResult:
    """Export one part; after a failed verification, with the second exporter or with smaller dynamic sizes.

    Raises:
        VerificationError: no attempt passes the verification.
    """
    with prepared_part(part) as prepared:
        if run.refit is not None:
            refit_graph = refit_tagged_graph(run, prepared, run.refit[part.name])
            _refuse_wrong_feeds(run, part, prepared.forward.output_names)
            return _write_part(run, result, prepared, refit_graph)
        tagged_graph = _avoid_idle_weights(run, prepared, make_tagged_graph(run, prepared, exporter))
        _refuse_wrong_feeds(run, part, prepared.forward.output_names)
        try:
            return _write_part(run, result, prepared, tagged_graph)
        except VerificationError as error:
            failed = error
        _blame_normalization(run, prepared, tagged_graph, failed)
        second_exporter = second_choice(run.config, tagged_graph.exporter, failed)
        if second_exporter is not None and prepared.part.open_grids is None:
            retried_graph = make_tagged_graph(run, prepared, second_exporter)
            if retried_graph.exporter != second_exporter:
                failed.hint = f"{failed.hint} Also tried: {retried_graph.exporter.reason}."
            else:
                try:
                    return _write_part(run, result, prepared, retried_graph)
                except VerificationError as error:
                    error.frozen = error.frozen or failed.frozen
                    if not failed.most:
                        tagged_graph, failed = retried_graph, error
        # The file is wrong at large sizes only. Each iteration lowers a bound, so that the loop ends.
        while failed.most:
            tagged_graph = bounded_graph(run, prepared, tagged_graph, failed.most, failed.message)
            try:
                return _write_part(run, result, prepared, tagged_graph)
            except VerificationError as error:
                failed = error
        if failed.is_graph_wrong and not failed.is_normalization_wrong:
            suggest_other_exporter(run.config, part, failed)
        raise failed


def _blame_normalization(
    run: ExportRun, prepared: PreparedPart, tagged_graph: TaggedGraph, failed: VerificationError
) -> None:
    """Reword the error of a wrong graph if the graph before normalization passes the same verification, in place.

    The part is exported and verified again for that.

    Args:
        run: The export; unchanged.
        prepared: The part.
        tagged_graph: The wrong graph.
        failed: The error.
    """
    # A handed-over graph has further causes, and a bound follows from sizes that are far from the traced size.
    if not failed.is_graph_wrong or failed.most or run.handover is not None:
        return
    # Separate draws, notes and steps: those of the export stay unchanged.
    raw_run = replace(run, draws={}, clock=StepClock(STEPS))
    with temporary_folder() as folder:
        try:
            raw_graph = make_tagged_graph(raw_run, prepared, tagged_graph.exporter, normalizes=False)
            if raw_graph.exporter.name != tagged_graph.exporter.name:
                return
            path = folder / "raw.onnx"
            write_model(raw_graph.model, path)
            graph = _make_written_graph(prepared.part, raw_graph, path)
            is_streamed = streams_weights(prepared)
            verify_written_file(graph, prepared, raw_run.inputs(prepared.part), is_streamed=is_streamed)
        except WinMLError:
            return
    failed.is_normalization_wrong = True
    failed.message = (
        f"normalization made the graph wrong, which is right as {EXPORTER_WORDS[tagged_graph.exporter.name]} wrote "
        f"it: {failed.message.removeprefix('cannot verify: ')}"
    )
    failed.hint = f"No file was written; {opt.no_verify} writes it anyway. This is a bug in winml: please report it."


def _avoid_idle_weights(run: ExportRun, prepared: PreparedPart, tagged_graph: TaggedGraph) -> TaggedGraph:
    """Use the dynamo graph of a part if TorchScript's stores weights of other parts that are only read for shapes.

    A part may run modules of another part for sizes alone. TorchScript computes the sizes from values; dynamo knows
    them.
    """
    can_be_other = prepared.part.name != ONLY_PART and prepared.part.open_grids is None
    idle = idle_weight_bytes(tagged_graph.model) if can_be_other else 0
    if not idle or run.config.exporter != "auto" or tagged_graph.exporter.name != "torchscript":
        return tagged_graph
    reason = f"TorchScript would store {size_words(idle)} of weights of which only the shapes are read"
    dynamo_graph = make_tagged_graph(run, prepared, ExporterUse("dynamo", reason, SECOND_TRY_S))
    return tagged_graph if idle_weight_bytes(dynamo_graph.model) else dynamo_graph


def _refuse_wrong_feeds(run: ExportRun, part: ModelPart, outputs: Sequence[str]) -> None:
    """Refuse a part whose feeds name a missing output or a missing input of a part.

    Raises:
        InternalError: the description of the parts is wrong.
    """
    inputs = {taker.name: {spec.name for spec in taker.inputs} for taker in run.loaded.parts}
    for feed in part.feeds:
        if feed.output not in outputs or feed.input not in inputs.get(feed.part, ()):
            raise InternalError(f"part {part.name}: output {feed.output} cannot feed {feed.input} of {feed.part}")


def _write_part(
    run: ExportRun, result: ExportResult, prepared: PreparedPart, tagged_graph: TaggedGraph
) -> ExportResult:
    """Write the files of a part and verify them; after the last part, move all files to their final names.

    Raises:
        VerificationError: the file differs from PyTorch, or is less exact than required; its files are removed.
        StageError: the file is larger than requested.
        WriteError: a file cannot be written.
    """
    part = prepared.part
    paths = run.target.part_paths(part)
    with run.clock.step("metadata and reports") as step, run.files.explained_errors():
        run.staged[part.name] = staged = run.files.reserve(paths.model)
        samples = _make_samples(run, part)  # a mistake in the request of a dataset ends the export before the work
        tagged_graph = _apply_handover(run, tagged_graph, paths.model)
        is_external = run.handover.is_external(tagged_graph.model) if run.handover is not None else None
        to_write, functions, function_notes = _convert_functions(run, result, part, tagged_graph)
        files = [*write_model(to_write, staged, external=is_external)]
        if tagged_graph.handed is not None:
            tagged_graph.handed.refuse_written(sum(file.stat().st_size for file in files))
        try:
            comparison = _verify_part(run, prepared, tagged_graph, staged, samples)
            adapter_notes = _verify_adapters(run, prepared, tagged_graph, staged)
        except VerificationError as error:
            from winml.modelkit.compare.by_module.first_wrong_module import name_first_wrong_module

            name_first_wrong_module(error, prepared, staged)
            if tagged_graph.handed is not None:
                error.hint = tagged_graph.handed.below_minimum_hint or error.hint
            # Another exporter may be tried, which needs the disk space.
            for file in files:
                remove_file(file)
            raise
        proof_notes = _record_proof(run, prepared, staged)
        exported = _make_exported_part(run, part, paths, tagged_graph, comparison)
        step.summary = exported.comparison_words
        notes = (*exported.notes, *function_notes, *adapter_notes, *proof_notes)
        if run.target.with_adapters:
            names = write_adapters(part.adapters, staged, lambda name: run.files.reserve(paths.model.with_name(name)))
            files += [paths.model.with_name(name) for name in names]
        if tagged_graph.refit is not None:
            refit_graph = replace(tagged_graph.refit, dimensions=tagged_graph.dimensions)
            files.append(refit_path(paths.model))
            run.files.reserve(files[-1]).write_bytes(refit_graph.as_bytes())
        exported = replace(
            exported,
            functions=functions,
            notes=notes,
            model_sha256=hash_file(staged) if paths.sidecar or paths.report else "",
            files=_written_files(paths, files, run.files.written_sizes()),
        )
        # Files of an earlier export, also if this export writes no sidecar.
        owned = earlier_companions(sidecar_path(paths.model)) if run.target.overwrite else ()
        sources = run.loaded.info.companions if run.target.with_companions else {}
        companions = reserve_companions(run.files, paths.model.parent, sources, owned=owned)
        result = replace(result, companions=companions)
        reported = _append_part(result, exported, run)
        if paths.report:
            run.files.write_text(paths.report, render_markdown(export_report(reported, reported.parts[-1])))
        if paths.sidecar:
            run.files.write_text(paths.sidecar, sidecar_json(reported, reported.parts[-1]))
        is_last = part is run.loaded.requested_parts[-1]
        sizes = run.files.commit(overwrite=run.target.overwrite) if is_last else run.files.written_sizes()
        if is_last:
            companions = settled_companions(companions, paths.model.parent, sources, run.files.gave_way)
            result = replace(result, companions=companions)
            models = [run.target.part_paths(requested_part).model for requested_part in run.loaded.requested_parts]
            remove_companions(paths.model.parent, {*owned} - {*sources, *(path.name for path in sizes)}, models)
            if run.proof is None:
                _remove_proof(paths.model.parent, {model.name for model in models})
    return _append_part(result, replace(exported, files=_written_files(paths, files, sizes)), run)


def _convert_functions(
    run: ExportRun, result: ExportResult, part: ModelPart, tagged_graph: TaggedGraph
) -> tuple[ir.Model, ModuleFunctions | None, tuple[str, ...]]:
    """Return the model to write, the modules written as functions, and notes.

    Raises:
        UsageError: no module of any part can become a function.
    """
    if run.target.functions is None:
        return tagged_graph.model, None, ()
    try:
        model, functions = functions_of_modules(tagged_graph.model, run.target.functions)
        return model, functions, tuple(functions.notes())
    except UsageError as error:
        is_last = part is run.loaded.requested_parts[-1]
        if is_last and not any(earlier.functions for earlier in result.parts):
            raise
        return tagged_graph.model, None, (f"Part {part.name} was written without functions: {error.message}.",)


def _apply_handover(run: ExportRun, tagged_graph: TaggedGraph, path: Path) -> TaggedGraph:
    """Apply the handed-over works to the graph, if there are any."""
    if run.handover is None:
        return tagged_graph
    try:
        handed_graph = run.handover.apply(tagged_graph.model, path)
    except WinMLError as error:
        error.is_after_export = True
        raise
    return replace(
        tagged_graph,
        model=handed_graph.model,
        coverage=measure_coverage(handed_graph.model),
        notes=(*tagged_graph.notes, *handed_graph.notes),
        handed=handed_graph,
    )


def _record_proof(run: ExportRun, prepared: PreparedPart, staged: Path) -> tuple[str, ...]:
    """Add a part to the requested proof, and write the proof after the last part; return notes.

    Raises:
        UsageError: the user's inputs do not fit.
        StageError: the file cannot be run.
    """
    if run.proof is None:
        return ()
    from winml.modelkit.compare.by_module.torch_side import TorchSide
    from winml.modelkit.compare.verification.streamed_reference import with_streamed_values
    from winml.modelkit.quantize.file_minimum import file_minimum

    with with_streamed_values(prepared) as weighted:
        reference = TorchSide(weighted, "the model in PyTorch")
        run.proof.add(prepared.part.name, reference, staged, staged, file_minimum(staged))
    if prepared.part is not run.loaded.requested_parts[-1]:
        return ()
    run.proof.write(run.target.paths().model.parent, run.files)
    return (f"Proof: {run.proof.words}. winml verify compares a file with it, without PyTorch.",)


def _remove_proof(folder: Path, models: Collection[str]) -> None:
    """Remove the proof of an earlier export if it is of one of these files, which were replaced."""
    record, tensors = proof_paths(folder)
    try:
        parts = read_json_file(record)["parts"]
        is_replaced = any(part["file"] in models for part in parts)
    except (OSError, ValueError, KeyError, TypeError):
        return  # there is none, or it is not ours
    if is_replaced:
        remove_file(record)
        remove_file(tensors)
        with contextlib.suppress(OSError):
            record.parent.rmdir()  # if it is empty now


def _verify_adapters(
    run: ExportRun, prepared: PreparedPart, tagged_graph: TaggedGraph, staged: Path
) -> tuple[str, ...]:
    """Compare a part with PyTorch once for each run-time adapter; return notes.

    Raises:
        VerificationError: the outputs with an adapter differ.
    """
    adapters = prepared.part.adapters
    if not adapters or not run.config.verify:
        return ()
    names = ", ".join(str(adapter.name) for adapter in adapters)
    needed = sum(4 * parameter.numel() for parameter in prepared.model.parameters())
    if needed > available_bytes():
        return (
            f"Not verified with adapters ({names}): the comparison needs {size_words(needed)} of memory in PyTorch.",
        )
    graph = _make_written_graph(prepared.part, tagged_graph, staged)
    minimum_db = None if tagged_graph.handed is None else tagged_graph.handed.minimum.sqnr_db
    with temporary_folder() as folder, with_values(prepared) as weighted:
        files = write_adapters(adapters, staged, lambda name: folder / name)
        for adapter, file in zip(adapters, files, strict=True):
            with adapter_merged(weighted.model, adapter):
                verify_with_adapter(graph, weighted, folder / file, str(adapter.name), minimum_db)
    return (f"Also compared with PyTorch with each adapter merged: {names}.",)


def _make_written_graph(part: ModelPart, tagged_graph: TaggedGraph, staged: Path) -> WrittenGraph:
    return WrittenGraph(
        staged,
        tagged_graph.model,
        part.inputs,
        tagged_graph.draw,
        tagged_graph.proof,
        tagged_graph.assumed,
        tagged_graph.reads,
    )


def _verify_part(
    run: ExportRun,
    prepared: PreparedPart,
    tagged_graph: TaggedGraph,
    staged: Path,
    samples: tuple[Sequence[Arrays], QualitySamples] | None,
) -> VerificationInfo | FidelityInfo | None:
    """Compare a written part with PyTorch: its outputs, or its quality if the graph was processed after the export.

    `None` if no comparison is requested.

    Raises:
        VerificationError: the outputs differ, or the quality is below the minimum.
    """
    if not run.config.verify:
        return None
    part = prepared.part
    graph = _make_written_graph(part, tagged_graph, staged)
    if run.handover is not None:
        assert tagged_graph.handed is not None  # applied before the file was written
        minimum, piece_bytes = tagged_graph.handed.minimum, run.handover.piece_bytes
        fidelity = measure_written_file(graph, prepared, run.inputs(part), minimum, piece_bytes, samples)
        return fidelity if len(run.loaded.parts) == 1 else _measure_text(run, prepared, fidelity)
    try:
        is_streamed = streams_weights(prepared)
        verification = verify_written_file(graph, prepared, run.inputs(part), is_streamed=is_streamed)
    except VerificationError as error:
        unchecked: VerificationInfo | None = error.unchecked
        if unchecked is None:
            raise
        verified = _verify_on_copy(run, prepared, tagged_graph)
        if verified is None:
            if unchecked.lacks_numbers:
                raise
            accepts = run.config.accept_assumptions
            return replace(unchecked, assumed=tagged_graph.assumed, accepts_assumptions=accepts)
        verification = replace(verified, on_drawn_weights=True)
    follows = partial(_follows_inputs, tagged_graph.model)
    if not verification.on_drawn_weights and any(map(follows, verification.constant)):
        # A head, or a neighbouring scale, may be zero.
        verified = _verify_on_copy(run, prepared, tagged_graph)
        if verified is not None and len(verified.constant) < len(verification.constant):
            disproved = {*verification.constant} - {*verified.constant}
            assumed = (assumption for assumption in verification.assumed or () if assumption.value not in disproved)
            verification = replace(verification, assumed=tuple(assumed), on_drawn_weights=True)
    verification = replace(verification, accepts_assumptions=run.config.accept_assumptions)
    return _verify_image(run, prepared, _verify_text(run, prepared, verification))


def _verify_on_copy(run: ExportRun, prepared: PreparedPart, tagged_graph: TaggedGraph) -> VerificationInfo | None:
    """Export and compare the same model with random weights.

    `None` if the comparison proves nothing, or the copy has a different graph.

    Args:
        run: The export; unchanged.
        prepared: The part.
        tagged_graph: The graph of the part.

    Raises:
        VerificationError: the graph does not match the model.
    """
    if tagged_graph.handed is not None:
        return None
    _refuse_other_weights(tagged_graph.model, prepared)
    # Separate inputs, notes and steps: those of the model stay unchanged.
    copied_run = replace(run, draws={}, clock=StepClock(STEPS))
    with with_drawn_weights(prepared, run.seed) as drawn, temporary_folder() as folder:
        try:
            copied = make_tagged_graph(copied_run, drawn, tagged_graph.exporter)
        except ExportError:  # the model does not run with any weights
            return None
        if fingerprint(copied.model) != fingerprint(tagged_graph.model):
            return None
        path = folder / "copy.onnx"
        write_model(copied.model, path)
        try:
            graph = _make_written_graph(drawn.part, copied, path)
            return verify_written_file(graph, drawn, copied_run.inputs(drawn.part))
        except VerificationError as error:
            if not error.is_graph_wrong:
                return None
            error.message = (
                f"{error.message} (on a copy with random weights, since with its own weights the model returns "
                "the same outputs for all inputs)"
            )
            raise


def _follows_inputs(model: ir.Model, name: str) -> bool:
    """Return True if the graph computes an output from its inputs."""
    output = next((value for value in model.graph.outputs if value.name == name), None)
    maker = None if output is None else output.producer()
    return maker is not None and not Cutter(model).is_constant(maker)


def _refuse_other_weights(model: ir.Model, prepared: PreparedPart) -> None:
    """Refuse a graph whose initializer differs from the model's parameter of the same name.

    A comparison of outputs misses an initializer without influence on the outputs.

    Raises:
        VerificationError: names the parameter.
    """
    with with_values(prepared) as weighted:
        for name, value in weighted.model.named_parameters():
            stored = model.graph.initializers.get(name)
            tensor = None if stored is None else stored.const_value
            if tensor is None or tuple(tensor.shape.numpy()) != tuple(value.shape):
                continue
            original, saved = to_numpy(value.detach()), tensor.numpy()
            if not np.array_equal(saved.astype(np.float64), original.astype(np.float64), equal_nan=True):
                raise VerificationError(
                    f"the values of parameter {name!r} in the file differ from the model",
                    hint="No file was written. This is a bug in winml: please report it.",
                    is_graph_wrong=True,
                )


def _make_samples(run: ExportRun, part: ModelPart) -> tuple[Sequence[Arrays], QualitySamples] | None:
    """Return the samples on which every command measures quality, made by the processor of the checkpoint.

    None without a comparison of one part, without a processor, or if its results do not fit the inputs of the model.

    Raises:
        UsageError: samples of a dataset are requested, and there is no processor, or they do not fit.
    """
    if run.handover is None or not run.config.verify or len(run.loaded.parts) > 1:
        return None
    folder, data_set = run.handover.processors, run.handover.data_set
    if folder is None and data_set is not None:
        raise UsageError(
            f"{data_set.words}: samples require a tokenizer or image processor, and the model is not in a folder",
            hint="Save the model as a checkpoint with its tokenizer or processor.",
        )
    if folder is None:
        return None
    if data_set is not None:
        from winml.modelkit.compare.quality_samples import data_set_values

        samples = data_set_values(part.inputs, {}, data_set, folder)
        return [values.feeds for values in samples.values], samples.about
    # Samples can only be made for checkpoints with a processor.
    from winml.modelkit.compare.quality_samples import default_samples
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.samples.generated_samples import generate_samples, has_processors

    inputs = part.inputs
    if not has_processors(inputs, folder):
        return None
    weights_bytes = sum(value.numel() * value.element_size() for value in part.module.parameters())
    try:
        sample_values = generate_samples(inputs, folder, default_samples(weights_bytes), RunOptions("", seed=run.seed))
    except WinMLError:
        return None
    return [values.feeds for values in sample_values], QualitySamples("processor", len(sample_values), run.seed)


def _measure_text(run: ExportRun, prepared: PreparedPart, fidelity: FidelityInfo) -> FidelityInfo:
    """Add the comparison of the text of all parts to the fidelity of a quantized decoder, which is exported last.

    Raises:
        VerificationError: the quality of all parts together is below the minimum.
    """
    decoder, parts = prepared.part, run.loaded.parts
    # The decoder is exported last and reports the quality of all parts; earlier parts are compared alone.
    if not decodes_for_others(decoder, parts):
        return replace(fidelity, is_part_alone=True)
    sample = _text_sample(parts, decoder, None if run.handover is None else run.handover.processors, run.seed)
    text = TextParts.of(parts, prepared, run.staged).measure(run.seed, sample)
    if isinstance(text, str):
        run.inputs(decoder).notes.append(f"The parts were not compared as a whole: {text}.")
        return replace(fidelity, is_part_alone=True)
    is_whole = len(run.staged) == len(parts)
    fidelity = replace(fidelity, together=text, parts=len(parts), has_encoder_of_source=not is_whole)
    refuse_below_minimum_sqnr(fidelity, "the model in PyTorch", {})
    return fidelity


def _verify_text(run: ExportRun, prepared: PreparedPart, verification: VerificationInfo) -> VerificationInfo:
    """Add the comparison of the text generated by all parts, if this part decodes the outputs of others.

    Raises:
        VerificationError: PyTorch generates another text.
    """
    if not decodes_for_others(prepared.part, run.loaded.parts):
        return verification
    if verification.in_float32:
        run.inputs(prepared.part).notes.append("No text was generated to compare: the weights are bfloat16.")
        return verification
    generation = TextParts.of(run.loaded.parts, prepared, run.staged).compare(run.seed)
    if isinstance(generation, str):
        run.inputs(prepared.part).notes.append(f"No text was generated to compare: {generation}.")
        return verification
    return replace(verification, generation=generation)


def _verify_image(run: ExportRun, prepared: PreparedPart, verification: VerificationInfo) -> VerificationInfo:
    """Add the comparison of an image, after the last part of a diffusers pipeline.

    Raises:
        VerificationError: the parts together make another image than PyTorch.
    """
    parts, info = run.loaded.parts, run.loaded.info
    if info.source_kind != "pipeline" or len(run.staged) < len(parts):
        return verification
    from winml.modelkit.compare.verification.images import compare_image

    image = compare_image(parts, Path(info.name_or_path), run.staged, run.seed)
    if isinstance(image, str):
        run.inputs(prepared.part).notes.append(f"No image was made to compare: {image}.")
        return verification
    return replace(verification, image=image)


def _make_exported_part(
    run: ExportRun,
    part: ModelPart,
    paths: ExportPaths,
    tagged_graph: TaggedGraph,
    comparison: VerificationInfo | FidelityInfo | None,
) -> ExportedPart:
    verification = comparison if isinstance(comparison, VerificationInfo) else None
    settled = None if verification is None else verification.assumed
    assumed = tagged_graph.assumed if settled is None else settled
    fidelity = comparison if isinstance(comparison, FidelityInfo) else None
    compared = () if fidelity is None else (f"Compared with PyTorch: {fidelity_words(fidelity)}.",)
    skipped = () if comparison else (f"Not verified: the file was not compared with the model ({opt.no_verify}).",)
    if part.dimensions and not comparison:
        traced = " and ".join(f"{name} {size}" for name, size in tagged_graph.draw.sizes.items())
        skipped = (*skipped, f"Not verified: the file may run at the traced {traced} only ({opt.no_verify}).")
    model, exporter, handed_graph = tagged_graph.model, tagged_graph.exporter, tagged_graph.handed
    checked_sizes = tagged_graph.proof.other_sizes(tagged_graph.draw.sizes) if comparison else {}
    return ExportedPart(
        name=part.name,
        description=run.loaded.describe(replace(part, dimensions=tagged_graph.dimensions)),
        model_path=paths.model,
        files=(),
        tree=tagged_graph.tree,
        nodes=_node_records(model),
        coverage=tagged_graph.coverage,
        inputs=part.inputs,
        outputs=output_specs(model.graph),
        verification=verification,
        exporter=exporter.name,
        exporter_reason=exporter.reason,
        opset_requested=run.config.opset_for(exporter.name),
        opset_produced=model.opset_imports[""],
        dimensions=tagged_graph.dimensions,
        checked_sizes=checked_sizes,
        openable_sizes=part.openable_sizes,
        done=handed_graph.summaries if handed_graph is not None else (),
        fidelity=fidelity,
        assumed=assumed,
        notes=(
            *part.notes,
            *tagged_graph.notes,
            *(assumption.message for assumption in assumed),
            *run.inputs(part).notes,
            *verification_notes(verification),
            *(handed_graph.late_notes() if handed_graph is not None else ()),
            *compared,
            *skipped,
        ),
    )


def _append_part(result: ExportResult, part: ExportedPart, run: ExportRun) -> ExportResult:
    """Append a part to the result, with the steps since the previous part."""
    timings = run.clock.timings()
    steps = timings[sum(len(earlier.steps) for earlier in result.parts) :]
    return replace(result, parts=(*result.parts, replace(part, steps=steps)))


def _node_records(model: ir.Model) -> tuple[NodeRecord, ...]:
    def record(node: ir.Node) -> NodeRecord:
        tag = read_tag(node)
        return NodeRecord(
            name=node.name or "",
            op_type=node.op_type,
            tag=tag.tag if tag else "",
            module=tag.module if tag else "",
            source=tag.source if tag else None,
        )

    return tuple(map(record, all_nodes(model)))


def _written_files(paths: ExportPaths, outputs: Sequence[Path], sizes: Mapping[Path, int]) -> tuple[WrittenFile, ...]:
    """Return the files of a part as the user named them, the model first."""
    names = {path.name for path in (*outputs, paths.sidecar, paths.report) if path is not None}
    files = [WrittenFile(paths.model.with_name(path.name), size) for path, size in sizes.items() if path.name in names]
    return tuple(sorted(files, key=lambda file: (file.path != paths.model, file.path.name)))


def _text_sample(parts: Sequence[ModelPart], decoder: ModelPart, folder: Path | None, seed: int) -> TextSample | None:
    """Return sample inputs of encoder and decoder made by processor and tokenizer; None: use random inputs."""
    encoder = next((part for part in parts if part.name == ENCODER), None)
    if folder is None or encoder is None:
        return None
    from winml.modelkit.samples.generated_samples import encoder_feeds, has_processors, token_texts

    if not has_processors(encoder.inputs, folder):
        return None
    try:
        feeds = encoder_feeds(encoder.inputs, folder, {}, seed)
        return TextSample(feeds, next(token_texts(decoder.inputs, folder, seed)))
    except WinMLError:
        return None


def words_of_text_together(
    request: ModelRequest, config: WinMLExportConfig, paths: Mapping[str, Path], least_sqnr_db: float
) -> str | None:
    """Compare the text generated by all parts with the text of their source model; return the result as text.

    Args:
        request: The model, as it was exported.
        config: Options of its export.
        paths: Part → its quantized file.
        least_sqnr_db: Minimum SQNR (dB) of each part.

    Returns:
        The result, or the reason for no comparison; None if no part generates text with others.

    Raises:
        VerificationError: the quality of the scores is below the minimum, or ONNX Runtime cannot run a file.
        WinMLError: the model cannot be loaded.
    """
    request = configured_request(request, config)
    with restored_process_state(), restored_working_directory():
        loaded, _ = load_for_export(request, config)
        decoder = next((part for part in loaded.parts if decodes_for_others(part, loaded.parts)), None)
        if decoder is None or decoder.name not in paths:
            return None
        with local_files_only(), prepared_part(decoder) as prepared:
            sample = _text_sample(loaded.parts, decoder, processor_folder(request), request.seed)
            text = TextParts.of(loaded.parts, prepared, paths).measure(request.seed, sample)
    if isinstance(text, str):
        return f"not compared as a whole: {text}"
    fidelity = FidelityInfo.of_text(text, least_sqnr_db, len(loaded.parts))
    refuse_below_minimum_sqnr(fidelity, "the model in PyTorch", {})
    return fidelity_words(fidelity)
