"""Words of other tools and the command line of winml that does the same.

An unknown command or option is refused with the command line to type instead. Every known synonym in it is replaced,
and a second positional argument becomes the output.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from winml.modelkit.cli._help import POSITIONAL
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import MODEL_SUFFIX

_COMMANDS: Mapping[str, str] = {
    "convert onnx to-onnx to_onnx import trace": "export {}",
    "benchmark bench time latency speed measure": "perf {}",
    "profile profiler": "perf {} --by-module",
    "info show summary describe view print stats": "inspect {}",
    "tree layers modules hierarchy": "inspect {} --hierarchy",
    "optimise simplify fuse slim simplification": "optimize {}",
    "quant quantise quantization compress": "quantize {}",
    "int8": "quantize {} -p int8",
    "int4": "quantize {} -p int4",
    "fp16": "quantize {} -p fp16",
    "deploy package pack bundle make pipeline": "build {}",
    "predict infer inference classify embed execute": "run {}",
    "chat": "generate {} --chat",
    "complete text": "generate {}",
    "validate test check": "verify {}; compare REFERENCE {}; eval {} --dataset DATA",
    "evaluate score accuracy": "eval {}",
    "split cut slice subgraph": "extract {}",
    "autotune search": "tune {}",
    "tag": "retag {}",
    "init plan": "config {}",
    "clean prune": "cache clean",
    "devices providers env environment doctor hardware list": "sys",
    "version": "--version",
}
"""Words of other tools → command lines of winml, separated by semicolons; ``{}`` stands for the arguments."""

_OF_ONNX = "optimize {}; quantize {} -p fp16"
"""Command lines that convert an ONNX file."""
_RECORDING = frozenset({"compare", "diff", "eval", "inspect", "perf", "run"})
"""Commands whose output is a JSON record, no model."""
_SERVING = "serve server serving"

_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--json", "format_", "-f json"),
    ("--bits --nbits --wbits --w-bits --weight-bits", "precision", "-p int{}"),
    ("--quantize --quantization --quant --qtype --weight-format --quant-type", "precision", "-p {}"),
    ("--half --float16 --fp16", "precision", "-p fp16"),
    ("--half --float16 --fp16", "dtype", "--dtype fp16"),
    ("--bfloat16 --bf16", "dtype", "--dtype bf16"),
    ("--int8 --8bit --load-in-8bit", "precision", "-p int8"),
    ("--int4 --4bit --load-in-4bit", "precision", "-p int4"),
    ("--dynamic-quant --dynamic-quantization", "mode", "--mode dynamic"),
    ("--static --static-quant", "mode", "--mode qdq"),
    ("--method --quant-method --scheme", "mode", "--mode {}"),
    ("-O0", "level", "--level none"),
    ("-O1", "level", "--level basic"),
    ("-O2", "level", "--level extended"),
    ("-O3 -O4 -Ofast", "level", "--level full"),
    ("-O --optimize --opt-level --optimization-level", "level", "--level {}"),
    ("--opset-version", "opset_version", "--opset {}"),
    (
        "--input --model-path --model-name --model-name-or-path --model-id --onnx --checkpoint --source --src",
        "model",
        "-m {}",
    ),
    ("--out --output-dir --output-path --output-file --out-dir --dest --save-dir --save", "output", "-o {}"),
    ("--force --yes -y", "overwrite", "--overwrite"),
    ("--batch --bs -b", "batch_size", "--batch-size {}"),
    ("--batch --bs -b --batch-size", "shape_config", """--shape-config '{"batch_size": {}}'"""),
    ("--batch --bs -b --batch-size", "sizes", """--shape-config '{"batch_size": {}}'"""),
    (
        "--seq-len --seq-length --sequence-length --max-length --max-seq-len --max-seq-length",
        "shape_config",
        """--shape-config '{"sequence_length": {}}'""",
    ),
    ("--seq-len --seq-length --sequence-length --max-length", "sizes", """--shape-config '{"sequence_length": {}}'"""),
    ("--dynamic --dynamic-shapes --dynamic-shape", "dynamic_batch", "--dynamic-batch --dynamic-seq-len"),
    ("--provider --execution-provider --execution-providers --backend --target", "ep", "--ep {}"),
    ("--cuda --gpu", "device", "--device gpu"),
    ("--npu", "device", "--device npu"),
    ("--cpu", "device", "--device cpu"),
    ("--runs --num-runs --repeat --repeats --iters --iter --loops --n-runs -n", "iterations", "--iterations {}"),
    ("--warm-up --warmup-runs --num-warmup --warmups", "warmup", "--warmup {}"),
    ("--time --seconds", "duration", "--duration {}"),
    ("--calib --calibration --calib-data --calibration-dataset --data", "calibration_data", "--calibration-data {}"),
    ("--data --data-set --dataset-name", "dataset", "--dataset {}"),
    ("--ignore --skip --skip-layers --nodes-to-exclude --keep-float --exclude-layers", "exclude", "--exclude {}"),
    ("--only --nodes-to-quantize", "include", "--include {}"),
    ("--per-layer --by-layer --layers --modules --profile --breakdown", "by_module", "--by-module"),
    ("--tree --layers --modules", "hierarchy", "--hierarchy"),
    ("--tolerance --tol --atol --rtol --max-error", "threshold", "--threshold {}"),
    ("--html", "report", "--report {}"),
    ("--prompt --input-text --sentence", "text", "--text {}"),
    ("--text --input --question", "prompt", "-p {}"),
    ("--max-tokens --max-length --max-new --num-tokens", "max_new_tokens", "--max-new-tokens {}"),
    ("--temp", "temperature", "--temperature {}"),
    ("--against --ref --reference --compare", "baseline", "--baseline {}"),
    ("--num-samples --nsamples --n-samples --limit", "samples", "--samples {}"),
    ("--no-check --no-validate --skip-validation --no-verification", "verify", "--no-verify"),
    ("--external --use-external-data --external-data-format", "external_data", "--external-data"),
    ("--dry", "dry_run", "--dry-run"),
    ("--silent", "quiet", "--quiet"),
)  # fmt: skip
"""Options of other tools, the parameter of a winml command, and its spelling; ``{}`` stands for the value.

