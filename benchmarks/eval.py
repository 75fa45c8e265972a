"""Cost of ``winml eval`` over the bare loop of the same batches.

Method. Two models with seeded random weights, made from configs, are exported with open sizes: a classifier of texts in
the shape of MiniLM (6 layers of 384) and one of images in the shape of ViT-tiny (12 layers of 192, 224 pixels). The
samples are generated: texts of 10 to 60 words, pictures of 256 pixels in files.

Compared are, in one process, after one round that is not counted, in an order drawn anew each round: the steps
``samples`` and ``metrics`` of an evaluation beside PyTorch, as its own record times them; and what one would write by
hand: open each sample, call the processor of the checkpoint, run ONNX Runtime and PyTorch on the batch, keep the
largest score. Both use the same batches and the same groups of batches. Printed is the time of the one over that of the
other within each round: median and quarter points; and the share of the bare loop that the runs of both models take.

Tables in Markdown, then one line of JSON.

    python benchmarks/eval.py [--models text,image] [--samples 400] [--batch-size 8] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import itertools  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import string  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from results import add_save_option, publish  # noqa: E402

GROUP = 16
"""Batches that one model runs before the other does, as in an evaluation."""
LABELS = 4


@dataclass(frozen=True)
class Case:
    """One model with its samples."""

    checkpoint: Path
    model: Path
    data: Path
    task: str
    feeds: Callable[[Any, list[Any]], dict[str, Any]]
    """Makes the arrays of a batch by the processor of the checkpoint, as one does by hand."""
    samples: list[Any]
    processor: Any


def text_case(folder: Path, count: int) -> Case:
    """Make a classifier of texts, and texts."""
    import datasets
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    generator = random.Random(0)  # noqa: S311  # of texts
    words = ["".join(generator.choices(string.ascii_lowercase, k=6)) for _ in range(5000)]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    padding, unknown = "[PAD]", "[UNK]"
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=padding, unk_token=unknown, model_max_length=128
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=384, num_hidden_layers=6, num_attention_heads=12,
        intermediate_size=1536, num_labels=LABELS,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "checkpoint")
    fast.save_pretrained(folder / "checkpoint")
    texts = [" ".join(generator.choices(words, k=generator.randint(10, 60))) for _ in range(count)]
    labels = [generator.randrange(LABELS) for _ in texts]
    datasets.Dataset.from_dict({"text": texts, "label": labels}).to_parquet(folder / "data.parquet")

    def feeds(processor: Any, rows: list[Any]) -> dict[str, Any]:
        return dict(processor(rows, padding=True, truncation=True, return_tensors="np", return_token_type_ids=True))

    return _exported(folder, folder / "data.parquet", "text-classification", feeds, texts, fast)


def image_case(folder: Path, count: int) -> Case:
    """Make a classifier of images, and pictures."""
    import torch
    import transformers
    from PIL import Image

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=LABELS
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder / "checkpoint")
    processor = transformers.ViTImageProcessorPil()
    processor.save_pretrained(folder / "checkpoint")
    generator = np.random.default_rng(0)
    paths = []
    for number in range(count):
        path = folder / "pictures" / str(number % LABELS) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256)).save(path)
        paths.append(path)

    def feeds(created: Any, rows: list[Any]) -> dict[str, Any]:
        images = [Image.open(path).convert("RGB") for path in rows]
        return dict(created(images=images, return_tensors="np"))

    return _exported(folder, folder / "pictures", "image-classification", feeds, paths, processor)


def _exported(folder: Path, data: Path, task: str, feeds: Any, samples: list[Any], processor: Any) -> Case:
    from winml.modelkit.export.config import WinMLExportConfig
    from winml.modelkit.export.exporting import HTPExporter
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.specs import DynamicRequest

    dynamic = DynamicRequest(batch=True, sequence=task.startswith("text"))
    request = ModelRequest(model=str(folder / "checkpoint"), task=task, dynamic=dynamic)
    (folder / "onnx").mkdir()
    HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, folder / "onnx" / "model.onnx")
    return Case(folder / "checkpoint", folder / "onnx" / "model.onnx", data, task, feeds, samples, processor)


def judged_s(case: Case, batch_size: int, threads: int | None) -> float:
    """Return the seconds of the samples and metrics of an evaluation."""
    from winml.modelkit import evaluate_model

    result = evaluate_model(
        case.model, case.data, batch_size=batch_size, baseline="pytorch", **({"threads": threads} if threads else {})
    )
    return sum(step.seconds for step in result.steps if step.name in ("samples", "metrics"))


class BareLoop:
    """A loop as a user would write it by hand."""

    def __init__(self, case: Case, threads: int | None) -> None:
        """Open the session, and load the model."""
        import onnxruntime
        import transformers

        options = onnxruntime.SessionOptions()
        if threads:
            options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(case.model), options, providers=providers)
        kind = {
            "text-classification": transformers.AutoModelForSequenceClassification,
            "image-classification": transformers.AutoModelForImageClassification,
        }[case.task]
        self.model = kind.from_pretrained(case.checkpoint).eval()
        self.case = case
        self.runs_s = 0.0

    def __call__(self, batch_size: int) -> float:
        """Return the seconds of all samples; store the seconds of the runs alone."""
        import torch

        self.runs_s, started = 0.0, time.perf_counter()
        names = {value.name for value in self.session.get_inputs()}
        outputs: list[list[int]] = [[], []]
        for group in _grouped(_batches(self.case.samples, batch_size), GROUP):
            created = [self.case.feeds(self.case.processor, rows) for rows in group]
            running = time.perf_counter()
            for arrays in created:
                feeds = {name: array for name, array in arrays.items() if name in names}
                outputs[0] += self.session.run(["logits"], feeds)[0].argmax(-1).tolist()
            for arrays in created:
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items() if name in names}
                with torch.inference_mode():
                    outputs[1] += self.model(**tensors).logits.argmax(-1).tolist()
            self.runs_s += time.perf_counter() - running
        assert len(outputs[0]) == len(outputs[1]) == len(self.case.samples)
        return time.perf_counter() - started


def _batches(samples: list[Any], size: int) -> Iterator[list[Any]]:
    return (samples[start : start + size] for start in range(0, len(samples), size))


def _grouped(batches: Iterator[list[Any]], size: int) -> Iterator[list[list[Any]]]:
    while group := list(itertools.islice(batches, size)):
        yield group


def measured(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one model."""
    import torch

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    loop = BareLoop(case, arguments.threads)
    ratios, bare, shares = [], [], []
    for number in range(arguments.rounds + 1):
        seconds: dict[str, float] = {}
        for name in np.random.default_rng(number).permutation(["judged", "bare"]):
            if name == "bare":
                seconds[name] = loop(arguments.batch_size)
            else:
                seconds[name] = judged_s(case, arguments.batch_size, arguments.threads)
        if number:
            ratios.append(seconds["judged"] / seconds["bare"])
            bare.append(seconds["bare"])
            shares.append(loop.runs_s / seconds["bare"])
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return {
        "bare_s": round(statistics.median(bare), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_quarters": [round(low, 3), round(high, 3)],
        "share_of_runs": round(statistics.median(shares), 3),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="text,image")
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    add_save_option(parser)
    arguments = parser.parse_args()
    makers = {"text": text_case, "image": image_case}
    record: dict[str, Any] = {}
    table = ["| model | bare loop | of it, runs | eval over it | quarter points |", "| --- | --- | --- | --- | --- |"]
    print("\n".join(table))
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = measured(makers[name](Path(folder), arguments.samples), arguments)
        record[name] = row
        low, high = row["ratio_quarters"]
        times = f"{row['bare_s']:.2f} s | {row['share_of_runs']:.0%}"
        table.append(f"| {name} | {times} | {row['ratio']:.3f} | {low:.3f}–{high:.3f} |")
        print(table[-1], flush=True)
    publish(arguments, {"benchmark": "eval", "samples": arguments.samples, "models": record}, table)


if __name__ == "__main__":
    main()
