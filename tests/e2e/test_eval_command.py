"""``winml eval``: every format, limits, and refusals."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from adapters import save_adapter
from e2e.in_process import run_here
from evaluation_checkpoints import (
    export_open,
    pipeline_of,
    save_images,
    save_task_checkpoint,
    sentences,
    text_tokenizer,
)
from winml.modelkit import evaluate_model
from winml.modelkit.builds.build_model import build_hf_model
from winml.modelkit.cli import _progress
from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate import evaluation as scoring
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.file_names import EVALUATION_NAME
from winml.modelkit.metadata_keys import MODEL_KEY
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.variant_evaluation import variant_evaluator
from winml.modelkit.samples.preprocessing import Preprocessor
from winml.modelkit.tune.contestants import Contestants
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.quality_limits import QualityLimits
from winml.modelkit.tune.records import Candidate, CandidateFacts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text classifier, its export with dynamic sizes, and texts labelled by its pipeline."""
    root = tmp_path_factory.mktemp("judged")
    tokenizer = text_tokenizer()
    model = save_task_checkpoint(
        root / "model", "bert", "BertForSequenceClassification", tokenizer, labels=["bad", "good"]
    )
    export_open(model, "text-classification")
    texts = sentences(40)
    answers = [item["label"] for item in pipeline_of(model, "text-classification")(texts)]
    wrong = ["bad" if number < 4 else answer for number, answer in enumerate(answers)]
    datasets.Dataset.from_dict({"review": texts, "label": answers, "wrong": wrong}).to_csv(root / "texts.csv")
    return root


@pytest.fixture(autouse=True)
def _enter_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


MODEL = "model/onnx/model.onnx"


def test_evaluation_is_equal_in_terminal_file_and_python(tmp_path: Path) -> None:
    output, page = tmp_path / "eval.json", tmp_path / "eval.html"
    done = run_here("eval", MODEL, "--dataset", "texts.csv", "--batch-size", "3", "-o", output, "--report", page)
    record = json.loads(output.read_text(encoding="utf-8"))
    result = evaluate_model(MODEL, "texts.csv", batch_size=3)

    assert done.code == 0
    assert "100 %" in done.out
    assert '<a href="eval.json">' in page.read_text(encoding="utf-8")
    assert record["schema_version"] == 1
    assert record["dataset"] == {
        "name": "texts.csv",
        "split": "train",
        "columns": {"text": "review", "label": "label"},
        "samples": 40,
        "unreadable": [],
    }
    assert [metric["name"] for metric in record["metrics"]] == ["accuracy", "f1", "precision", "recall", "matthews"]
    assert record["metrics"] == result.as_record()["metrics"]
    assert record["metrics"][0]["value"] == record["metrics"][0]["baseline"]["value"] == 1
    assert record["model"]["latency_per_sample_ms"]["p50"] > 0
    assert 37 == record["model"]["timed_samples"]
    # A time that other load made too long is not shown.
    assert ("ms per sample" in done.out) != ("the machine seems busy" in done.out)
    assert record["baseline"]["kind"] == "pytorch"


def test_confusion_and_changed_samples_are_recorded(folder: Path) -> None:
    """Labels of four samples are wrong; a baseline of negated weights predicts the other class for every sample."""
    if not (other := folder / "other").exists():
        shutil.copytree(folder / "model", other)
        model = AutoModelForSequenceClassification.from_pretrained(other)
        with torch.no_grad():
            for parameter in model.classifier.parameters():
                parameter.neg_()
        model.save_pretrained(other)
    result = evaluate_model(MODEL, "texts.csv", baseline="other", columns={"label": "wrong"}).as_record()
    confusion, changed = result["confusion"], result["agreement"]["changed_samples"]
    missed = round(40 * (1 - result["metrics"][0]["value"]))
    assert (["bad", "good"], 0, 40) == (confusion["classes"], confusion["folded"], sum(map(sum, confusion["model"])))
    assert missed == confusion["model"][0][1] + confusion["model"][1][0]
    assert confusion["model"] == [row[::-1] for row in confusion["baseline"]]
    assert 40 == len(changed)
    assert ["now wrong"] * missed == [sample["effect"] for sample in changed[:missed]]
    assert all(sample["model"] != sample["baseline"] and sample["text"] for sample in changed)


