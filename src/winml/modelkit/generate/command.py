"""``winml generate``: a built model goes on with a text, token by token."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from winml.modelkit.cli._errors import WinMLCommand, report_error
from winml.modelkit.cli._options import declared_options_of, model_option, option, reference_option, result_options
from winml.modelkit.cli._progress import show_wait
from winml.modelkit.cli._streams import library_output_to_stderr, print_json, tell
from winml.modelkit.errors import UsageError, VerificationError
from winml.modelkit.fields import GENERATION, INPUTS, MODEL, fields_of
from winml.modelkit.file_names import (
    DECODER,
    EMBEDDING,
    ENCODER,
    ONLY_PART,
    TOKENIZER_NAME,
    VISION,
    files_folder,
    prompt_parts,
)
from winml.modelkit.ort.execution_providers import find_execution_provider, parse_ep_options
from winml.modelkit.verbs.named_models import model_name, resolve_named_model
from winml.modelkit.verbs.running import ProviderFields
from winml.modelkit.words import terminal_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt
    from winml.modelkit.generate.records import GeneratedText
    from winml.modelkit.models.request import ModelRequest

STDIN = "-"
"""Value of ``--prompt`` that reads stdin."""
_OF_SETTINGS = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "stop", "seed",
)  # fmt: skip
"""Options that change how tokens are chosen."""
LARGEST_SEED = 2**32 - 1
"""Specified: the largest seed that both numpy and transformers take."""


_common = partial(option, is_common=True)


@click.command(name="generate", cls=WinMLCommand)
@model_option("Build folder, Hub id, checkpoint, or an ONNX file beside its tokenizer.")
@_common("texts", str, "Same as --prompt.", INPUTS, metavar="[PROMPT]...", is_argument=True, is_repeatable=True)
@_common("prompt", str, "Prompt; - reads it from stdin.", INPUTS, short="-p", metavar="TEXT", is_repeatable=True)
@_common("chat", bool, "Apply the chat template of the model to the prompt.", INPUTS)
@_common("system", str, "System message, with --chat.", INPUTS, metavar="TEXT")
@_common("image", str, "Image, for vision-language models.", INPUTS, metavar="FILE", is_repeatable=True)
@_common("audio", str, "Audio file, for speech recognition models.", INPUTS, metavar="FILE")
@_common("timestamps", bool, "Show the time of each segment, with --audio.", INPUTS)
@_common(
    "max_new_tokens",
    int,
    "Maximum number of generated tokens. The context length of the model limits it, too.",
    GENERATION,
    minimum=1,
    default_words="from generation_config.json, else 256",
)
@_common("temperature", float, "Sampling temperature; 0 is greedy decoding.", GENERATION, minimum=0, maximum=100)
@_common("top_k", int, "Sample from the N most likely tokens. 0: from all tokens.", GENERATION, minimum=0)
@_common(
    "top_p",
    float,
    "Sample from the most likely tokens, up to this total probability.",
    GENERATION,
    metavar="SHARE",
    above=0,
    maximum=1,
)
@_common(
    "min_p",
    float,
    "Minimum probability of a token. It is relative to that of the most likely token.",
    GENERATION,
    metavar="SHARE",
    minimum=0,
    maximum=1,
)
@_common("repetition_penalty", float, "Penalty on repeated tokens; 1 is none.", GENERATION, above=0)
@_common("num_beams", int, "Number of beams in beam search.", GENERATION, minimum=1, maximum=1000, default_words="1")
@_common("stop", str, "Stop when the output contains this text.", GENERATION, metavar="TEXT", is_repeatable=True)
@_common("seed", int, "Seed of sampling.", GENERATION, minimum=0, maximum=LARGEST_SEED, default=0)
@option("adapter", str, "LoRA adapter of the model to use.", MODEL, metavar="NAME", default_words="none")
@reference_option(
    "Also run PyTorch and compare the texts. Shows the first token that differs, which is no error of a quantized "
    "model. Without a value: the local checkpoint that the model was exported from."
)
@declared_options_of(fields_of(ProviderFields))
@result_options(quiet="Print the generated text only.")
def command(**options: Any) -> None:
    """Generate text with a model.

    A checkpoint is built in the cache first. The text is streamed to stdout, everything else to stderr.

    Exit codes: 0 success, 1 failure, 2 usage error, 3 PyTorch generates a different text (--reference).

    Examples:
      winml generate built -p "Once upon a time"
      winml generate built --chat -p "What is ONNX?" --temperature 0.7 --top-p 0.9 --seed 1
      winml generate built -p - --max-new-tokens 64 --format json < prompt.txt
      winml generate built -p "The first prompt" -p "The second prompt" -q
      winml generate built -p "Once upon a time" --reference
      winml generate built -p "Once upon a time" --adapter french
      winml generate t5-built -p "translate English to German: The house is old."
      winml generate whisper-built --audio speech.wav --timestamps
      winml generate llava-built --chat -p "What is on the table?" --image photo.jpg
    """
    model_name(options, "a build folder, a Hub id, a checkpoint, or an ONNX file beside its tokenizer")
    options["prompt"] = (*options["texts"], *options["prompt"])
    files = _refuse_early(options)
    adapter = _adapter_path(files, options["adapter"])
    checkpoint = _reference_request(files, options["reference"], options["adapter"])
    texts = [_read_stdin() if text == STDIN else text for text in options["prompt"]] or [None]
    prompts = [_prepare_prompt(files, text, options) for text in texts]
    if options["reference"] is not None and prompts[0].settings.is_sampled:
        raise UsageError(
            "--reference compares token by token, which sampling does not allow",
            hint="Add --temperature 0 for greedy decoding.",
        )
    results = _write_texts(prompts, checkpoint, adapter, options)
    if options["format_"] == "json":
        records = [result.as_record() for result in results]
        print_json(records[0] if len(records) == 1 else {"schema_version": 1, "texts": records})
    for number, result in enumerate(results, 1):
        _tell_result(result, number if len(results) > 1 else None, options)
    for result in results:
        reference = result.reference
        if reference is not None and reference.difference is not None and not reference.is_of_quantized:
            error = VerificationError(
                f"PyTorch generates a different token after {reference.difference.index} equal ones",
                hint="A small margin indicates rounding; winml compare shows where the graphs diverge.",
            )
            # Not raised: the result is printed, as JSON too.
            click.get_current_context().exit(report_error(error))


def _read_stdin() -> str:
    """Return the text on stdin, up to the longest text that is tokenized.

    Raises:
        UsageError: it is not text.
    """
    from winml.modelkit.samples.processors import LONGEST_TEXT_CHARACTERS

    try:
        text = sys.stdin.read(LONGEST_TEXT_CHARACTERS + 1)
        # Where the locale says nothing of an encoding, Python keeps the bytes as halves of characters.
        text.encode()
    except UnicodeError as error:
        raise UsageError(
            f"-p -: stdin is not {sys.stdin.encoding or 'UTF-8'} text, from character {getattr(error, 'start', 0)} on",
            hint="Convert it first, for example with iconv.",
        ) from error
    return text


def _prepare_prompt(files: Mapping[str, Path], text: str | None, options: Mapping[str, Any]) -> PreparedPrompt:
    """Return the prompt in tokens of the model."""
    requested = {key: options[key] for key in _OF_SETTINGS}
    if ENCODER in files:
        from winml.modelkit.generate.generation.media_prompts import prepare_encoder_decoder

        image = next(iter(options["image"]), None)
        contents = {"prompt": text, "audio": options["audio"], "image": image}
        return prepare_encoder_decoder(files, contents, with_times=options["timestamps"], **requested)
    from winml.modelkit.generate.generation.writing import prepare_prompt

    chat = {"is_chat": options["chat"], "system": options["system"]}
    return prepare_prompt(files, text or "", options["image"], **chat, **requested)


def _refuse_early(options: Mapping[str, Any]) -> Mapping[str, Path]:
    """Check names and paths in the options, and return the ONNX files of the model by part.

    Raises:
        UsageError: the model or the provider does not exist, no prompt is specified, or two options conflict.
    """
    if options["ep"] is not None:
        find_execution_provider(options["ep"])
    media = [f"--{name}" for name in ("audio", "image") if options[name]]
    if options["prompt"].count(STDIN) > 1:
        raise UsageError("-p -: stdin is specified twice, and can be read once", hint="Use -p - once.")
    if not options["prompt"] and not media:
        raise UsageError("no prompt is specified", hint='Specify a prompt: -p "Once upon a time".')
    if options["system"] is not None and not options["chat"]:
        raise UsageError("--system requires --chat: the chat template inserts the system message", hint="Add --chat.")
    if "" in options["stop"]:
        raise UsageError("--stop '': every output contains the empty text", hint="Specify a text that ends the output.")
    if options["timestamps"] and not options["audio"]:
        raise UsageError("--timestamps requires an audio file", hint="Add --audio FILE.")
    parts = _find_files(options)
    if {ENCODER, DECODER} <= parts.keys():
        if options["chat"]:
            raise UsageError("--chat: encoder-decoder models have no chat template", hint="Omit --chat.")
        if len(options["image"]) > 1:
            raise UsageError(
                f"{len(options['image'])} images are specified, and the model accepts one", hint="Specify one."
            )
        if media and options["reference"] is not None:
            raise UsageError(
                f"--reference compares texts, and cannot be combined with {media[0]}", hint="Omit one of them."
            )
        return parts
    if {VISION, EMBEDDING, DECODER} <= parts.keys():
        if options["audio"]:
            raise UsageError(f"--audio: {options['model']} accepts text and images", hint="Omit --audio.")
        if options["reference"] is not None:
            raise UsageError(
                f"--reference: {options['model']} is a vision-language model, which --reference does not support",
                hint="Omit --reference; the export compared a text with PyTorch.",
            )
        return parts
    path = parts.get(ONLY_PART) or (parts[DECODER] if DECODER in parts and prompt_parts(parts) else None)
    if path is None:
        raise UsageError(
            f"{options['model']}: of its parts {', '.join(parts)}, none generates text",
            hint=f"winml run {options['model']} --schema shows what it takes.",
        )
    if not (files_folder(path) / TOKENIZER_NAME).is_file():
        from winml.modelkit.generate.generation.writing import refuse_other_task
        from winml.modelkit.onnx.bundle import described_model

        refuse_other_task(options["model"], described_model(path).get("task"))
    if media:
        raise UsageError(f"{media[0]}: {path} accepts text only", hint="Specify a prompt with -p.")
    return parts


def _find_files(options: Mapping[str, Any]) -> Mapping[str, Path]:
    """Return part → ONNX file of the model; a checkpoint is built in the cache first.

    Raises:
        WinMLError: there is no such model, or the build fails.
    """
    from winml.modelkit.builds.found_models import part_files

    if parts := part_files(options["model"]):
        return parts
    found = resolve_named_model(options["model"], {"task": None})
    if found.path is not None:
        return {ONLY_PART: found.path}
    from winml.modelkit.generate.run_verb import build_in_cache

    assert found.request is not None  # the model is no file
    with library_output_to_stderr(), show_wait("building"):
        parts, notes = build_in_cache(found.request, options["ep"])
    for note in () if options["quiet"] else notes:
        tell(f"note: {note}")
    return parts


def _adapter_path(files: Mapping[str, Path], name: str | None) -> Path | None:
    """Return the file of the adapter to activate; None without a name.

    Raises:
        UsageError: the model takes no adapter, or no adapter of this name is beside the model.
    """
    if name is None:
        return None
    if files.keys() != {ONLY_PART}:
        raise UsageError(
            f"--adapter {name}: the model has several graphs, and their adapters are merged by the build",
            hint="Omit --adapter.",
        )
    from winml.modelkit.onnx.files.reading import read_metadata
    from winml.modelkit.ort.adapters import adapter_beside

    path = files[ONLY_PART]
    return adapter_beside(path, name, read_metadata(path))


def _reference_request(files: Mapping[str, Path], reference: str | None, adapter: str | None) -> ModelRequest | None:
    """Return the checkpoint to compare with, and the recorded adapters; None without ``--reference``.

    Raises:
        UsageError: neither the user nor the model names a checkpoint on this disk. A name from a file is not looked
            up on the Hub.
    """
    if reference is None:
        return None
    from winml.modelkit.models.request import reference_checkpoint
    from winml.modelkit.onnx.files.reading import read_metadata

    path = files.get(DECODER) or files[ONLY_PART]
    metadata = read_metadata(path)
    return reference_checkpoint(metadata, str(path), reference, adapter)


def _write_texts(
    prompts: list[PreparedPrompt], checkpoint: ModelRequest | None, adapter: Path | None, options: Mapping[str, Any]
) -> list[GeneratedText]:
    """Generate the texts: on stdout, each ended by a line break, unless the whole answer is one JSON object.

    Several texts get their prompts as headings, as in ``head``. With ``--reference``, the texts of PyTorch are added.
    """
    from winml.modelkit.generate.generation.writing import write_texts
    from winml.modelkit.ort.devices import choose_provider

    provider = choose_provider(options["ep"], options["device"], parse_ep_options(options["ep_options"]))
    out, is_table = sys.stdout, options["format_"] == "table"

    wait = ExitStack()

    def show(piece: str) -> None:
        if out.isatty():
            wait.close()  # the text itself shows how far it is
        out.write(terminal_text(piece))
        out.flush()

    results = []
    with wait, library_output_to_stderr():
        if not options["quiet"]:
            wait.enter_context(show_wait("generating"))
        texts = write_texts(
            prompts,
            provider,
            threads=options["threads"],
            show=show if is_table else lambda _piece: None,
            adapter=adapter,
        )
        for prompt in prompts:
            if is_table and len(prompts) > 1 and not options["quiet"]:
                show(f"==> {' '.join(prompt.text.split())} <==\n")
            results.append(next(texts))
            if is_table:
                show("\n")
        if checkpoint is not None:
            from winml.modelkit.generate.generation.reference import compare_with_pytorch

            results = compare_with_pytorch(results, prompts, checkpoint)
    return results


def _tell_result(result: GeneratedText, number: int | None, options: dict[str, object]) -> None:
    """Print times, notes and comparison of a text to stderr, unless ``--quiet``."""
    if options["quiet"]:
        return
    from winml.modelkit.generate.table import generated_lines

    for line in generated_lines(result, number):
        tell(line)
