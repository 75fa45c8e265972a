"""Default outputs of verbs, and lists of their abilities."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.in_process import run_here
from winml.modelkit.optimize.capabilities import CAPABILITIES, LEVELS
from winml.modelkit.optimize.options import OptimizeOptions


def test_perf_output_contains_the_json(here: Path, small_file: Path) -> None:
    """The table goes to stdout all the same; an existing file is not replaced without ``--overwrite``."""
    measuring = ("perf", small_file, "--iterations", "3", "--shape-config", '{"sequence": 8}', "-o", "latency.json")
    measured = run_here(*measuring)
    assert 0 == measured.code, measured.err
    assert ["wrote", "latency.json"] in [line.split() for line in measured.out.splitlines()]
    record = json.loads((here / "latency.json").read_text(encoding="utf-8"))
    assert 3 == len(record["raw_samples_ms"])
    refused = run_here(*measuring)
    assert (2, "") == (refused.code, refused.out)
    assert "latency.json exists already" in refused.err
    again = run_here(*measuring, "--overwrite", "--by-module", "-f", "json")
    assert 0 == again.code, again.err
    assert json.loads(again.out) == json.loads((here / "latency.json").read_text(encoding="utf-8"))
    alone = run_here(*measuring, "--overwrite", "--module", "BertPooler")
    assert 0 == alone.code, alone.err
    assert "BertPooler" == json.loads((here / "latency.json").read_text(encoding="utf-8"))["instances"][0]["class"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("-o", "{file}", "--overwrite"), "the input"),
        (("--overwrite",), "--overwrite"),
        (("-o", "a.json", "--by-module", "--trace", "a.json"), "a.json"),
    ],
)
def test_perf_output_that_cannot_be_meant_is_refused(
    here: Path, small_file: Path, options: tuple[str, ...], words: str
) -> None:
    """The option is refused before a measurement, and nothing is written."""
    refused = run_here("perf", small_file, *(option.format(file=small_file) for option in options))
    assert (2, "") == (refused.code, refused.out)
    assert words in refused.err
    assert [] == list(here.iterdir())


def test_optimize_without_output_writes_beside_the_input(here: Path, small_file: Path) -> None:
    """The output is ``<stem>_opt.onnx``, which is not replaced without ``--overwrite``."""
    source = here / "folder" / "model.onnx"
    source.parent.mkdir()
    source.write_bytes(small_file.read_bytes())
    written = run_here("optimize", "-m", source)
    assert 0 == written.code, written.err
    assert {"model.onnx", "model_opt.onnx"} == {path.name for path in source.parent.iterdir()}
    refused = run_here("optimize", "-m", source)
    assert (2, "") == (refused.code, refused.out)
    assert "model_opt.onnx exists already" in refused.err
    assert 0 == run_here("optimize", "-m", source, "--overwrite").code


@pytest.mark.parametrize("ep", [None, "qnn"])
def test_optimize_list_shows_the_default_of_each_level(ep: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults are those of the optimizer for the execution provider."""
    provider = [] if ep is None else ["--ep", ep]
    rows = json.loads(run_here("optimize", "--list", "-f", "json", *provider).out)["capabilities"]
    for row in rows:
        expected = {
            level: OptimizeOptions(level=level, ep=ep).is_enabled(CAPABILITIES[row["name"]]) for level in LEVELS
        }
        assert expected == row["defaults"]
    assert any(row["defaults"]["full"] for row in rows)
    monkeypatch.setenv("COLUMNS", "300")
    table = run_here("optimize", "--list", *provider).out.splitlines()
    assert ["capability", "on", "basic", "extended", "full", "suits", "does"] == table[0].split()
    fusion = next(line.split() for line in table if line.startswith("bias_gelu_fusion"))
    assert ["off", "on", "on"] if ep is None else ["off"] * 3 == fusion[1:4]


