"""Compilation of a graph for the CPU provider, and refusals by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from e2e.in_process import run_here
from graphs import parse
from weighted_graphs import CONVOLUTION, PERCEPTRON
from winml.modelkit import compile_onnx, optimize_onnx, quantize_onnx
from winml.modelkit.compare.quality_samples import JudgingData
from winml.modelkit.compile.file_compilation import _find_recorded_data
from winml.modelkit.compile.options import CompileOptions
from winml.modelkit.errors import InputError, StageError, UsageError
from winml.modelkit.metadata_keys import COMPILE_KEY, MODEL_KEY, NORMALIZED_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.contexts import context_file_names
from winml.modelkit.onnx.files.placing import data_names, external_files, place_copy, replaceable_data
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.ort.devices import ChosenProvider, missing_option_hint
from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS
from winml.modelkit.ort.host import instruction_sets, is_x86
from winml.modelkit.ort.plug_ins import fitting_kind, register_library
from winml.modelkit.ort.sessions import Session, onnxruntime_version

CONTEXT = """m (float[1, 3] x) => (float[1, 3] y)
    {{ y = com.microsoft.EPContext <embed_mode = {embed}, ep_cache_context = "{cache}", source = "X"> (x) }}"""


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    """A model of two tagged layers."""
    ir.save(parse(PERCEPTRON), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def _context_model(path: Path, *, embed: int = 0, cache: str = "model.bin") -> Path:
    """Write a model of one compiled part, as ONNX Runtime does."""
    ir.save(parse(CONTEXT.format(embed=embed, cache=cache), domains=', "com.microsoft" : 1'), path)
    (path.parent / cache).write_bytes(b"compiled")
    return path


def test_compiled_cpu_file_keeps_tags_and_names_its_provider(perceptron: Path, tmp_path: Path) -> None:
    """Every node has a module, the file names provider and version, and a default session has equal outputs."""
    result = compile_onnx(perceptron, tmp_path / "out.onnx", ep="cpu")
    assert (100.0, ()) == (result.coverage.percent, result.parts)
    assert result.comparison is not None
    assert result.comparison.is_verified
    session, source = Session(result.model_path), Session(perceptron)
    record = json.loads(session.metadata[COMPILE_KEY])
    assert ("CPUExecutionProvider", onnxruntime_version(), "cpu") == (
        record["provider"], record["onnxruntime"], record["device"],
    )  # fmt: skip
    name, shape = next(iter(source.input_shapes.items()))
    sizes = [size if isinstance(size, int) else 2 for size in shape]
    feeds = {name: np.random.default_rng(0).standard_normal(sizes).astype(np.float32)}
    for output, expected in source.run(feeds).items():
        np.testing.assert_allclose(expected, session.run(feeds)[output], rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not is_x86(), reason="ONNX Runtime lays convolutions out on x86-64 in every version")
def test_compiled_convolution_records_its_processor_layout(tmp_path: Path) -> None:
    """Metadata and a note name the processor; the file is not opened on another one."""
    wide = "m (float[1, 16, 8, 8] x) => (float[1, 32, 6, 6] y) <float[32, 16, 3, 3] w> { y = Conv (x, w) }"
    model = parse(wide.replace("<float[32, 16, 3, 3] w>", ""))
    weights = ir.tensor(np.random.default_rng(0).standard_normal((32, 16, 3, 3)).astype(np.float32), name="w")
    value = model.graph[0].inputs[1]
    assert value is not None
    value.const_value = weights
    model.graph.register_initializer(value)
    ir.save(model, tmp_path / "model.onnx")
    result = compile_onnx(tmp_path / "model.onnx", tmp_path / "out.onnx", ep="cpu")
    written = onnx.load(result.model_path, load_external_data=False)
    assert any(node.domain == "com.microsoft.nchwc" for node in written.graph.node)
    assert instruction_sets() == result.compiled["processor"]
    assert any("layout" in note for note in result.notes)
    record = next(entry for entry in written.metadata_props if entry.key == COMPILE_KEY)
    record.value = json.dumps({**json.loads(record.value), "processor": "x86_64 other"})
    onnx.save(written, tmp_path / "elsewhere.onnx")
    with pytest.raises(StageError, match="x86_64 other") as refused:
        Session(tmp_path / "elsewhere.onnx")
    assert "Compile" in refused.value.hint


@pytest.mark.parametrize("embed", [True, False])
def test_weights_are_beside_the_model_unless_embedded(tmp_path: Path, embed: bool) -> None:
    """ONNX Runtime maps a data file, so a single file is written on request only."""
    ir.save(parse(CONVOLUTION), tmp_path / "model.onnx")
    result = compile_onnx(tmp_path / "model.onnx", tmp_path / "out.onnx", ep="cpu", embed=embed)
    assert embed == (not external_files(result.model_path))


def test_unnamed_unknown_and_absent_providers_are_refused(perceptron: Path, tmp_path: Path) -> None:
    """The message names the provider and a remedy; nothing is written."""
    absent = next(name for name, item in EXECUTION_PROVIDERS.items() if item.compiles and not item.plug_in)
    for options, words in (
        ({}, "no execution provider is specified"),
        ({"ep": "qmn"}, "ep qmn: no such execution provider"),
        ({"ep": absent}, "is not part of the installed ONNX Runtime"),
        ({"ep": "cpu", "device": "npu"}, "device npu: CPUExecutionProvider runs on cpu"),
        ({"ep": "cpu", "ep_options": {"threads": "1"}}, "ep_options threads: CPUExecutionProvider has no options"),
        ({"ep": "cpu", "samples": 2, "verify": False}, "samples has no effect with verify=False"),
        ({"ep": "cpu", "input_data": "a.npz", "dataset": "b.csv"}, "dataset cannot be combined with input_data"),
        ({"ep": "cpu", "input_data": "absent.npz"}, "absent.npz: no such file"),
        ({"ep": "cpu", "split": "test"}, "split requires dataset"),
        ({"ep": "cpu", "samples": 2}, "samples has no effect: for CPUExecutionProvider"),
    ):
        with pytest.raises(UsageError, match=words):
            compile_onnx(perceptron, tmp_path / "out.onnx", **options)
    assert not (tmp_path / "out.onnx").exists()


def test_compiled_model_is_not_changed_again(perceptron: Path, tmp_path: Path) -> None:
    """The compiler may be ours or another tool."""
    ours = compile_onnx(perceptron, tmp_path / "out.onnx", ep="cpu").model_path
    foreign = _context_model(tmp_path / "context.onnx")
    for path, by in ((ours, "CPUExecutionProvider"), (foreign, "X")):
        for change in (functools.partial(compile_onnx, ep="cpu"), optimize_onnx, quantize_onnx):
            with pytest.raises(InputError, match=f"compiled by {by}"):
                change(path, tmp_path / "again.onnx")
    assert NORMALIZED_KEY not in Session(ours).metadata
    assert not (tmp_path / "again.onnx").exists()


@pytest.mark.parametrize(
    "requested", [{"columns": "text"}, {"columns": 3}, {"columns": {"text": 1}}, {"split": 7}, ["split"]]
)
def test_foreign_record_of_a_quantization_states_no_data(requested: object, tmp_path: Path) -> None:
    """Metadata of another program is no error."""
    (tmp_path / "a.csv").write_text("text\na\n")
    metadata = {QUANTIZATION_KEY: json.dumps({"calibration": {"data": "a.csv"}, "requested": requested})}
    assert (JudgingData(), "") == _find_recorded_data(metadata, [tmp_path], 0, lambda _request: True)


def test_unknown_operator_is_refused_by_name(tmp_path: Path) -> None:
    """A custom operator without its library cannot be loaded."""
    ir.save(
        parse("m (float[2] x) => (float[2] y) { y = mine.Swirl (x) }", domains=', "mine" : 1'), tmp_path / "model.onnx"
    )
    with pytest.raises(StageError, match="Swirl"):
        compile_onnx(tmp_path / "model.onnx", tmp_path / "out.onnx", ep="cpu")


def test_invalid_plug_in_library_is_refused_by_name(tmp_path: Path) -> None:
    """A damaged library, or one for another processor, is named with the version of ONNX Runtime."""
    (tmp_path / "libplug.so").write_bytes(b"no library")
    with pytest.raises(StageError, match=rf"ONNX Runtime {onnxruntime_version()} cannot load libplug.so"):
        register_library("QNNExecutionProvider", tmp_path / "libplug.so")
    register_library("CPUExecutionProvider", tmp_path / "libplug.so")  # has devices already, so nothing is loaded


def test_absent_device_is_refused_unless_the_plug_in_has_a_simulator() -> None:
    """No other device replaces a requested GPU; QNN simulates its NPU on x86-64."""
    qnn = EXECUTION_PROVIDERS["qnn"]
    selecting = {kind: dict([qnn.device_options[kind]]) for kind in qnn.devices}
    assert "npu" == fitting_kind(qnn, ["cpu", "npu"], selecting["npu"])
    assert "cpu" == fitting_kind(qnn, ["cpu"], {})
    with pytest.raises(UsageError, match="no gpu"):
        fitting_kind(qnn, ["cpu"], selecting["gpu"])
    if is_x86():
        assert "cpu" == fitting_kind(qnn, ["cpu"], selecting["npu"])
    with pytest.raises(UsageError, match="no supported device"):
        fitting_kind(qnn, [], selecting["npu"])


def test_lack_of_memory_in_qnn_names_the_option_that_names_the_processor() -> None:
    """The hint is for this failure without the option; in other cases it would not help."""
    reason = "Failed to finalize QNN graph: QNN_COMMON_ERROR_MEM_ALLOC"
    qnn = EXECUTION_PROVIDERS["qnn"]
    hints = [
        missing_option_hint(ChosenProvider(qnn, "npu", options), text)
        for text, options in ((reason, {}), (reason, {"soc_model": "60"}), ("other", {}))
    ]
    assert [True, False, False] == ["--ep-options soc_model=" in (hint or "") for hint in hints]


def test_flags_beside_options_are_refused(perceptron: Path, tmp_path: Path) -> None:
    """No option is dropped silently."""
    with pytest.raises(UsageError, match="compile_model: embed "):
        compile_onnx(perceptron, tmp_path / "out.onnx", options=CompileOptions(ep="cpu"), embed=True)


def test_temporary_files_are_on_the_file_system_of_the_output(tmp_path: Path) -> None:
    """Temporary files can be moved into place, even if the folder of the output does not exist yet."""
    with temporary_folder(beside=tmp_path / "new" / "out.onnx") as folder:
        assert tmp_path == folder.parent
    assert [] == list(tmp_path.iterdir())


def test_file_of_a_part_in_a_branch_belongs_to_the_model(tmp_path: Path) -> None:
    """Parts are found in every subgraph; a foreign operator of the same name is no part."""
    part = 'EPContext <embed_mode = 0, ep_cache_context = "{}", source = "X"> (x)'
    ours = f"then_branch = t () => (float[3] a) {{ a = com.microsoft.{part.format('ours.bin')} }}"
    theirs = f"else_branch = e () => (float[3] b) {{ b = mine.{part.format('theirs.bin')} }}"
    model = parse(
        f"m (float[3] x, bool c) => (float[3] y) {{ y = If (c) <{ours}, {theirs}> }}",
        domains=', "com.microsoft" : 1, "mine" : 1',
    )
    ir.save(model, tmp_path / "model.onnx")
    assert ("ours.bin",) == context_file_names(model) == data_names(tmp_path / "model.onnx")


def test_file_of_a_compiled_part_belongs_to_the_model(tmp_path: Path) -> None:
    """The file is listed, reported if missing, copied with the model, and removed with it."""
    model = _context_model(tmp_path / "model.onnx", cache="model.onnx.0123456789ab.data")
    cache = tmp_path / "model.onnx.0123456789ab.data"
    assert ((cache,), (cache.name,)) == (external_files(model), replaceable_data(model))
    copied = place_copy(model, tmp_path / "copy.onnx")
    assert b"compiled" == copied[1].read_bytes()
    assert (copied[1].name,) == data_names(copied[0])
    cache.unlink()
    with pytest.raises(InputError, match="data file"):
        optimize_onnx(model, tmp_path / "out.onnx")


def test_embedded_part_names_no_file(tmp_path: Path) -> None:
    """The attribute holds the compiled content."""
    assert () == data_names(_context_model(tmp_path / "model.onnx", embed=1, cache="model.bin"))


def _compiled_for_qnn(folder: Path) -> Path:
    """Write a file compiled by QNN, with its task and without a tokenizer beside it."""
    path = _context_model(folder / "model.onnx")
    model = onnx.load(path)
    options = {"backend_type": "htp", "soc_model": "60"}
    compiled = {"provider": "QNNExecutionProvider", "device": "npu", "options": options}
    entries = {COMPILE_KEY: json.dumps(compiled), MODEL_KEY: json.dumps({"task": "feature-extraction"})}
    onnx.helper.set_model_props(model, entries)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("arguments", [("run", "--input", "x=[[1.0,2.0,3.0]]"), ("perf",), ("run", "--schema")])
def test_compiled_file_names_its_session_options(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """The options are those of the compilation; the default device needs none."""
    verb, *others = arguments
    outcome = run_here(verb, _compiled_for_qnn(tmp_path), *others)
    assert (0 if "--schema" in others else 1) == outcome.code
    assert "--ep qnn --ep-options soc_model=60" in outcome.out + outcome.err


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_example_command_passes_text_if_a_tokenizer_exists(has_tokenizer: bool, tmp_path: Path) -> None:
    """Without a tokenizer the command passes tensors by name, since a text could not be read."""
    path = tmp_path / "model.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> m (int64[1, 3] input_ids) => (int64[1, 3] y) {
            y = Identity (input_ids) }"""
    )
    onnx.helper.set_model_props(model, {MODEL_KEY: json.dumps({"task": "feature-extraction"})})
    onnx.save(model, path)
    if has_tokenizer:
        (tmp_path / "tokenizer.json").write_text("{}")
    example = json.loads(run_here("run", path, "--schema", "--format", "json").out)["example"]
    assert (has_tokenizer, not has_tokenizer) == ("--text" in example, "--input input_ids=@" in example)


