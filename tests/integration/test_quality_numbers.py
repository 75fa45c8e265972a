"""Quality numbers of a pair of files: equal from every command, on realistic samples."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation_checkpoints import export_open, save_task_checkpoint, sentences, text_tokenizer
from winml.modelkit import build_hf_model
from winml.modelkit.builds.evaluated_models import evaluate_model
from winml.modelkit.compare.comparing import CompareOptions, compare_models
from winml.modelkit.compare.fidelity import QualitySamples, SampleSpread, judged_outputs, measure_fidelity
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.quality_samples import SampleRequest, quality_values
from winml.modelkit.compile.verb import compile_onnx
from winml.modelkit.evaluate.options import EvaluationOptions
from winml.modelkit.optimize.verb import optimize_onnx
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.sensitivity import quantization_sensitivity
from winml.modelkit.quantize.sensitivity_records import QuantizationSensitivity
from winml.modelkit.quantize.verb import quantize_onnx
from winml.modelkit.samples.data_sets import DataSetRequest
from winml.modelkit.samples.generated_samples import picture, recording, sentence
from winml.modelkit.tune.options import TuneOptions
from winml.modelkit.tune.tuning import tune_model

CLASSES = ("negative", "neutral", "positive")
SEED = 5


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a text classifier, with its tokenizer beside it."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    save_task_checkpoint(folder, "bert", "BertForSequenceClassification", text_tokenizer(), labels=CLASSES)
    return export_open(folder, "text-classification")


@pytest.fixture(scope="module")
def studied(classifier: Path) -> QuantizationSensitivity:
    """Sensitivity to quantization of the whole model and of each module alone."""
    return quantization_sensitivity(classifier, seed=SEED, depth=1)


def _about(record: Any) -> tuple[str, float, float]:
    (output,) = record["outputs"].values()
    return record["worst_output"], output["sqnr_db"]["all"], output["sqnr_db"]["p05"]


def test_every_verb_reports_the_same_quality(
    classifier: Path, studied: QuantizationSensitivity, tmp_path: Path
) -> None:
    """Quantize, compare, sensitivity and tune run the same samples, and judge the same end of the interval."""
    few = tmp_path / "few.onnx"
    quantized = quantize_onnx(classifier, few, seed=SEED, overwrite=True, min_sqnr_db=0)
    assert quantized.comparison is not None
    told: Any = quantized.comparison.as_record()
    compared = compare_models(classifier, few, CompareOptions(RunOptions("", seed=SEED)))
    measured: Any = studied.as_record()
    options = TuneOptions(only=("dynamic",), seed=SEED, min_sqnr_db=0, target="size")
    tuned = tune_model(classifier, tmp_path / "tuned", options=options)
    (candidate,) = (item for item in tuned.as_record()["candidates"] if item["name"] == "dynamic-int8")
    records = [told["quality"], compared.quality, measured["quantized"]["quality"], candidate["quality"]]
    assert [{"source": "processor", "count": 16, "seed": SEED}] * 4 == [record["samples"] for record in records]
    names, numbers, ends = zip(*map(_about, records), strict=True)
    assert {"logits"} == set(names)
    # ONNX Runtime's fusions of the float graph change the order of sums.
    assert numbers == pytest.approx([numbers[0]] * 4, abs=0.05)
    assert ends == pytest.approx([ends[0]] * 4, abs=0.05)


def test_interval_of_generated_samples_contains_the_value_on_sentences(minilm_folder: Path, tmp_path: Path) -> None:
    """MiniLM with its real weights is compared on sentences of the documentation."""
    pytest.importorskip("datasets")
    source = _exported_minilm(minilm_folder, tmp_path)
    few = tmp_path / "few.onnx"
    made = quantize_onnx(source, few, options=None).comparison
    assert made is not None
    texts = tmp_path / "sentences.txt"
    texts.write_text("\n".join(_prose(60)), encoding="utf-8")
    data = DataSetRequest(str(texts), samples=60)
    real = compare_models(source, few, CompareOptions(RunOptions(""), data_set=data))
    for output in real.outputs:
        (own,) = (item for item in made.outputs if item.name == output.fidelity.name)  # type: ignore[union-attr]
        assert own.spread is not None
        assert own.spread.min <= output.fidelity.sqnr_db <= own.spread.p95 + 1

    # The last bit of a float changes whole steps of int8, so as written they differ by 18 dB; both are right.
    optimized = optimize_onnx(few, tmp_path / "optimized.onnx", level="full")
    compiled = compile_onnx(few, tmp_path / "compiled.onnx", ep="cpu")
    for comparison in (optimized.comparison, compiled.comparison):
        assert isinstance(comparison, VerificationInfo)
        assert all(item.is_equal for item in comparison.comparisons)


@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_build_without_a_float_copy_reports_the_quality_of_compare(
    classifier: Path, tmp_path: Path, precision: str
) -> None:
    """Weights are quantized straight from the checkpoint; PyTorch is the reference then."""
    built = build_hf_model(classifier.parent.parent, tmp_path / "built", precision=precision)
    compared = compare_models(classifier, built.model_path, CompareOptions(RunOptions("")))
    told = [stage.summary for stage in built.manifest.parts[0].stages if "dB" in stage.summary]
    assert f"SQNR {compared.worst.fidelity.sqnr_db:.1f} dB" in told[0]


def test_evaluation_with_a_baseline_reports_the_quality_of_compare(classifier: Path, tmp_path: Path) -> None:
    """The samples of a data set are equal for both commands, and run one by one without padding."""
    few, texts = tmp_path / "few.onnx", tmp_path / "texts.csv"
    quantize_onnx(classifier, few, verify=False)
    for file in classifier.parent.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    rows = [f"{text},{CLASSES[number % 3]}" for number, text in enumerate(sentences(12))]
    texts.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    options = EvaluationOptions(dataset=str(texts), baseline=str(classifier), batch_size=1)
    evaluated = evaluate_model(few, options=options)
    data = DataSetRequest(str(texts), samples=12)
    compared = compare_models(classifier, few, CompareOptions(RunOptions(""), data_set=data))
    assert evaluated.quality is not None
    assert _about(evaluated.quality) == pytest.approx(_about(compared.quality), abs=1e-3)
    assert evaluated.quality["samples"] == compared.quality["samples"]


def test_target_is_judged_on_held_out_samples(
    classifier: Path, studied: QuantizationSensitivity, tmp_path: Path
) -> None:
    """The file made by the rules has the reported number, and the lower end of its interval reaches the target."""
    assert studied.whole.worst is not None
    target = studied.whole.worst.lower_db + 3
    listed = quantization_sensitivity(classifier, seed=SEED, target=f"sqnr_db={target}", iterations=2).exclude_list
    assert listed is not None
    assert listed.is_met
    assert listed.form.worst is not None
    assert listed.form.worst.lower_db >= target
    assert listed.form.worst != listed.trials[-1].form.worst
    written = quantize_onnx(classifier, tmp_path / "mixed.onnx", seed=SEED, per_module=dict(listed.rules)).comparison
    assert written is not None
    assert written.worst.sqnr_db == pytest.approx(listed.form.worst.sqnr_db, abs=0.05)  # type: ignore[union-attr]


def test_samples_are_texts_of_the_tokenizer(classifier: Path) -> None:
    """Samples have realistic lengths, special tokens at both ends and the tokenizer's masks, and depend on the seed."""
    session, run = Session(classifier), RunOptions("")
    found = quality_values(session, SampleRequest(run, classifier.parent))
    again = quality_values(session, SampleRequest(run, classifier.parent))
    assert ("processor", 16) == (found.source, len(found.values))
    lengths = set()
    for values, same in zip(found.values, again.values, strict=True):
        (tokens,) = values.feeds["input_ids"]
        assert (2, 3) == (tokens[0], tokens[-1])
        assert values.feeds["attention_mask"].all()
        assert np.array_equal(values.feeds["input_ids"], same.feeds["input_ids"])
        lengths.add(len(tokens))
    assert 5 < len(lengths)
    other = quality_values(session, SampleRequest(RunOptions("", seed=1), classifier.parent))
    assert not np.array_equal(other.values[0].feeds["input_ids"], found.values[0].feeds["input_ids"])