def test_inspect_class_replaces_or_accompanies_a_model(small_bert: Path) -> None:
    """The class decides the task; a class of another architecture is refused with the nearest."""
    alone = json.loads(run_here("inspect", "--model-class", "BertForMaskedLM", "-f", "json").out)
    beside = json.loads(run_here("inspect", "-m", small_bert, "--model-class", "BertForMaskedLM", "-f", "json").out)
    for record in (alone["model"], beside["model"]):
        assert ("BertForMaskedLM", "fill-mask", "from --model-class") == (
            record["class"],
            record["task"],
            record["task_rule"],
        )
    auto = run_here("inspect", "-m", small_bert, "--model-class", "AutoModelForTokenClassification")
    assert "class       BertForTokenClassification" in auto.out
    for options, words in (
        (("--model-class", "BertForMaskedML"), "Did you mean 'BertForMaskedLM'?"),
        (("--model-class", "AutoModelForMaskedLM"), "Pass --model-type as well"),
        (("-m", small_bert, "--model-class", "T5Model"), "bert models have no such class"),
        (("-m", small_bert, "--model-class", "BertModel", "-t", "fill-mask"), "does not serve --task fill-mask"),
    ):
        refused = run_here("inspect", *options)
        assert (2, "") == (refused.code, refused.out)
        assert words in refused.err


def test_export_of_a_chosen_class_is_that_class(here: Path, small_bert: Path) -> None:
    """The option decides the loaded model, not only the displayed one."""
    exported = run_here(
        "export", "-m", small_bert, "--model-class", "BertForMaskedLM", "--random-weights", "-o", "m.onnx", "-f", "json"
    )
    assert 0 == exported.code, exported.err
    assert "BertForMaskedLM" == json.loads(exported.out)["model"]["class"]
    nets = Path(__file__).with_name("nets.py")
    refused = run_here("export", "-m", f"{nets}:good", "--model-class", "BertModel", "-o", "n.onnx")
    assert 2 == refused.code
    assert "--model-class BertModel" in refused.err


def test_list_tasks_without_a_model_lists_all() -> None:
    """Aliases are listed as well; an architecture has its own tasks only."""
    record = json.loads(run_here("inspect", "--list-tasks", "-f", "json").out)
    assert ["AutoModelForMaskedLM"] == record["tasks"]["fill-mask"]
    assert "token-classification" == record["aliases"]["ner"]
    assert {"summarization", "translation", "image-feature-extraction"} <= set(record["tasks"])
    assert "called ner" in run_here("inspect", "--list-tasks").out
    of_type = json.loads(run_here("inspect", "--list-tasks", "--model-type", "t5", "-f", "json").out)["tasks"]
    assert {"summarization", "translation"} <= set(of_type)
    assert "fill-mask" not in of_type
    of_class = json.loads(run_here("inspect", "--list-tasks", "--model-class", "T5Model", "-f", "json").out)["tasks"]
    assert of_type == of_class


def test_unmatched_selector_lists_the_classes(small_file: Path) -> None:
    """The most similar classes come first."""
    refused = run_here("inspect", small_file, "--module", "BertLayr")
    assert (2, "") == (refused.code, refused.out)
    assert "Nearest: BertLayer, " in refused.err
    assert "Classes: BertLayer, " in refused.err
    assert "Classes: BertModel, BertEmbeddings, " in run_here("extract", small_file, "--module", "zzz", "-o", "x").err


@pytest.mark.parametrize("verb", [("perf",), ("extract", "--module", "Block", "-o", "out")])
def test_folder_without_checkpoint_or_build_is_refused(here: Path, verb: tuple[str, ...]) -> None:
    """The message lists the accepted kinds of model."""
    (here / "models").mkdir()
    refused = run_here(*verb, "models")
    assert (2, "") == (refused.code, refused.out)
    assert "build_manifest.json" in refused.err
    assert "Pass an ONNX file, a build folder or a checkpoint folder." in refused.err
    for name in ("a.onnx", "b.onnx"):  # a single file would be used
        (here / "models" / name).write_bytes(b"")
    assert "a.onnx, b.onnx." in run_here(*verb, "models").err