def test_example_of_question_answering_needs_a_fast_tokenizer(tmp_path: Path) -> None:
    """The answer is a place in the text, which other tokenizers do not return."""
    path = tmp_path / "model.onnx"
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> m (int64[1, n] input_ids) => (int64[1, n] y) {
            y = Identity (input_ids) }"""
    )
    onnx.helper.set_model_props(model, {MODEL_KEY: json.dumps({"task": "question-answering"})})
    onnx.save(model, path)
    examples = []
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
        examples.append(json.loads(run_here("run", path, "--schema", "--format", "json").out)["example"])
    assert [False, True] == ["question=" in example for example in examples]


def test_example_command_does_not_generate_with_a_fixed_number_of_tokens(tmp_path: Path) -> None:
    """A text grows by one token a run."""
    (tmp_path / "tokenizer.json").write_text("{}")
    examples = {}
    for tokens in ("3", "n"):
        model = onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]> m (int64[1, {tokens}] input_ids) => (int64[1, {tokens}] y) {{
                y = Identity (input_ids) }}"""
        )
        onnx.helper.set_model_props(model, {MODEL_KEY: json.dumps({"task": "text-generation"})})
        onnx.save(model, tmp_path / "model.onnx")
        record = json.loads(run_here("run", tmp_path / "model.onnx", "--schema", "--format", "json").out)
        examples[tokens] = record["example"]
    assert "winml generate" in examples["n"]
    assert "winml generate" not in str(examples["3"])