def test_without_a_processor_values_are_random(classifier: Path, tmp_path: Path) -> None:
    """A damaged processor beside the model also leads to random values, with a note."""
    session = Session(classifier)
    assert "random" == quality_values(session, SampleRequest(RunOptions(""), tmp_path)).source
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    found = quality_values(session, SampleRequest(RunOptions(""), tmp_path))
    assert "random" == found.source
    assert any("processor" in note for note in found.values[0].notes)


def test_decoder_is_judged_by_its_scores() -> None:
    """Cache states are reported, and count as the worst output only if the scores cannot be compared."""
    outputs = {"logits": np.ones((1, 2, 4), np.float32), "present.0.key": np.ones((1, 1, 2, 4), np.float32)}
    off = {"logits": outputs["logits"] * 1.01, "present.0.key": outputs["present.0.key"] * 1.5}
    fidelity = measure_fidelity([outputs], [off], 30.0, QualitySamples("random", 1, 0))
    assert "logits" == fidelity.worst.name
    assert fidelity.is_verified
    broken = {**off, "present.0.key": outputs["present.0.key"][:, :, :1]}
    wrong = measure_fidelity([outputs], [broken], 30.0, QualitySamples("random", 1, 0))
    assert "present.0.key" == wrong.worst.name
    assert not wrong.is_verified
    assert 2 == len(judged_outputs(wrong.outputs))