def test_evaluation_leads_to_modules_or_latency(folder: Path) -> None:
    """A missed limit leads to the comparison by module on the same data; the printed command runs."""
    other = folder / "flipped.onnx"
    model = onnx.load(folder / MODEL)
    (logits,) = model.graph.output
    node = next(node for node in model.graph.node if logits.name in node.output)
    node.output[:] = ["flipped"]
    model.graph.node.append(onnx.helper.make_node("Neg", ["flipped"], [logits.name]))
    onnx.save(model, other)
    asked = ("--dataset", "texts.csv", "--baseline", MODEL, "--samples", "8", "--format", "json")
    met, missed = (run_here("eval", name, *asked, "--min", "accuracy=0.9") for name in (MODEL, other.name))
    assert (0, 3) == (met.code, missed.code), missed.err
    assert f"winml perf {MODEL} {MODEL}" == json.loads(met.out)["next"]
    following = json.loads(missed.out)["next"]
    assert f"winml compare {MODEL} flipped.onnx --by-module --dataset texts.csv" == following
    assert 0 == run_here(*following.split()[1:]).code


@pytest.mark.parametrize(("milliseconds", "is_busy"), [([1, 3, 3, 3], True), ([2], False)])
def test_times_of_a_busy_machine_are_marked_as_disturbed(
    monkeypatch: pytest.MonkeyPatch, milliseconds: Sequence[int], is_busy: bool
) -> None:
    """The clock shows runs of equally long texts that take longer than the fastest one."""
    spans = itertools.chain.from_iterable((0.0, span / 1000) for span in itertools.cycle(milliseconds))
    monkeypatch.setattr(scoring, "time", SimpleNamespace(perf_counter=itertools.accumulate(spans).__next__))
    result = evaluate_model(MODEL, "texts.csv", batch_size=1, baseline="none")
    assert is_busy == result.as_record()["model"]["is_disturbed"]
    assert is_busy == any("busy" in note for note in result.notes)


