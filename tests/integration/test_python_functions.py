"""Functions of the commands: options as keywords, results as text, page and data frame."""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import winml.modelkit as winml
from e2e.in_process import run_here
from evaluation_checkpoints import save_task_checkpoint, text_tokenizer
from winml.modelkit.compile.verb import CompileRequest
from winml.modelkit.fields import fields_of
from winml.modelkit.optimize.verb import OptimizeRequest
from winml.modelkit.quantize.verb import QuantizeRequest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text classifier with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoints") / "classifier"
    labels = ("negative", "positive")
    save_task_checkpoint(folder, "bert", "BertForSequenceClassification", text_tokenizer(), labels=labels)
    return folder


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the classifier, beside its tokenizer."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    winml.export_model(checkpoint, path, sizes={"sequence_length": 16}, opset_version=18)
    return path


def test_export_takes_checkpoints_and_modules(exported: Path, tmp_path: Path) -> None:
    """Options of the export and of loading are keywords."""
    model = onnx.load(exported)
    assert 18 == next(item.version for item in model.opset_import if item.domain == "")
    assert [1, 16] == [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    result = winml.export_model(torch.nn.Linear(3, 4), tmp_path / "net.onnx", torch.ones(1, 3), opset_version=18)
    assert result.only_part.opset_produced == 18
    with pytest.raises(winml.UsageError, match=r"^task "):
        winml.export_model(torch.nn.Linear(3, 4), tmp_path / "other.onnx", torch.ones(1, 3), task="fill-mask")


@pytest.mark.parametrize("of_module", [True, False], ids=["module", "checkpoint"])
@pytest.mark.parametrize(
    ("keyword", "right"),
    [("dynamo", "exporter='dynamo'"), ("no_dynamo", "exporter='torchscript'"), ("opset", "'opset_version'")],
)
def test_export_names_the_keyword_of_an_unknown_one(
    checkpoint: Path, tmp_path: Path, keyword: str, right: str, *, of_module: bool
) -> None:
    """An unknown keyword is refused as unknown, of a module as well."""
    model = torch.nn.Linear(3, 4) if of_module else checkpoint
    with pytest.raises(winml.ConfigError, match=f"unknown key '{keyword}'; did you mean {right}"):
        winml.export_model(model, tmp_path / "net.onnx", torch.ones(1, 3) if of_module else None, **{keyword: 1})
    with pytest.raises(winml.ConfigError, match=r"known keys: .*exporter, .*opset_version, .*task"):
        winml.export_model(model, tmp_path / "net.onnx", cfg=1)


@pytest.mark.parametrize(
    ("transform", "keyword", "right"),
    [
        (winml.compile_model, "overwite", "overwrite"),
        (winml.optimize_model, "lvel", "level"),
        (winml.quantize_model, "ouput", "output"),
    ],
)
def test_transformations_know_their_arguments_and_their_options(transform: Any, keyword: str, right: str) -> None:
    """The nearest keyword is one of the function or an option."""
    with pytest.raises(
        winml.ConfigError, match=f"{transform.__name__}: unknown key '{keyword}'; did you mean '{right}'"
    ):
        transform("model.onnx", "out.onnx", **{keyword: 1})


@pytest.mark.parametrize(
    ("transform", "request_class"),
    [
        (winml.compile_model, CompileRequest),
        (winml.optimize_model, OptimizeRequest),
        (winml.quantize_model, QuantizeRequest),
    ],
)
def test_arguments_of_transformations_are_fields_of_their_request(transform: Any, request_class: type) -> None:
    """``file_request`` drops an argument without a field of its name; the defaults are equal as well."""
    defaults = {field.name: field.default or None for field in fields_of(request_class)}
    parameters = dict(inspect.signature(transform).parameters)
    for name in ("options", "on_step", "flags"):
        del parameters[name]
    assert parameters.keys() <= defaults.keys()
    stated = {name: entry.default or None for name, entry in parameters.items() if entry.default is not entry.empty}
    assert stated == {name: defaults[name] for name in stated}


def test_build_takes_the_options_of_the_command(checkpoint: Path, exported: Path, tmp_path: Path) -> None:
    """A checkpoint and a file are built by one function; options override the config."""
    built = winml.build_model(
        checkpoint, tmp_path / "built", config={"optim": {"level": "full"}}, level="basic", dynamic_batch=True,
        precision="int8", exclude=["BertLayer.0"], verify=False, with_companions=False,
    )  # fmt: skip
    record: Any = built.as_record()
    stages = {stage["name"]: stage["status"] for stage in record["parts"][0]["stages"]}
    assert {"export": "run", "optimize": "run", "quantize": "run", "compile": "skipped"} == stages
    assert not (tmp_path / "built" / "tokenizer.json").exists()
    assert onnx.load(built.model_path).graph.input[0].type.tensor_type.shape.dim[0].dim_param
    again = winml.build_model(exported, tmp_path / "again", level="basic", verify=False)
    assert again.model_path.is_file()


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("build_model", ("OUT",)),
        ("export_model", ("OUT.onnx",)),
        ("extract_modules", ("BertLayer.0", "OUT")),
        ("inspect_model", ()),
        ("profile_model", ()),
        ("run_model", ("A dog runs.",)),
    ],
)
def test_unknown_keyword_is_named_with_the_nearest(
    function: str, arguments: tuple[str, ...], checkpoint: Path, tmp_path: Path
) -> None:
    """A misspelled option has an effect in no function."""
    paths = [tmp_path / word if word.startswith("OUT") else word for word in arguments]
    with pytest.raises(winml.ConfigError, match=f"{function}: .*'revisoin'.*'revision'"):
        getattr(winml, function)(checkpoint, *paths, revisoin="main")
    assert not list(tmp_path.iterdir())


