"""``winml quantize`` with calibration samples and with a budget: files, summaries, pages, refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
import torch
import transformers

from checkpoints import one_layer
from e2e.in_process import run_here
from encoder_decoder import save_encoder_decoder
from generating import save_decoder
from installed_versions import TWO_BITS

TEXTS = "".join(f"{json.dumps({'text': f'a b c d {number} e f g h i j k'})}\n" for number in range(6))


@pytest.fixture
def texts(here: Path) -> Path:
    """Calibration texts in the current folder."""
    (here / "texts.jsonl").write_text(TEXTS, encoding="utf-8")
    return here / "texts.jsonl"


def operators(path: Path) -> list[str]:
    """Return the operators of a file."""
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gptq", "awq", "auto"])
def test_built_decoder_is_quantized_with_samples_and_generates(llama: Path, here: Path, algorithm: str) -> None:
    """Every module keeps its tag, the record names the algorithm, and text is generated with the result."""
    done = run_here(
        "quantize", "-m", llama, "-o", "out", "-p", "int4", "--algorithm", algorithm, "--min-sqnr", "-100",
        "--format", "json",
    )  # fmt: skip
    assert 0 == done.code, done.err
    record = json.loads(done.out)
    assert 100.0 == record["coverage"]["percent"]
    assert algorithm == record["calibration"]["method"]
    assert "MatMulNBits" in operators(here / "out" / "model.onnx")
    assert "MatMul" in operators(llama / "model.onnx")
    written = run_here("generate", "out", "--prompt", "a b", "--max-new-tokens", "3")
    assert 0 == written.code, written.err


@TWO_BITS
@pytest.mark.slow
def test_checkpoint_is_built_to_a_budget_without_a_float_file(here: Path) -> None:
    """Weights in bfloat16 are measured in the checkpoint's files; only the result is written."""
    save_decoder(here / "checkpoint", **one_layer("llama"))
    model = transformers.AutoModelForCausalLM.from_pretrained(here / "checkpoint", dtype=torch.bfloat16)
    model.save_pretrained(here / "checkpoint")
    done = run_here(
        "build", "-m", "checkpoint", "-o", "built", "--budget", "5bits", "--algorithm", "auto", "--samples", "2",
        "--min-sqnr", "-100", "--format", "json",
    )  # fmt: skip
    assert 0 == done.code, done.err
    stages = {stage["name"]: stage for stage in json.loads(done.out)["parts"][0]["stages"]}
    assert "memory" in stages["export"]["reason"]
    assert "in memory" in stages["optimize"]["reason"]
    assert "variants measured" in stages["quantize"]["summary"]
    assert {"model.onnx", "quantized.onnx"} == {path.name for path in (here / "built").glob("*.onnx*")}
    assert not [path for path in (here / "built").iterdir() if path.name.startswith(".winml-unfinished")]
    assert "MatMulNBits" in operators(here / "built" / "model.onnx")


@pytest.mark.slow
def test_build_within_a_size_counts_the_model_file(here: Path) -> None:
    """A limit below the smallest size is refused with that size, and the limit is kept.

    Tokenizer and config are extra.
    """
    save_decoder(here / "checkpoint", **one_layer("llama"))
    words = ["build", "-m", "checkpoint", "-o", "built", "--samples", "2", "--min-sqnr", "-100", "--max-size"]
    assert 2 == run_here(*words, "1GB").code  # the source keeps it
    planned = json.loads(run_here(*words, "20kB", "--dry-run", "--format", "json").out)
    assert ["20.0 kB" in step["does"] for step in planned["steps"]] == [
        step["name"] == "quantize" for step in planned["steps"]
    ]
    refused = run_here(*words, "1kB")
    assert 2 == refused.code, refused.err
    assert not [path for path in here.rglob("*.onnx") if path.name != "export.onnx"]
    (smallest,) = re.findall(r"([\d.]+kB) or more", refused.err)
    done = run_here(*words, smallest)
    assert 0 == done.code, done.err
    files = [path for path in (here / "built").iterdir() if path.name.startswith("model.onnx")]
    assert 0 < sum(path.stat().st_size for path in files) <= 1000 * float(smallest.removesuffix("kB"))
    assert "bits per parameter" in done.out  # in the summary