def test_progress_is_printed_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines with the number of measured samples are printed now and then; ``--quiet`` prints none."""
    monkeypatch.setattr(_progress, "LINE_S", 0.0)
    asked = ("eval", MODEL, "--dataset", "texts.csv", "--baseline", "none", "--batch-size", "1")
    told = [line for line in run_here(*asked).err.splitlines() if line.startswith("measuring")]
    assert [15, 31, 39, 40] == [int(line.split()[1]) for line in told]
    assert "measuring" not in run_here(*asked, "--quiet").err


def test_missed_limits_exit_with_3(folder: Path) -> None:
    asked = ("eval", MODEL, "--dataset", "texts.csv", "--columns", "label=wrong", "--baseline", MODEL, "-f", "json")
    met = run_here(
        *asked,
        "--min",
        "accuracy=0.5",
        "--max-drop",
        "f1=0",
        "--max-drop",
        "accuracy=5%",
        "--min",
        "agreement=1",
        "--metric",
        "recall",
    )
    missed = run_here(*asked, "--min", "accuracy=0.99", "--samples", "30", "--seed", "1")

    assert (met.code, missed.code) == (0, 3)
    assert [metric["name"] for metric in json.loads(met.out)["metrics"]] == ["accuracy", "f1", "recall"]
    assert json.loads(met.out)["agreement"]["share"] == 1
    accuracy = json.loads(met.out)["metrics"][0]["baseline"]["value"]
    drops = {limit["metric"]: limit["limit"] for limit in json.loads(met.out)["limits"] if limit["kind"] == "max_drop"}
    assert drops == {"f1": 0, "accuracy": pytest.approx(accuracy / 20)}
    assert [limit["is_met"] for limit in json.loads(missed.out)["limits"]] == [False]
    assert json.loads(missed.out)["dataset"]["samples"] == 30


def test_data_that_cannot_resolve_a_limit_is_undecided() -> None:
    """Predictions are equal on all 40 samples, which bounds a drop by 3/40; the measured value determines the code."""
    asked = ("eval", MODEL, "--dataset", "texts.csv", "--baseline", MODEL, "--metric", "accuracy", "-f", "json", "-q")
    few, enough = (run_here(*asked, "--max-drop", f"accuracy={drop}") for drop in (0.01, 0.1))
    record = json.loads(few.out)
    assert (few.code, enough.code) == (0, 0)
    assert (record["verdict"]["answer"], record["is_good_enough"]) == ("undecided", True)
    assert "about 300 samples" == record["verdict"]["decided_by"]
    assert [-0.075, 0.075] == record["metrics"][0]["difference"]["interval"]
    assert "yes" == json.loads(enough.out)["verdict"]["answer"]


def test_limits_that_cannot_be_are_refused_before_a_model_is_loaded() -> None:
    """``--dry-run`` refuses them, too: the task is in the file, and a drop needs a baseline."""
    asked = ("eval", MODEL, "--dataset", "texts.csv", "--dry-run")
    assert 0 == run_here(*asked, "--min", "accuracy=0.9").code
    for limit in (("--min", "acuracy=0.9"), ("--min", "accuracy=90"), ("--max-drop", "f1=0.1", "--baseline", "none")):
        assert 2 == run_here(*asked, *limit).code


def test_checkpoint_is_evaluated_without_a_file() -> None:
    done = run_here("eval", "-m", "model", "--dataset", "texts.csv", "--metric", "accuracy", "-f", "json")
    record = json.loads(done.out)

    assert (record["model"]["kind"], record["baseline"]) == ("pytorch", None)
    assert record["metrics"][0]["value"] == 1
    for options in (("--threads", "1"), ("--baseline", "pytorch")):
        assert run_here("eval", "-m", "model", "--dataset", "texts.csv", *options, "-q").code == 2


def test_adapter_of_a_checkpoint_is_merged(tmp_path: Path) -> None:
    """An adapter that negates the classifier makes every output wrong.

    A named adapter is refused, as no graph has it.
    """
    model = AutoModelForSequenceClassification.from_pretrained("model")
    turned = {f"base_model.model.classifier.{name}": -value for name, value in model.classifier.state_dict().items()}
    adapter = save_adapter(tmp_path / "adapter", model, ("query",), seed=0, alpha=1e-6, extra=turned)
    options = ("eval", "-m", "model", "--dataset", "texts.csv", "--metric", "accuracy", "-f", "json")

    record = json.loads(run_here(*options, "--adapter", str(adapter)).out)
    assert record["metrics"][0]["value"] == 0
    assert run_here(*options, "--adapter", f"turned={adapter}").code == 2


def test_checkpoint_in_the_hub_cache_is_the_baseline(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline has the revision in the file; a path is no revision, and no code of the checkpoint runs."""
    repository = tmp_path / "cache" / "models--owner--tiny"
    snapshot = repository / "snapshots" / ("a" * 40)
    shutil.copytree(folder / "model", snapshot, ignore=shutil.ignore_patterns("onnx"))
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "built" / "model.onnx"
    shutil.copytree(folder / "model" / "onnx", model.parent)
    changed = onnx.load(model)

    def judged(**record: object) -> dict[str, Any]:
        entry = next(entry for entry in changed.metadata_props if entry.key == MODEL_KEY)
        entry.value = json.dumps({**json.loads(entry.value), **record})
        onnx.save(changed, model)
        done = run_here("eval", model, "--dataset", "texts.csv", "-f", "json", "-q")
        assert done.code == 0, done.err
        return json.loads(done.out)  # type: ignore[no-any-return]

    record = judged(name_or_path="owner/tiny", revision="v1")
    assert record["baseline"]["name"] == "pytorch (owner/tiny)"
    assert record["metrics"][0]["baseline"]["value"] == 1
    assert judged(revision=f"{repository / 'refs' / 'v1'}")["baseline"] is None
    config = json.loads((snapshot / "config.json").read_text())
    own = {"auto_map": {"AutoModelForSequenceClassification": "code.OwnModel"}, "architectures": ["OwnModel"]}
    (snapshot / "config.json").write_text(json.dumps({**config, **own}))
    record = judged(revision="v1")
    assert record["baseline"] is None
    assert any("needs custom code" in note for note in record["notes"])
    assert judged(revision="v2")["baseline"] is None