The first row whose parameter the command has applies.
"""

_VALUES: Mapping[str, str] = {
    "q4": "int4", "4": "int4", "4bit": "int4", "nf4": "int4",
    "q8": "int8", "8": "int8", "8bit": "int8",
    "half": "fp16", "float16": "fp16", "16": "fp16", "bfloat16": "bf16", "float32": "fp32",
    "0": "none", "1": "basic", "o1": "basic", "2": "extended", "o2": "extended", "3": "full", "o3": "full",
    "all": "full", "max": "full", "cuda": "gpu", "static": "qdq",
}  # fmt: skip
"""Value in other tools → value of winml."""


def value_synonym(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a value of another tool means; ``None`` if there is none."""
    meant = _VALUES.get(value.lower(), "")
    return meant if meant in {*choices} else None


def unknown_command(name: str, arguments: Sequence[str], commands: Mapping[str, click.Command]) -> UsageError | None:
    """Return the error for a command of another tool; ``None`` if the name is not known.

    Args:
        name: The name that was typed.
        arguments: The arguments after the name.
        commands: Name → command of winml.
    """
    if name == "help":
        rest = next((word for word in arguments if word in commands), "")
        return _error(f"no command {name!r}", [f"winml {rest} --help".replace("  ", " ")])
    if name in _SERVING.split():
        hint = (
            "winml has no server. It writes the folder that a server reads: winml build MODEL -o built; "
            "with --layout genai for onnxruntime-genai."
        )
        return UsageError(f"no command {name!r}", hint=hint)
    templates = next((lines for words, lines in _COMMANDS.items() if name in words.split()), None)
    if templates is None:
        return None
    if templates.startswith("export") and any(word.lower().endswith(MODEL_SUFFIX) for word in arguments[:1]):
        templates = _OF_ONNX  # an export starts from PyTorch
    return _error(f"no command {name!r}", [_filled(line, arguments, commands) for line in templates.split("; ")])