def test_padding_does_not_count(tmp_path: Path) -> None:
    """Two sentences in one padded batch have the quality that they have alone, also module by module.

    Padded to 32 tokens, as many as the hidden size: of the pooled output [2, 32], no value is left out.
    """
    folder = save_task_checkpoint(tmp_path / "bert", "bert", "BertModel", text_tokenizer())
    source, few = export_open(folder, "feature-extraction"), tmp_path / "few.onnx"
    quantize_onnx(source, few, options=QuantizeOptions(precision="int4"), verify=False)
    (tmp_path / "alone").mkdir()
    names = ("input_ids", "attention_mask", "token_type_ids")
    padded = {name: np.zeros((2, 32), np.int64) for name in names}
    for row, length in enumerate((32, 9)):
        padded["input_ids"][row, :length] = np.random.default_rng(row).integers(1, 50, length)
        padded["attention_mask"][row, :length] = 1
        alone = {name: values[row : row + 1, :length] for name, values in padded.items()}
        np.savez(tmp_path / "alone" / f"{row}.npz", **alone)
    np.savez(tmp_path / "padded.npz", **padded)
    apart, together = (
        compare_models(source, few, CompareOptions(RunOptions("", input_data=data), by_module=True))
        for data in (tmp_path / "alone", tmp_path / "padded.npz")
    )
    assert {"last_hidden_state", "pooler_output"} == {output.fidelity.name for output in apart.outputs}
    for one, other in zip(apart.outputs, together.outputs, strict=True):
        # Sums of another order. With padding, the first output would differ by 0.6 dB.
        assert one.fidelity.sqnr_db == pytest.approx(other.fidelity.sqnr_db, abs=0.01)
    errors = [
        [module.fidelity.relative_error for module in compared.modules or () if module.fidelity is not None]
        for compared in (apart, together)
    ]
    assert len(errors[0]) > 10
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)


def test_limit_judges_the_lower_end() -> None:
    """Two bad samples of twenty put the lower end below the limit; the SQNR of all samples is above."""
    reference = [{"y": np.ones(4, np.float32)}] * 20
    errors = [0.5 if number < 2 else 0.01 for number in range(20)]
    answers = [{"y": np.ones(4, np.float32) + np.float32(error)} for error in errors]
    fidelity = measure_fidelity(reference, answers, 10.0, QualitySamples("random", 20, 0))
    assert fidelity.worst.sqnr_db > 10 > fidelity.worst.lower_db
    assert not fidelity.is_verified
    assert SampleSpread.of([10.0, 20.0, 30.0]).median == 20.0


def test_generated_images_and_sounds_have_natural_spectra() -> None:
    """Amplitude falls with frequency: the lowest tenth of the spectrum has most of the power."""
    generator = np.random.default_rng(0)
    gray = np.asarray(picture(generator).convert("L"), np.float64)
    power = np.abs(np.fft.rfft(gray - gray.mean(), axis=1)) ** 2
    assert power[:, :12].sum() > 0.5 * power.sum()
    sound = recording(generator, 16_000).samples.astype(np.float64)
    spectrum = np.abs(np.fft.rfft(sound)) ** 2
    assert spectrum[: len(spectrum) // 10].sum() > 0.5 * spectrum.sum()
    assert np.abs(sound).max() <= 1
    lengths = [len(sentence(generator, ["a", "the", "word"]).split()) for _ in range(500)]
    assert 12 <= np.median(lengths) <= 20
    assert max(lengths) <= 60


def _exported_minilm(folder: Path, place: Path) -> Path:
    copied = place / "minilm"
    shutil.copytree(folder, copied)
    return export_open(copied, "feature-extraction")


def _prose(count: int) -> list[str]:
    """Return sentences of the documentation."""
    pages = Path(__file__).parents[2].joinpath("docs").rglob("*.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(pages))
    found = dict.fromkeys(re.findall(r"[A-Z][^.!?|#`*<>\n]{30,200}\.", text))
    return list(found)[:: max(1, len(found) // count)][:count]
