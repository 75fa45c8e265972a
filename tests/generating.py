"""Decoders that generate: a small checkpoint with a tokenizer, and graphs written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx.parser

from checkpoints import build_model

PROMPT = "the king"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_WORDS = "the a of to in is was he she it on at by and or not model graph node runs token text king queen who had words"


def save_tokenizer(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write a byte-level tokenizer of at most 120 tokens, which takes any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]  # its base
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]  # typed as its base
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator([_WORDS] * 3, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=chat_template
    ).save_pretrained(folder)


def save_decoder(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """Write the checkpoint of a small decoder and its tokenizer, and return the folder."""
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = build_model(architecture, **{**ends, **changes})
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def build_decoder(checkpoint: Path, folder: Path, **options: Any) -> Path:
    """Build a checkpoint without verification and return the folder; other tests compare the export."""
    from winml.modelkit import build_hf_model

    return build_hf_model(checkpoint, folder, verify=False, **options).folder


def counting_graph(path: Path, *, batch: str = "batch", sequence: str = "sequence", mask: str = "") -> Path:
    """Write a decoder with one recurrent state: the logits of each token are the sum of all tokens up to it, mod 8.

    ::

        total = state + cumsum(input_ids)      logits = one_hot(total mod 8)      next_state = total of the last token
    """
    masked = f", int64[{batch}, {mask}] attention_mask" if mask else ""
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17],
         metadata_props: ["winml.part": "{{\\"name\\": \\"model\\", \\"of\\": [\\"model\\"], \\"feeds\\": [
            {{\\"output\\": \\"next_state\\", \\"part\\": \\"model\\", \\"input\\": \\"state\\"}}]}}"]>
        counting (int64[{batch}, {sequence}] input_ids, float[{batch}, 1] state{masked})
            => (float[{batch}, {sequence}, 8] logits, float[{batch}, 1] next_state) {{
            one = Constant <value = int64 {{1}}> ()
            last = Constant <value = int64[1] {{-1}}> ()
            end = Constant <value = int64[1] {{9223372036854775807}}> ()
            axis = Constant <value = int64[1] {{1}}> ()
            depth = Constant <value = int64 {{8}}> ()
            values = Constant <value = float[2] {{0.0, 1.0}}> ()
            eight = Constant <value = float {{8.0}}> ()
            tokens = Cast <to = 1> (input_ids)
            sums = CumSum (tokens, one)
            total = Add (sums, state)
            rest = Mod <fmod = 1> (total, eight)
            index = Cast <to = 7> (rest)
            logits = OneHot (index, depth, values)
            next_state = Slice (total, last, end, axis)
        }}""")
    onnx.save(model, path)
    return path