def test_profile_measures_what_the_options_state(exported: Path) -> None:
    """The kind of the result follows from the options."""
    whole = winml.profile_model(exported, iterations=3, baseline=str(exported))
    assert 3 == len(whole.latency.samples_ms)
    assert whole.baseline is not None
    times = winml.profile_model(exported, by_module=True, iterations=3)
    frame = times.to_frame()
    assert {"", "bert.encoder.layer.0"} <= {*frame["module"]}
    assert 1.0 == pytest.approx(frame["share"].iloc[0])
    one = winml.profile_model(exported, module="BertPooler", iterations=3)
    assert ["bert.pooler"] == [*one.to_frame()["module"]]
    with pytest.raises(winml.UsageError, match=r"^sizes: "):
        winml.profile_model(exported, sizes={"batch_size": 3}, batch_size=2)


@pytest.mark.parametrize("iterations", [0, -5])
def test_number_below_the_minimum_of_its_option_is_refused(exported: Path, iterations: int) -> None:
    """Keywords have the minima of the command's options."""
    with pytest.raises(winml.UsageError, match="iterations"):
        winml.profile_model(exported, iterations=iterations)


_PATHS = {"model": "m.onnx", "output": "o", "reference": "m.onnx", "candidate": "m.onnx", "before": "m.onnx"} | {
    "after": "m.onnx", "module": "Linear", "models": ["m.onnx"], "build": "built", "weights": "checkpoint",
}  # fmt: skip
_COMMAND_FUNCTIONS = sorted(
    name for name in {*winml.__all__} - winml._FORMER if name.endswith(("_model", "_models", "_modules"))
)