def test_build_stores_its_evaluation(folder: Path, tmp_path: Path) -> None:
    """``eval.json`` belongs to the build.

    A build without a section ``eval`` removes it, and a missed limit exits with 3.
    """
    section = {"dataset": str(folder / "texts.csv"), "samples": 20, "min": {"accuracy": 0.9}}
    config = {"export": {"dynamic_sequence": True, "verify": False}, "optim": None, "eval": section}

    result = build_hf_model(folder / "model", tmp_path / "b", config=config)
    record = json.loads((tmp_path / "b" / EVALUATION_NAME).read_text(encoding="utf-8"))
    hard = {**section, "baseline": "none", "columns": {"label": "wrong"}, "samples": 40, "min": {"f1": 1}}
    missed = json.dumps({**config, "eval": hard})
    again = run_here("build", "-m", folder / "model", "-o", tmp_path / "b", "-c", missed)
    build_hf_model(folder / "model", tmp_path / "b", config={**config, "eval": None})

    assert again.code == 3
    assert "f1 0." in again.out
    for wrong, problem in (
        ({"metrics": ["wer"]}, "eval.metrics wer: not a metric of text-classification"),
        ({"baseline": "none", "max_drop": {"f1": 0.1}}, "eval.baseline"),
        ({"min": {"accuracy": 90}}, "eval.min accuracy=90: expected at most 1"),
    ):
        asked = {"loader": {"task": "text-classification"}, "eval": {**section, **wrong}}
        (tmp_path / "c.json").write_text(json.dumps(asked), encoding="utf-8")
        checked = run_here("config", "--check", tmp_path / "c.json")
        assert checked.code == 2
        assert problem in checked.err
    unknown = json.dumps({"eval": {**section, "max_drop": {"accurracy": 0.1}}})
    assert run_here("build", "-m", folder / "model", "-o", tmp_path / "none", "-c", unknown).code == 2
    assert not (tmp_path / "none").exists()
    assert result.evaluation is not None
    assert result.evaluation.is_good_enough
    assert result.as_record()["evaluation"] == record
    assert record["dataset"]["samples"] == 20
    assert record["baseline"]["name"] == f"pytorch ({folder / 'model'})"
    assert not (tmp_path / "b" / EVALUATION_NAME).exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--metric", "wer"), "--metric wer"),
        (("--min", "accuracy"), "--min 'accuracy':"),
        (("--max", "accuracy=0.5"), "--max accuracy=0.5:"),
        (("--baseline", "none", "--max-drop", "f1=0.1"), "--max-drop f1=0.1"),
        (("--task", "text-classification", "--min", "accuracy=90"), "--min accuracy=90:"),
        (("--max-drop", "f1=-0.01"), "--max-drop f1=-0.01:"),
        (("--max-drop", "f1=%"), "--max-drop 'f1=%':"),
        (("--baseline", "nowhere.onnx"), "nowhere.onnx:"),
        (("--columns", "label=stars"), "'stars'"),
        (("--task", "token-classification"), "review, label"),
        (("--columns", "text=wrong,label=review"), "column review"),
        (("--split", "test"), "'test'"),
        (("--samples", "41"), "40 samples"),
        (("--task", "depth-estimation"), "task depth-estimation"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wrong_request_is_refused(arguments: tuple[str, ...], problem: str) -> None:
    done = run_here("eval", MODEL, "--dataset", "texts.csv", *arguments, "-q")

    assert done.code == 2
    assert problem in done.err


def test_baseline_of_other_labels_or_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    """The baseline shares the tokenizer and the labels of the model, so that both must be equal."""
    turned = tmp_path / "turned"
    shutil.copytree(folder / "model", turned, ignore=shutil.ignore_patterns("onnx"))
    config = json.loads((turned / "config.json").read_text(encoding="utf-8"))
    original = config["id2label"]
    config["id2label"] = {"0": "good", "1": "bad"}
    (turned / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UsageError, match=r"0 good, 1 bad.*0 bad, 1 good"):
        evaluate_model(MODEL, "texts.csv", baseline=str(turned))

    config["id2label"] = original
    (turned / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokens = json.loads((turned / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (turned / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(UsageError, match="2 of them"):
        evaluate_model(MODEL, "texts.csv", baseline=str(turned))


def test_torch_threads_are_restored_and_duplicate_options_are_refused() -> None:
    """The number of threads applies to the evaluation only; ``options`` and its fields cannot be combined."""
    before = torch.get_num_threads()
    evaluate_model(MODEL, "texts.csv", threads=before + 1, samples=2, metrics=["accuracy"])
    assert before == torch.get_num_threads()
    with pytest.raises(UsageError, match="options= and samples"):
        evaluate_model(MODEL, options=EvaluationOptions(dataset="texts.csv"), samples=2)


def test_judge_of_forms_reads_samples_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first variant creates the arrays; the request lists every file of a folder by its path."""
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        shutil.copy("texts.csv", tmp_path / "data" / name / "texts.csv")
    options = EvaluationOptions(dataset=str(tmp_path / "data"), samples=4)
    with variant_evaluator(Path(MODEL), options, ("accuracy", 0.5)) as judge:
        assert ["a/texts.csv", "b/texts.csv"] == sorted(judge.request["content"])
        first = judge.scores(Session(MODEL))
        monkeypatch.delattr(Preprocessor, "_process_samples")
        assert first == judge.scores(Session(MODEL))
        assert first["accuracy"] > 0.5


def test_tuning_judges_candidates_by_the_drop_of_a_metric(tmp_path: Path) -> None:
    """A file with opposite outputs loses the whole accuracy, and a file without a score is wrong as well."""
    shutil.copytree("model", tmp_path / "model")
    wrong = onnx.load(tmp_path / MODEL)
    (maker,) = (node for node in wrong.graph.node if wrong.graph.output[0].name in node.output)
    maker.output[0] = "opposite"
    wrong.graph.node.append(onnx.helper.make_node("Neg", ["opposite"], [wrong.graph.output[0].name]))
    onnx.save(wrong, tmp_path / MODEL)
    options = TuneOptions(max_drop={"accuracy": 0.01}, dataset="texts.csv", samples=24)
    share = TuneOptions(max_drop={"accuracy": "1%"}, dataset="texts.csv", samples=24)
    judge = QualityLimits(options, tmp_path, MODEL, Contestants(tmp_path), None)
    form, facts = Candidate("form", "dynamic", ""), CandidateFacts(1, 1.0, 1, 1, 1, 1.0, 5.0, "logits")

    plain = judge.with_scores(facts, form, Path(MODEL), None)
    lost = judge.with_scores(facts, form, tmp_path / MODEL, plain)

    assert ({"accuracy": 1.0}, {"accuracy": 0.0}) == (plain.scores, plain.drops)
    assert ({"accuracy": 0.0}, {"accuracy": 1.0}) == (lost.scores, lost.drops)
    assert "" == judge.reason_wrong(form, plain)
    for judged, numbers in ((lost, ["1.0000", "0.01"]), (facts, ["0.01"])):
        reason = judge.reason_wrong(form, judged)
        assert ("accuracy", numbers) == (reason.split()[0], re.findall(r"[\d.]+", reason))
    shares = QualityLimits(share, tmp_path, MODEL, Contestants(tmp_path), None)
    near = replace(lost, scores={"accuracy": 0.991}, drops={"accuracy": 0.009})
    assert [True, False, False] == [bool(shares.reason_wrong(form, item)) for item in (lost, near, plain)]


def test_empty_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("text,label\n")

    assert run_here("eval", MODEL, "--dataset", tmp_path / "empty.csv", "-q").code == 2


def test_fixed_batch_takes_no_other(folder: Path, tmp_path: Path) -> None:
    exported = run_here("export", "-m", "model", "-o", tmp_path / "fixed.onnx", "--no-verify", "-q")
    refused = run_here("eval", tmp_path / "fixed.onnx", "--dataset", "texts.csv", "--batch-size", "4", "-q")
    done = run_here("eval", tmp_path / "fixed.onnx", "--dataset", "texts.csv", "--baseline", "none", "-f", "json", "-q")

    beside = run_here(
        "eval", MODEL, "--dataset", "texts.csv", "--baseline", tmp_path / "fixed.onnx", "-f", "json", "-q"
    )

    assert exported.code == 0
    assert "--batch-size 4" in refused.err
    assert json.loads(done.out)["metrics"][0]["value"] == 1
    assert json.loads(beside.out)["batch_size"] == 1
    assert json.loads(beside.out)["agreement"]["share"] == 1


def test_pictures_that_do_not_open_are_counted_and_named(tmp_path: Path) -> None:
    import transformers

    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    model = save_task_checkpoint(
        tmp_path / "m", "vit", "ViTForImageClassification", processor, labels=["dark", "light"]
    )
    pictures = {f"{name}/{number}.png": np.full((9, 9, 3), shade + number, np.uint8)
                for name, shade in (("dark", 10), ("light", 200)) for number in range(3)}  # fmt: skip
    save_images(tmp_path / "pictures", pictures)
    (tmp_path / "pictures" / "dark" / "1.png").write_bytes(b"no picture")

    result = evaluate_model(model, tmp_path / "pictures", metrics=["accuracy"])

    assert result.data.samples == 5
    assert [name for name, _ in result.data.unreadable] == ["dark/1.png"]
    assert any("1 of 6 samples" in note for note in result.notes)
    assert not result.is_timed, "five samples are too few"


def test_modules_stay_in_float_until_a_metric_is_reached(tmp_path: Path) -> None:
    """The list is searched by the accuracy on the samples, and each tried variant is evaluated by it."""
    rules, output = tmp_path / "rules.json", tmp_path / "answer.json"
    asked = ("quantize", "-m", MODEL, "--sensitivity", "--precision", "int4", "--depth", "3", "--samples", "24", "-q")
    sizes = ("--shape-config", '{"sequence": 32}')
    done = run_here(
        *asked, *sizes, "--target", "accuracy=0.93", "--dataset", "texts.csv", "--exclude-list", rules, "-o", output,
        "--report", tmp_path / "page.html",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "accuracy" in (tmp_path / "page.html").read_text(encoding="utf-8")
    found = json.loads(output.read_text(encoding="utf-8"))["exclude_list"]

    assert found["target"] == {"metric": "accuracy", "value": 0.93}
    assert found["scores"]["accuracy"] >= 0.93
    assert all(trial["is_met"] == (trial["scores"]["accuracy"] >= 0.93) for trial in found["trials"])
    assert json.loads(rules.read_text(encoding="utf-8")) == found["rules"]
    wrong = ("--columns", "label=wrong", "--dataset", "texts.csv", "--samples", "40", "--target", "accuracy=0.99")
    unmet = run_here(*asked[:4], "--precision", "int8", "--depth", "1", *wrong, *sizes, "-q")
    assert unmet.code == 3, unmet.err
    assert "--target accuracy=0.99" in unmet.err
    for arguments, problem in (
        (("--target", "wer=0.1", "--dataset", "texts.csv"), "--target wer: not a metric of text-classification"),
        (("--target", "accuracy=0.9"), "no metric is named 'accuracy'"),
        (("--target", "accuracy=0.9", "--dataset", "texts.csv", "-o", "texts.csv", "--overwrite"), "texts.csv"),
    ):
        refused = run_here(*asked, *arguments)
        assert refused.code == 2
        assert problem in refused.err


def test_plan_writes_nothing_and_lists_the_result_file(tmp_path: Path) -> None:
    """The model and the data set are read; the only listed file is that of the result."""
    output = tmp_path / "eval.json"
    arguments = ("eval", MODEL, "--dataset", "texts.csv", "--baseline", "none", "-o", output)
    planned = run_here(*arguments, "--dry-run", "-f", "json")
    assert (0, False) == (planned.code, output.exists())
    plan = json.loads(planned.out)
    assert [{"path": str(output), "replaces": False, "only_if": None}] == plan["writes"]
    assert {MODEL, "texts.csv"} <= {*plan["reads"]}
    assert ["evaluating", "writing"] == [step["name"] for step in plan["steps"]]
    assert 0 == run_here(*arguments).code
    assert [2, 2] == [run_here(*arguments, *more).code for more in ([], ["--dry-run"])]
