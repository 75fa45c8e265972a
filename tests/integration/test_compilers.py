"""Compilation by execution providers: compiled files, their runs and their outputs.

`make readers` installs the providers. QNN's plug-in compiles for its NPU and simulates it on x86-64; OpenVINO's takes
processors of Intel, and OpenVINO's own ONNX Runtime any.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from architecture.sources import REPOSITORY
from checkpoints import one_layer, save_checkpoint
from encoder_decoder import save_encoder_decoder
from generating import save_decoder, save_tokenizer
from graphs import parse
from readers import folder_of, python_of
from vision_language import save_vision_language
from weighted_graphs import CONVOLUTION, PERCEPTRON
from winml.modelkit.metadata_keys import COMPILE_KEY, COMPILE_TRACE_KEY, MODULES_KEY
from winml.modelkit.tags.tagging import NodeTag, write_tag

QNN = "qnn"
OPENVINO_PLUG_IN = "openvino-plug-in"
OPENVINO = "openvino-onnxruntime"


def winml(reader: str, *arguments: str | Path) -> tuple[int, Any, str]:
    """Run a command with a provider, or without one (``""``); return exit code, JSON output and messages."""
    folders, python = [str(REPOSITORY / "src")], sys.executable
    if reader == OPENVINO:
        python = str(python_of(reader))
    elif reader:
        folders.append(str(folder_of(reader)))
    done = subprocess.run(
        [python, "-m", "winml.modelkit", *map(str, arguments), "--format", "json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


def read_trace(path: Path) -> Any:
    """Return the trace of a compilation in the metadata of a file."""
    return json.loads({entry.key: entry.value for entry in onnx.load(path).metadata_props}[COMPILE_TRACE_KEY])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of tagged layers with weights."""
    path = tmp_path_factory.mktemp("source") / "model.onnx"
    ir.save(parse(CONVOLUTION.replace("N,", "1,").replace("y = Conv (x, w)", "c = Conv (x, w) y = Relu (c)")), path)
    return path


CHOSEN = """
import json, sys, onnxruntime, onnxruntime_qnn
onnxruntime.register_execution_provider_library("QNNExecutionProvider", onnxruntime_qnn.get_library_path())
options = onnxruntime.SessionOptions()
devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == "QNNExecutionProvider"]
options.add_provider_for_devices(devices[:1], {"backend_type": "htp", "soc_model": "60"})
package = onnxruntime.ModelPackageContext(sys.argv[1])
component = package.select_component("model", onnxruntime.ModelPackageOptions(options))
session = component.create_session(options)
print(json.dumps([component.get_selected_variant_name(), session.get_providers()]))
"""
"""The variant that ONNX Runtime chooses for the NPU."""