def _filled(template: str, arguments: Sequence[str], commands: Mapping[str, click.Command]) -> str:
    """Return the command line of a template, with the synonyms among the arguments replaced."""
    verb, *words = template.split()
    if verb not in commands or "{}" not in words:
        return f"winml {template}"
    start = words.index("{}")
    corrected = _corrected_arguments(commands[verb], arguments, beside=start) or list(arguments) or ["MODEL"]
    line = [*words[:start], *corrected, *words[start + 1 :]]
    missing = [(flag, str(param.name).upper()) for flag, param in _open_options(commands[verb], line) if param.required]
    return shlex.join(["winml", verb, *line, *(word for pair in missing for word in pair)])


def misunderstood_arguments(
    command: click.Command, command_path: str, arguments: Sequence[str], problem: str
) -> UsageError | None:
    """Return the error for arguments that another tool would take; ``None`` if no synonym is known.

    Args:
        command: The command.
        command_path: Its name with that of the program.
        arguments: The arguments of the command.
        problem: What is wrong with them.
    """
    corrected = _corrected_arguments(command, arguments)
    return None if corrected is None else _error(problem, [shlex.join([*command_path.split(), *corrected])])


def _error(problem: str, lines: Sequence[str]) -> UsageError:
    return UsageError(problem, hint=f"Type: {'  or: '.join(lines)}")


def _corrected_arguments(command: click.Command, arguments: Sequence[str], *, beside: int = 0) -> list[str] | None:
    """Return the arguments with every known synonym replaced; ``None`` if nothing is replaced.

    Args:
        command: The command.
        arguments: Its arguments.
        beside: Number of positional arguments that stand before them.
    """
    options = {
        name: param
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }
    parameters = {str(param.name): param for param in command.params}
    positionals = [param.nargs for param in command.params if isinstance(param, click.Argument)]
    free = len(arguments) if -1 in positionals else max(sum(positionals) - beside, 0)
    free -= any(name in arguments for name in ("-m", "--model")) and POSITIONAL in parameters
    words, corrected, surplus = list(arguments), list[str](), list[str]()
    is_changed = False
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("-") or word == "-":
            (corrected if free > 0 else surplus).append(word)
            free -= 1
        elif name in options or word[:2] in options:
            corrected.append(word)
            takes_value = not (equals or _is_flag(options.get(name))) and name in options
            corrected += [words.pop(0)] if takes_value and words else []
        elif (meant := _meant_option(name, parameters)) is not None:
            is_changed = True
            option, template = meant
            if "{}" in template:
                value = value if equals else words.pop(0) if words else ""
                choices = [*map(str, option.type.choices)] if isinstance(option.type, click.Choice) else ()
                is_whole = template.endswith(" {}")
                value = value_synonym(value, choices) or value if is_whole else value
                template = template.replace("{}", shlex.quote(value) if is_whole else value)
            corrected += shlex.split(template)
        else:
            return None  # whether it takes a value is unknown
    for word in surplus:
        flag = next((name for name, param in _open_options(command, corrected) if _may_be(param, word, command)), None)
        is_changed = is_changed or flag is not None
        corrected += [word] if flag is None else [flag, word]
    return corrected if is_changed else None


def _meant_option(word: str, parameters: Mapping[str, click.Parameter]) -> tuple[click.Parameter, str] | None:
    """Return parameter and spelling of an option of another tool; ``None`` if the command has no such option."""
    key = word.replace("_", "-")
    return next(
        ((parameters[name], text) for names, name, text in _OPTIONS if key in names.split() and name in parameters),
        None,
    )


def _is_flag(parameter: click.Option | None) -> bool:
    return parameter is not None and (parameter.is_flag or parameter.count)


def _open_options(command: click.Command, arguments: Sequence[str]) -> Iterator[tuple[str, click.Option]]:
    """Yield flag and option of what the arguments leave open: required options, then the output."""
    for param in sorted(command.params, key=lambda param: not param.required):
        is_meant = param.required or param.name == "output"
        if isinstance(param, click.Option) and is_meant and not {*param.opts} & {*arguments}:
            yield min(param.opts, key=len), param


def _may_be(param: click.Option, word: str, command: click.Command) -> bool:
    """Return True if a further positional argument may stand for an option."""
    return param.required or command.name not in _RECORDING or word.lower().endswith(".json")