@pytest.mark.parametrize("name", [*_COMMAND_FUNCTIONS, "quantization_sensitivity"])
def test_argument_of_a_wrong_type_is_refused_with_the_expected_types(name: str) -> None:
    """Each positional argument is named, with the type of its value; a module is told from a file."""
    function = getattr(winml, name)
    positional = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = {p.name: _PATHS[p.name] for p in positional if p.default is p.empty}
    for parameter in positional:
        if "ExampleInputs" in str(parameter.annotation):
            continue  # of any type that a module takes
        with pytest.raises(winml.UsageError, match=rf"^{name}: {parameter.name} is of type int, expected "):
            function(**{**required, parameter.name: 3})
    if name not in ("export_model", "compare_models", "sweep_models"):
        with pytest.raises(winml.UsageError, match="type Linear, expected text or a path") as refused:
            function(**{**required, positional[0].name: torch.nn.Linear(1, 1)})
        assert refused.value.hint.startswith("Export the module")


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        ("profile_model", {"iterations": "many"}),
        ("profile_model", {"iterations": "20"}),
        ("profile_model", {"ep": 3}),
        ("build_model", {"output": "built", "level": 3}),
        ("build_model", {"output": "built", "exclude": "BertPooler"}),
        ("run_model", {"top": "all"}),
        ("quantize_model", {"output": "q.onnx", "exclude": "BertPooler"}),
        ("quantize_model", {"output": "q.onnx", "precision": 8}),
        ("export_model", {"output": "e.onnx", "opset_version": "17"}),
        ("evaluate_model", {"dataset": "reviews.csv", "samples": "all"}),
    ],
)
def test_keyword_of_a_wrong_type_is_refused_with_its_value(
    function: str, keywords: dict[str, Any], exported: Path
) -> None:
    """The hint states what to pass instead."""
    name, value = list(keywords.items())[-1]
    with pytest.raises(winml.ConfigError, match=rf"{name}: .*{value}") as refused:
        getattr(winml, function)(exported, **keywords)
    expected = {"exclude": "Pass a list: ['BertPooler'].", "opset_version": "Pass a number: 17."}.get(name, "")
    assert refused.value.hint.startswith(expected or ("Expected: ", "Pass a number: 20."))