@pytest.mark.slow
def test_part_of_a_build_within_a_size_stays_float(here: Path) -> None:
    """The larger part is quantized; a size that fits both float parts is refused."""
    save_encoder_decoder(here / "checkpoint", "t5", num_layers=1)
    words = ["build", "-m", "checkpoint", "--no-verify", "--format", "json"]
    assert 0 == run_here(*words, "-o", "built").code
    models = {part: here / "built" / f"{part}.onnx" for part in ("encoder", "decoder")}
    encoder, decoder = (path.stat().st_size for path in models.values())
    assert encoder != decoder
    limit = max(encoder, decoder) - 1000
    words += ["--samples", "2", "--max-size"]
    done = run_here(*words, f"{limit}B", "-o", "built")  # uses the exports again
    assert 0 == done.code, done.err
    smaller, larger = ("encoder", "decoder") if encoder < decoder else ("decoder", "encoder")
    assert "MatMulNBits" not in operators(models[smaller])
    assert models[larger].stat().st_size <= limit
    for output in ("other", "built"):  # a new folder, and one with the exports of both parts
        assert 2 == run_here(*words, "1MB", "-o", output).code
    assert not (here / "other").exists()


@TWO_BITS
@pytest.mark.slow
def test_budget_writes_a_mixture_a_page_and_reasons(small_file: Path, here: Path) -> None:
    """The limit is kept, ``inspect`` lists the bits of each module, and the page is written beside the file."""
    done = run_here(
        "quantize", "-m", small_file, "-o", "mixed.onnx", "--budget", "6bits", "--min-sqnr", "-100", "--samples", "2",
        "--report", "page.html", "--format", "json",
    )  # fmt: skip
    assert 0 == done.code, done.err
    record = json.loads(done.out)
    assert record["budget"]["mean_bits"] <= 6
    assert (here / "page.html").read_text(encoding="utf-8").count("<html") == 1
    tree = json.loads(run_here("inspect", "mixed.onnx", "-H", "--format", "json").out)
    assert tree["records"]["winml.quantization"]["modules"] == record["modules"]
    assert all(module["why"].startswith("alone: ") for module in record["modules"])
    repeated = run_here("quantize", "-m", small_file, "-o", "other.onnx", "--budget", "6bits", "--report", "page.html")
    assert 2 == repeated.code
    assert not (here / "other.onnx").exists()


def test_plan_of_a_budget_writes_nothing(small_file: Path, here: Path) -> None:
    """The plan names the file and the page."""
    done = run_here(
        "quantize", "-m", small_file, "-o", "mixed.onnx", "--budget", "6bits", "--report", "page.html", "--dry-run",
        "--format", "json",
    )  # fmt: skip
    assert 0 == done.code, done.err
    planned = json.loads(done.out)
    (words,) = [step["does"] for step in planned["steps"] if step["name"] == "quantization"]
    assert "6 bits" in words
    named = {Path(file["path"]).name for file in planned["writes"]}
    assert {"mixed.onnx", "page.html"} <= named
    assert [] == list(here.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--budget", "4.5"],
        ["--budget", "4bits", "-p", "int4"],
        ["--max-size", "big"],
        ["--max-size", "1kB", "--samples", "1"],
        ["--report", "page.html"],
        ["-p", "int4", "--calibration-data", "texts.jsonl"],
        ["-p", "int4", "--algorithm", "gptq", "--calibration-data", "missing.npz"],
        ["--mode", "dynamic", "--algorithm", "awq"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("texts")
def test_wrong_usage_ends_with_2_and_writes_nothing(small_file: Path, here: Path, words: list[str]) -> None:
    """Each wrong usage is refused in a sentence."""
    done = run_here("quantize", "-m", small_file, "-o", "out.onnx", *words)
    assert 2 == done.code, done.err
    assert not (here / "out.onnx").exists()


@pytest.mark.parametrize("words", [["-p", "int4", "--algorithm", "gptq"], ["--budget", "4bits"]], ids=" ".join)
@pytest.mark.usefixtures("here")
def test_sensitivity_is_refused_with_samples_and_budgets(small_file: Path, words: list[str]) -> None:
    """Sensitivity measures single modules, without samples and budgets."""
    assert 2 == run_here("quantize", "-m", small_file, "--sensitivity", *words).code