@pytest.mark.reader(QNN)
def test_variant_of_a_package_is_chosen_for_its_npu(model: Path, tmp_path: Path) -> None:
    """The compiled variant is opened by the provider that compiled it."""
    options = ("--variants", "cpu,qnn", "--ep-options", "soc_model=60", "--min-sqnr", "0")
    code, record, err = winml(QNN, "build", model, "-o", tmp_path / "package", "--layout", "package", *options)
    assert 0 == code, err
    assert ["cpu", "qnn"] == [variant["name"] for variant in record["variants"]]
    done = subprocess.run(
        [sys.executable, "-c", CHOSEN, str(tmp_path / "package")],
        env={**os.environ, "PYTHONPATH": str(folder_of(QNN))},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    variant, providers = json.loads(done.stdout.splitlines()[-1])
    assert ("qnn", "QNNExecutionProvider") == (variant, providers[0])


@pytest.mark.reader(QNN)
@pytest.mark.parametrize("embed", ["--embed", "--no-embed"])
def test_plug_in_compiles_for_its_npu_with_equal_outputs(model: Path, tmp_path: Path, embed: str) -> None:
    """Each compiled node lists its modules; the same plug-in opens, runs and measures the file."""
    output = tmp_path / "npu.onnx"
    code, record, err = winml(QNN, "compile", "-m", model, "-o", output, "--ep", "qnn", embed)
    assert 0 == code, err
    assert (True, 100.0) == (record["verification"]["is_verified"], record["coverage"]["percent"])
    written = onnx.load(output)
    nodes = [node for node in written.graph.node if node.op_type == "EPContext"]
    assert len(record["parts"]) == len(nodes) > 0
    modules = {node.name: {entry.key: entry.value for entry in node.metadata_props} for node in nodes}
    assert any(len(part["modules"]) > 1 for part in record["parts"])
    for part in record["parts"]:
        assert part["modules"] == json.loads(modules[part["name"]][MODULES_KEY])
    assert "npu" == json.loads({entry.key: entry.value for entry in written.metadata_props}[COMPILE_KEY])["device"]
    assert (embed == "--no-embed") == (len(record["files"]) > 1)
    code, timed, err = winml(
        QNN, "perf", "-m", output, "--ep", "qnn", "--iterations", "2", "--warmup", "0"
    )  # fmt: skip
    assert 0 == code, err
    assert timed


@pytest.mark.reader(QNN)
def test_build_for_an_npu_compiles_with_the_options_of_the_provider(model: Path, tmp_path: Path) -> None:
    """The config and the command line set the same option, and the command line wins."""
    built = tmp_path / "built"
    config = json.dumps({"compile": {"ep": "qnn", "ep_options": {"soc_model": "0"}}})
    asked = ("build", "-m", model, "-o", built, "-c", config, "--ep-options", "soc_model=60")
    code, record, err = winml(QNN, *asked)
    assert 0 == code, err
    stages = {stage["name"]: stage for stage in record["parts"][0]["stages"]}
    options = stages["compile"]["origin"]["options"]["compile"]
    assert ("run", {"soc_model": "60"}) == (stages["compile"]["status"], options["ep_options"])
    assert ["EPContext"] == [node.op_type for node in onnx.load(built / "model.onnx").graph.node]
    # A module of a compiled file does not run alone; the message names its source file.
    option = ("--module", "conv")
    code, _, err = winml(QNN, "perf", built / "model.onnx", *option)
    source = re.search(r"source file: (.*)\.$", err, re.MULTILINE)
    assert (2, True) == (code, source is not None), err
    assert source is not None
    code, measured, err = winml(QNN, "perf", source[1], *option, "--iterations", "2")
    assert 0 == code, err
    assert measured


@pytest.mark.reader(QNN)
def test_cycles_of_a_device_are_charged_to_modules(model: Path, tmp_path: Path) -> None:
    """The record has kilocycles in place of milliseconds, and the modules add up to the kernels."""
    asked = ("perf", model, "--ep", "qnn", "--ep-options", "soc_model=60", "--by-module", "--iterations", "3")
    code, record, err = winml(QNN, *asked)
    assert 0 == code, err
    times = record["by_module"]
    assert ("kcycles", 3) == (times["unit"], len(times["runs_kcycles"]))
    modules = list(_all_modules(times["tree"]))
    own = sum(module["self_kcycles"] for module in modules)
    assert times["kernel_kcycles"] == pytest.approx(own + times["unattributed_kcycles"])
    assert "Conv" in {operator for module in modules for operator in module["operators_kcycles"]}
    assert not [key for module in modules for key in module if key.endswith("_ms")]


@pytest.mark.reader(QNN)
def test_compiled_file_has_placement_and_cycles_of_its_modules(tmp_path: Path) -> None:
    """A model is cut in two by operators that QNN lacks: the reason is told by module, also without the source file."""
    body = """m (float[1, 8] x) => (float[1, 8] y)
        { a = Relu (x) b = Erf (a) c = Celu (b) d = Softmax (c) y = Relu (d) }"""
    model, outside = parse(body), {"Erf": "second", "Celu": "second"}
    for node in model.graph:
        module = outside.get(node.op_type, "first")
        write_tag(node, NodeTag(f"/Net/Half.{module}", module, "direct"))
    ir.save(model, tmp_path / "model.onnx")
    place = ("--ep", "qnn", "--ep-options", "soc_model=60")
    compiled = tmp_path / "npu.onnx"
    code, record, err = winml(QNN, "compile", "-m", tmp_path / "model.onnx", "-o", compiled, *place)
    assert 0 == code, err
    placement = {entry["module"]: entry for entry in record["modules"]}
    assert (2, 3, 3) == (len(record["parts"]), placement["first"]["nodes"], placement["first"]["on_device"])
    assert (2, 0) == (placement["second"]["nodes"], placement["second"]["on_device"])
    assert {f"Operators of type `{name}` are not supported by QNN EP": 1 for name in outside} == (
        placement["second"]["reasons"]
    )
    (note,) = (note for note in record["notes"] if "run on the CPU" in note)
    assert "2 of 5 nodes run on the CPU, not on the npu: second 1: Operators of type" in note
    asked = ("inspect", tmp_path / "model.onnx", *place)
    by_provider = winml(QNN, *asked)[1]["execution_provider"]
    (tmp_path / "model.onnx").unlink()
    code, inspected, err = winml(QNN, "inspect", compiled, *place)
    fit = inspected["execution_provider"]
    assert (3, "compilation", 5, 3) == (code, fit["basis"], fit["nodes"], fit["taken"]), err
    assert record["modules"] == fit["modules"] == by_provider["modules"]
    code, timed, err = winml(QNN, "perf", compiled, *place, "--by-module", "--iterations", "3")
    assert 0 == code, err
    assert record["modules"] == timed["by_module"]["placement"]
    cycles = {module["module"]: module["self_kcycles"] for module in _all_modules(timed["by_module"]["tree"])}
    assert cycles["first"] > 0.5 * timed["by_module"]["kernel_kcycles"] > 0
    assert any("--iterations 10" in note for note in timed["benchmark_info"]["notes"])


def _all_modules(tree: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for module in tree:
        yield module
        yield from _all_modules(module["children"])


@pytest.mark.reader(QNN)
def test_open_sizes_are_refused_by_a_provider_that_plans_its_memory(tmp_path: Path) -> None:
    """The message names the size and the command that fixes it."""
    ir.save(parse("m (float[N, 3] x) => (float[N, 3] y) { y = Relu (x) }"), tmp_path / "open.onnx")
    code, _, err = winml(
        QNN, "compile", "-m", tmp_path / "open.onnx", "-o", tmp_path / "npu.onnx", "--ep", "qnn"
    )  # fmt: skip
    assert (2, False) == (code, (tmp_path / "npu.onnx").exists())
    assert "N is" in err
    advised = re.search("first: (winml export .*?);", err)
    assert advised is not None
    fixed = str(tmp_path / "fixed.onnx")
    assert 0 == winml(QNN, *[word.replace("fixed.onnx", fixed) for word in shlex.split(advised[1])[1:]])[0]
    assert 0 == winml(QNN, "compile", "-m", fixed, "-o", tmp_path / "npu.onnx", "--ep", "qnn")[0]


@pytest.mark.reader(QNN)
def test_misspelled_option_of_a_provider_is_refused(model: Path, tmp_path: Path) -> None:
    """QNN itself ignores unknown options; the message suggests the nearest option name of its library."""
    output = tmp_path / "npu.onnx"
    misspelled = ("--ep", "qnn", "--ep-options", "soc_modl=60")
    code, _, err = winml(QNN, "compile", "-m", model, "-o", output, *misspelled)
    assert (2, False) == (code, output.exists())
    assert "soc_model" in err.replace("soc_modl", "")


@pytest.mark.reader(OPENVINO_PLUG_IN)
@pytest.mark.parametrize("embed", ["--embed", "--no-embed"])
def test_openvino_plug_in_opens_its_compiled_file(model: Path, tmp_path: Path, embed: str) -> None:
    """The package has the reader that onnxruntime-openvino lacks: one node, equal outputs, the list of modules."""
    output = tmp_path / "openvino.onnx"
    code, record, err = winml(OPENVINO_PLUG_IN, "compile", "-m", model, "-o", output, "--ep", "openvino", embed)
    if "supports Intel's processors only" in err:
        pytest.skip("no device of OpenVINO's plug-in: this is no processor of Intel")
    assert 0 == code, err
    assert (True, 100.0) == (record["verification"]["is_verified"], record["coverage"]["percent"])
    assert ["EPContext"] == [node.op_type for node in onnx.load(output).graph.node]
    assert ["conv", "relu"] == [name for part in record["parts"] for name in part["modules"]]
    code, _, err = winml(
        OPENVINO_PLUG_IN, "perf", "-m", output, "--ep", "openvino", "--iterations", "2", "--warmup", "0"
    )  # fmt: skip
    assert 0 == code, err


@pytest.mark.reader(OPENVINO)
def test_openvino_compiles_or_refuses_an_unreadable_file(model: Path, tmp_path: Path) -> None:
    """The exit code is 3, with the reason, if the package cannot read compiled parts; else outputs agree."""
    output = tmp_path / "openvino.onnx"
    arguments = ("compile", "-m", model, "-o", output, "--ep", "openvino")
    code, record, err = winml(OPENVINO, *arguments)
    program = (
        "import onnxruntime, pathlib; folder = pathlib.Path(onnxruntime.__file__).parent / 'capi'\n"
        "print(any(folder.glob('*openvino_ir_frontend*')))"
    )
    python = python_of(OPENVINO)
    has_reader = "True" in subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout
    if has_reader:
        assert 0 == code, err
        assert record["verification"]["is_verified"]
    else:
        assert (3, False) == (code, output.exists())
        assert "OpenVINO's" in err
    code, record, err = winml(OPENVINO, *arguments, "--no-verify", "--overwrite")
    assert 0 == code, err
    assert ("OpenVINOExecutionProvider", 100.0) == (record["compiled"]["provider"], record["coverage"]["percent"])
    assert record["parts"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with an integer range between them, quantized for the CPU; the float file lies beside it."""
    folder = tmp_path_factory.mktemp("quantized")
    ir.save(parse(PERCEPTRON.replace("N,", "1,")), folder / "float.onnx")
    options = ("--mode", "qdq", "--precision", "w8a16", "--no-verify")
    code, _, err = winml(QNN, "quantize", "-m", folder / "float.onnx", "-o", folder / "model.onnx", *options)
    assert 0 == code, err
    return folder / "model.onnx"


@pytest.mark.reader(QNN)
@pytest.mark.parametrize("precision", ["w8a8", "w8a16"])
def test_file_placed_for_an_npu_stays_one_part(quantized: Path, tmp_path: Path, precision: str) -> None:
    """There is one part; only conversions of inputs and outputs run outside, and the CPU expands no weight."""
    source, placed = quantized.with_name("float.onnx"), tmp_path / "placed.onnx"
    options = ("--mode", "qdq", "-p", precision, "--min-sqnr", "0", "--ep", "qnn")
    code, _, err = winml(QNN, "quantize", "-m", source, "-o", placed, *options)
    assert 0 == code, err
    place = ("--ep", "qnn", "--ep-options", "soc_model=60", "--max-parts", "1")
    code, record, err = winml(QNN, "compile", "-m", placed, "-o", tmp_path / "npu.onnx", *place)
    assert 0 == code, err
    assert 1 == len(record["parts"])
    assert {node["operator"] for node in record["outside"]} <= {"QuantizeLinear", "DequantizeLinear"}
    assert not any(node["expands_weight"] for node in record["outside"])


@pytest.mark.reader(QNN)
def test_tuning_for_a_simulated_npu_chooses_by_size_and_times_nothing(quantized: Path, tmp_path: Path) -> None:
    """The result says what the simulation judged; times of a simulated device mean nothing."""
    place = ("--ep", "qnn", "--ep-options", "soc_model=60", "--only", "qdq,float", "--min-sqnr", "30")
    code, record, err = winml(QNN, "tune", quantized.with_name("float.onnx"), "-o", tmp_path / "tuned", *place)
    assert 0 == code, err
    measured = {item["name"]: item for item in record["candidates"] if item["size_bytes"]}
    assert {"qdq-w8a8", "fp16"} <= set(measured)
    assert not any(item["latency_ms"] for item in measured.values())
    smallest = min(item["size_bytes"] for item in measured.values() if item["status"] in ("won", "right"))
    assert record["winner"]["size_bytes"] <= 1.01 * smallest
    assert any("simulated" in note for note in record["notes"])


@pytest.mark.reader(QNN)
@pytest.mark.parametrize("name", ["llama", "t5", "llava"])
def test_decoder_is_built_for_an_npu_and_generates_there(name: str, tmp_path: Path) -> None:
    """The decoder is quantized, compiled whole, and run token by token with a cache of a fixed length.

    The embedding of a vision-language model, with any number of tokens and images, stays on the CPU.
    """
    folder = tmp_path / name
    if name == "t5":
        save_encoder_decoder(folder, name)
    elif name == "llava":
        save_vision_language(folder)
    else:
        save_decoder(folder, name, **one_layer(name))
    place = ("--ep", "qnn", "--ep-options", "soc_model=60", "-p", "w8a16", "--min-sqnr", "0")
    shape = json.dumps({"past_sequence_length": 15})
    code, record, err = winml(QNN, "build", "-m", folder, "-o", tmp_path / "built", *place, "--shape-config", shape)
    assert 0 == code, err
    for part in record["parts"]:
        stage = next(stage for stage in part["stages"] if stage["name"] == "compile")
        if part["name"] == "embedding":
            assert "skipped" == stage["status"]
            continue
        assert "run" == stage["status"]
        path = tmp_path / "built" / ("model.onnx" if len(record["parts"]) == 1 else f"{part['name']}.onnx")
        operators = [node.op_type for node in onnx.load(path).graph.node]
        assert 1 == operators.count("EPContext")
        assert {*operators} <= {"EPContext", "QuantizeLinear", "DequantizeLinear", "Cast"}


@pytest.mark.reader(QNN)
def test_prompt_and_step_share_their_weights_in_one_file(tmp_path: Path) -> None:
    """Both models name one file, smaller than two; only a device opens it, and an unchanged build reuses it."""
    folder = save_decoder(tmp_path / "llama", "llama", **one_layer("llama"))
    quantized = ("-p", "w8a16", "--min-sqnr", "0", "--prompt-length", "4,8")
    place = ("--ep", "qnn", "--ep-options", "soc_model=60", *quantized)
    sizes = []
    for name, shared in (("alone", ()), ("shared", ("--share-weights",))):
        code, record, err = winml(QNN, "build", "-m", folder, "-o", tmp_path / name, *place, *shared)
        assert 0 == code, err
        assert ["prompt_4", "prompt_8", "decoder"] == [part["name"] for part in record["parts"]]
        sizes.append([file["size_bytes"] for file in record["deploy"] if file["name"].endswith(".data")])
    assert [3, 1] == [len(names) for names in sizes]
    assert sum(sizes[1]) < sum(sizes[0])
    for part in ("prompt_4.onnx", "prompt_8.onnx", "decoder.onnx"):
        alone, shared = (read_trace(tmp_path / name / part) for name in ("alone", "shared"))
        assert alone == shared, "each part keeps the trace of its own compilation"
    code, _, err = winml(QNN, "generate", tmp_path / "shared", *place[:4], "-p", "the king")
    assert 2 == code
    assert "--share-weights" in err
    again = (*place, "--share-weights", "--proof")
    code, record, err = winml(QNN, "build", "-m", folder, "-o", tmp_path / "shared", *again)
    assert 0 == code, err
    parts = json.loads((tmp_path / "shared/proof/proof.json").read_text(encoding="utf-8"))["parts"]
    assert ["export_prompt_4.onnx", "export_prompt_8.onnx", "export_decoder.onnx"] == [
        part["file"] for part in parts
    ], "no simulator opens them"
    stages = [stage for part in record["parts"] for stage in part["stages"] if stage["name"] == "compile"]
    assert ["reused"] * 3 == [stage["status"] for stage in stages], err


@pytest.mark.reader(QNN)
def test_compiled_file_is_judged_on_samples_of_the_processor(tmp_path: Path) -> None:
    """Samples are those of the quantization, of a processor in the build or beside the reference, or random."""
    checkpoint = save_checkpoint("bert", tmp_path / "checkpoint")
    save_tokenizer(checkpoint)
    (texts := tmp_path / "texts.csv").write_text("text\na b\nb c d\na\nc\nd e\n")
    place = ("--ep", "qnn", "--ep-options", "soc_model=60", "--min-sqnr", "-10")
    data = ("-p", "w8a16", "--dataset", texts)
    code, record, err = winml(QNN, "build", "-m", checkpoint, "-o", tmp_path / "built", *place, *data)
    assert 0 == code, err
    (stage,) = (item for item in record["parts"][0]["stages"] if item["name"] == "compile")
    assert "4 samples of texts.csv" in stage["summary"]
    files = {name: tmp_path / "built" / f"{name}.onnx" for name in ("quantized", "optimized")}
    (tmp_path / "alone").mkdir()
    alone = tmp_path / "alone" / "model.onnx"
    alone.write_bytes(files["quantized"].read_bytes())
    (tmp_path / "beside").mkdir()
    beside = tmp_path / "beside" / "model.onnx"
    for file in (files["quantized"], texts, *checkpoint.glob("*token*")):
        (beside if file.suffix == ".onnx" else beside.with_name(file.name)).write_bytes(file.read_bytes())
    for arguments, expected in (
        (("-m", files["quantized"]), "processor"),
        (("-m", files["quantized"], "--dataset", texts), "dataset"),
        (("-m", alone, "--reference", files["optimized"]), "processor"),
        (("-m", alone), "random"),
        (("-m", beside), "dataset"),
    ):
        code, record, err = winml(QNN, "compile", *arguments, "-o", tmp_path / "npu.onnx", *place, "--overwrite")
        assert 0 == code, err
        assert expected == record["verification"]["quality"]["samples"]["source"]
        assert ("random" == expected) == any("random values" in note for note in record["notes"])
        assert (expected == "dataset") != any("calibrated on texts.csv" in note for note in record["notes"])


@pytest.mark.reader(QNN)
def test_quantized_file_is_judged_beside_its_float_source(quantized: Path, tmp_path: Path) -> None:
    """The file names its float source, or a user does. Each outside node has module, type and reason."""
    compiling = ("compile", "-o", tmp_path / "npu.onnx", "--ep", "qnn", "--ep-options", "soc_model=60", "--overwrite")
    code, record, err = winml(QNN, *compiling, "-m", quantized)
    assert 0 == code, err
    source = record["verification"]["source"]
    assert ("float.onnx", "model.onnx") == (source["reference"], source["source"])
    (tmp_path / "alone.onnx").write_bytes(quantized.read_bytes())
    code, record, err = winml(QNN, *compiling, "-m", tmp_path / "alone.onnx")
    assert (0, False) == (code, "source" in record["verification"]), err
    assert any("--reference FLOAT.onnx" in note for note in record["notes"])
    reference = quantized.with_name("float.onnx")
    code, record, err = winml(QNN, *compiling, "-m", tmp_path / "alone.onnx", "--reference", reference)
    assert (0, "float.onnx") == (code, record["verification"]["source"]["reference"]), err
    left = [node for node in record["outside"] if node["expands_weight"]]
    assert all(node["tag"] and node["dtype"] and node["reason"] for node in left)
    assert bool(left) == any("winml quantize" in note and "--ep qnn" in note for note in record["notes"])


@pytest.mark.reader(QNN)
@pytest.mark.parametrize(
    ("options", "expected_code", "words"),
    [
        (("--min-sqnr", "150"), 3, "minimum is 150 dB"),
        (("--max-outside", "0"), 3, "--max-outside 0"),
        (("--reference", "absent.onnx"), 2, "absent.onnx: no such file"),
        (("--reference", "{other}"), 2, "not the source of model.onnx"),
        (("--reference", "{other}", "--no-verify"), 2, "effect with --no-verify"),
        (("--device", "gpu"), 2, "finds no gpu"),
    ],
)
def test_result_beyond_a_limit_or_without_its_reference_is_not_written(
    quantized: Path, model: Path, tmp_path: Path, options: tuple[str, ...], expected_code: int, words: str
) -> None:
    """A missed limit exits with 3, a wrong reference or device with 2."""
    output = tmp_path / "npu.onnx"
    asked = [option.format(other=model) for option in options]
    code, _, err = winml(
        QNN, "compile", "-m", quantized, "-o", output, "--ep", "qnn", "--ep-options", "soc_model=60", *asked
    )  # fmt: skip
    assert (expected_code, False) == (code, output.exists()), err
    assert words in err
    assert "cannot load" not in err


@pytest.mark.reader(QNN)
@pytest.mark.parametrize("name", ["qnn", "OtherExecutionProvider"])
def test_plug_in_is_named_by_its_library(model: Path, tmp_path: Path, name: str) -> None:
    """Compilation, inspection and measurement need the library only, not its package or support in winml."""
    library = next(folder_of(QNN).glob("onnxruntime_qnn/*onnxruntime_providers_qnn*"))
    place = ("--ep", name, "--ep-library", f"{name}={library}", "--ep-options", "soc_model=60")
    place = (*place, "--ep-options", "backend_type=htp")
    code, record, err = winml("", "inspect", model, *place)
    assert (0, "provider") == (code, record["execution_provider"]["basis"]), err
    code, record, err = winml("", "compare", model, model, *place)
    assert 0 == code, err
    assert f"{name}={library}" in shlex.split(record["next"])
    # QNN under another name compiles, but cannot read its compiled file.
    verified = () if name == "qnn" else ("--no-verify",)
    output = tmp_path / "npu.onnx"
    code, record, err = winml("", "compile", "-m", model, "-o", output, *place, *verified)
    assert (0, True) == (code, len(record["parts"]) > 0), err
    assert (name == "qnn") == (record["compiled"]["provider"] == "QNNExecutionProvider")
    code, _, err = winml("", "perf", output if name == "qnn" else model, *place, "--iterations", "2", "--warmup", "0")
    assert 0 == code, err


@pytest.mark.parametrize(
    ("library", "words"),
    [
        ("qnn", "'qnn': expected NAME=PATH"),
        ("qnn=absent.so", "absent.so is not a file"),
        ("cpu={model}", "the CPU provider is part of every ONNX Runtime"),
        ("qnn={model}", "cannot load model.onnx as the plug-in of QNNExecutionProvider"),
    ],
)
def test_invalid_library_is_refused(model: Path, tmp_path: Path, library: str, words: str) -> None:
    """The message names the library or the expected form, and no file is written."""
    named = library.format(model=model)
    code, _, err = winml("", "compile", "-m", model, "-o", tmp_path / "a.onnx", "--ep", "qnn", "--ep-library", named)
    assert code in (1, 2)
    assert words in err
    assert not (tmp_path / "a.onnx").exists()


@pytest.mark.reader(QNN)
def test_inspection_names_the_nodes_that_stay_outside_when_compiled(quantized: Path, tmp_path: Path) -> None:
    """Number and reasons equal those of compilation; the advice is a command on the float file beside it."""
    place = ("--ep", "qnn", "--ep-options", "soc_model=60")
    _, inspected, err = winml(QNN, "inspect", quantized, *place)
    code, compiled, err = winml(QNN, "compile", "-m", quantized, "-o", tmp_path / "npu.onnx", *place)
    assert 0 == code, err
    fit = inspected["execution_provider"]
    assert fit["nodes"] - fit["taken"] == len(compiled["outside"]) > 0
    reasons = {finding["reason"] for finding in fit["findings"]}
    assert {node["reason"] for node in compiled["outside"]} <= reasons
    assert any(f"winml quantize -m {quantized.with_name('float.onnx')}" in item["remedy"] for item in fit["findings"])


@pytest.mark.reader(QNN)
def test_source_that_accepts_no_generated_inputs_is_compiled_unchecked(tmp_path: Path) -> None:
    """Sizes of a Resize are no random values; the inspection attributes each unnamed node, and adds up."""
    text = """m (float[1, 3, 8, 8] x, int64[4] sizes) => (float[1, 3, oh, ow] y) {
        h = Relu (x)
        y = Resize (h, , , sizes)
    }"""
    ir.save(parse(text), tmp_path / "resize.onnx")
    code, record, err = winml(
        QNN, "compile", "-m", tmp_path / "resize.onnx", "-o", tmp_path / "npu.onnx", "--ep", "qnn"
    )  # fmt: skip
    assert 0 == code, err
    assert record["verification"] is None or not record["verification"].get("is_verified")
    assert any(note.startswith("Not checked") for note in record["notes"])
    _, inspected, err = winml(QNN, "inspect", tmp_path / "resize.onnx", "--ep", "qnn")
    modules = inspected["execution_provider"]["modules"]
    assert (2, 1) == tuple(sum(module[key] for module in modules) for key in ("nodes", "on_device")), err
    assert {"Resize"} == {finding["what"] for finding in inspected["execution_provider"]["findings"]}