def test_hint_names_the_function_of_a_command(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(winml.UsageError) as refused:
        winml.quantize_model(checkpoint, tmp_path / "int8.onnx")
    assert refused.value.hint.endswith(f"build_model('{checkpoint}', 'built')")


def test_two_models_are_measured_in_alternation(exported: Path) -> None:
    race = winml.profile_model(exported, exported, iterations=3)
    assert race.verdict == race.baseline.verdict(race.model)
    assert race.baseline.session_creation_ms > 0
    with pytest.raises(winml.UsageError, match="baseline"):
        winml.profile_model(exported, exported, baseline="pytorch")


def test_graph_runs_on_arrays(exported: Path) -> None:
    """Arrays, tensors and lists; whole numbers take the type of the input."""
    values = {"input_ids": np.ones((1, 16), np.int32), "attention_mask": torch.ones(1, 16, dtype=torch.int64)}
    answer = winml.run_model(exported, {**values, "token_type_ids": [[0] * 16]})
    assert "tensors" == answer.kind
    assert answer.entries == winml.run_model(exported, inputs={**values, "token_type_ids": [[0] * 16]}).entries
    with pytest.raises(winml.UsageError, match=r"'ids'.*input_ids"):
        winml.run_model(exported, {"ids": np.ones((1, 16))})
    with pytest.raises(winml.UsageError, match="rows of equal length"):
        winml.run_model(exported, {**values, "token_type_ids": [[0], [0, 0]]})


def test_target_of_the_task_is_searched_on_a_dataset(exported: Path, tmp_path: Path) -> None:
    """Modules are ranked on the dataset, too; a share of zero is reached by definition."""
    table = tmp_path / "reviews.csv"
    table.write_text("text,label\n" + "a dog runs,positive\nthe cat,negative\n" * 4)
    result = winml.quantization_sensitivity(
        exported, dataset=table, target="accuracy=0", depth=1, samples=8, iterations=1
    )
    assert ("dataset", 8, "reviews.csv") == (result.input_source, result.samples, result.data)
    assert result.exclude_list is not None
    assert "yes" == result.exclude_list.verdict.answer
    assert " --" not in result.text()  # options are spelled as keywords


def test_run_returns_the_answer(exported: Path, tmp_path: Path) -> None:
    """Texts are positional or named, tensors by name; PyTorch is the reference on request."""
    answer = winml.run_model(exported, "A dog runs.", top=1, reference=True)
    assert answer.entries == winml.run_model(exported, text="A dog runs.", top=1).entries
    assert answer.entries == winml.run_model(exported, ["A dog runs."], top=1).entries
    assert answer.reference is not None
    assert answer.reference.is_same
    for name in ("input_ids", "attention_mask", "token_type_ids"):
        np.save(tmp_path / f"{name}.npy", np.ones((1, 16), np.int64))
    inputs = {name: f"@{tmp_path / name}.npy" for name in ("input_ids", "attention_mask", "token_type_ids")}
    assert "tensors" == winml.run_model(exported, inputs=inputs).kind
    with pytest.raises(winml.UsageError, match="'image'"):
        winml.run_model(exported, "photo.jpg")


def test_file_without_a_proof_is_verified_against_a_named_checkpoint(exported: Path, checkpoint: Path) -> None:
    """Without a proof and a reference, it is refused, as by the command."""
    proof = winml.verify_model(exported, checkpoint)
    assert str(checkpoint) == str(proof.reference)
    assert proof.worst.fidelity.cosine == pytest.approx(1, abs=1e-5)
    with pytest.raises(winml.UsageError, match="has no proof"):
        winml.verify_model(exported)
    assert run_here("verify", exported).code == 2


def test_file_is_verified_against_a_live_module(tmp_path: Path) -> None:
    """The file states the inputs."""
    net, path = torch.nn.Sequential(torch.nn.Linear(3, 2)), tmp_path / "net.onnx"
    winml.export_model(net, path, torch.ones(1, 3))
    assert winml.verify_model(path, net).worst.fidelity.cosine == pytest.approx(1, abs=1e-5)


def test_inspect_describes_files_and_checkpoints(exported: Path, checkpoint: Path) -> None:
    """Options of loading are refused for a file, and a selector for a checkpoint."""
    file: Any = winml.inspect_model(exported, module="BertPooler")
    assert ["BertPooler"] == [module.class_name for module in file.modules]
    planned: Any = winml.inspect_model(checkpoint, sizes={"sequence_length": 8})
    assert (1, 8) == planned.inputs[0].shape
    with pytest.raises(winml.UsageError, match="'BertPooler'"):
        winml.inspect_model(checkpoint, module="BertPooler")
    with pytest.raises(winml.UsageError, match=r"^revision "):
        winml.inspect_model(exported, revision="main")


def test_inspect_checks_a_provider(exported: Path) -> None:
    """``ep`` is that of the command: the result and its text have the support of each node."""
    inspection: Any = winml.inspect_model(exported, ep="cpu")
    assert inspection.fit.runs_all
    assert inspection.as_record()["execution_provider"]["nodes"] == inspection.fit.nodes
    assert "CPUExecutionProvider" in inspection.text()
    with pytest.raises(winml.UsageError, match=r"^device requires"):
        winml.inspect_model(exported, device="npu")


def test_modules_are_extracted_and_tags_restored(exported: Path, tmp_path: Path) -> None:
    """Files are written as the commands write them."""
    parts = winml.extract_modules(exported, "BertPooler", tmp_path / "parts", with_inputs=True)
    assert 1 == len(parts.modules)
    assert 3 == len([*(tmp_path / "parts").glob("*.onnx"), *(tmp_path / "parts").glob("*.npz")])
    restored = winml.retag_model(exported, exported, tmp_path / "tagged.onnx")
    assert 100 == restored.coverage.percent
    with pytest.raises(winml.UsageError, match="exists"):
        winml.retag_model(exported, exported, tmp_path / "tagged.onnx")


def test_folder_is_quantized_as_a_whole(checkpoint: Path, tmp_path: Path) -> None:
    """A build folder is a model, and its files come along."""
    winml.build_model(checkpoint, tmp_path / "built", verify=False)
    winml.quantize_model(tmp_path / "built", tmp_path / "int8", verify=False)
    assert {"model.onnx", "tokenizer.json"} <= {path.name for path in (tmp_path / "int8").iterdir()}


@pytest.fixture(scope="module")
def results(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One result of each function that takes a second."""
    folder = tmp_path_factory.mktemp("results")
    makers: dict[str, Callable[[], Any]] = {
        "optimize_model": lambda: winml.optimize_model(exported, folder / "fast.onnx", level="full"),
        "quantize_model": lambda: winml.quantize_model(exported, folder / "int8.onnx", verify=False),
        "profile_model": lambda: winml.profile_model(exported, iterations=3),
        "by module": lambda: winml.profile_model(exported, by_module=True, iterations=3),
        "selected modules": lambda: winml.profile_model(exported, module="BertPooler", iterations=3),
        "compare_models": lambda: winml.compare_models(exported, folder / "int8.onnx", by_module=True),
        "diff_models": lambda: winml.diff_models(exported, folder / "fast.onnx"),
        "inspect_model": lambda: winml.inspect_model(exported),
        "run_model": lambda: winml.run_model(exported, "A dog runs."),
        "extract_modules": lambda: winml.extract_modules(exported, "BertPooler", folder / "parts"),
        "retag_model": lambda: winml.retag_model(exported, exported, folder / "tagged.onnx"),
        "quantization_sensitivity": lambda: winml.quantization_sensitivity(exported, samples=1, depth=3),
        "build_model": lambda: winml.build_model(exported, folder / "built", verify=False),
    }
    return {name: make() for name, make in makers.items()}


def test_text_of_a_result_is_short(results: dict[str, Any]) -> None:
    """The text is what the command prints, and its beginning the representation."""
    for name, result in results.items():
        lines = repr(result).splitlines()
        assert 1 <= len(lines) <= 13, name
        assert result.text().splitlines()[: min(len(lines), 12)] == lines[:12], name
        assert "object at 0x" not in repr(result)


def test_page_of_a_result_is_framed(results: dict[str, Any]) -> None:
    """A notebook shows the page of the report; its script does not reach the notebook."""
    for name, result in results.items():
        page = result._repr_html_()
        assert page.startswith('<iframe srcdoc="'), name
        assert page.count("<iframe") == 1
        assert "<script" not in page.replace("&lt;script", "")


def test_frame_of_a_result_has_its_rows(results: dict[str, Any]) -> None:
    """Each module, metric or entry is a row; a result of one file is one row."""
    rows = {name: len(result.to_frame()) for name, result in results.items()}
    assert 1 == rows["optimize_model"] == rows["profile_model"] == rows["retag_model"] == rows["selected modules"]
    assert rows["by module"] > 5
    assert rows["compare_models"] == len(results["compare_models"].modules)
    assert rows["quantize_model"] == len(results["quantize_model"].as_record()["modules"])
    assert rows["run_model"] == len(results["run_model"].entries)
    assert rows["build_model"] == len(results["build_model"].as_record()["parts"])


def test_frame_without_pandas_names_the_package(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is optional."""
    imported = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(winml.InputError, match="requires pandas") as caught:
        results["run_model"].to_frame()
    assert "pip install" in caught.value.hint


def test_rows_that_a_run_lacks_are_named(exported: Path) -> None:
    """A comparison of outputs alone has no modules."""
    with pytest.raises(winml.UsageError, match="modules"):
        winml.compare_models(exported, exported).to_frame()


def test_public_names_are_listed() -> None:
    """Classes of tasks are listed, former names are not; both can be imported."""
    listed = dir(winml)
    assert {"WinMLModelForCausalLM", "export_model", "profile_model"} <= {*listed}
    assert [] == [name for name in listed if not hasattr(winml, name)]
    assert not {"quantize_onnx", "build_hf_model", "importlib", "TYPE_CHECKING"} & {*listed}
    assert winml.quantize_onnx is winml.quantize_model
