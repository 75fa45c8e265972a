"""Words of other tools and the command line of winml that does the same.

An unknown command or option is refused with the command line to type instead. Every known synonym in it is replaced,
each on its own, and a second positional argument becomes the output. A line is suggested only if its command takes it.
"""

from __future__ import annotations

import difflib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

import click

from winml.modelkit.cli._help import IS_SUGGESTION, POSITIONAL
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import MODEL_SUFFIX
from winml.modelkit.words import command_line

_COMMANDS: Mapping[str, str] = {
    "convert onnx to-onnx to_onnx import trace convert-model capture-onnx-graph": "export {}",
    "benchmark bench time latency speed measure": "perf {}",
    "profile profiler": "perf {} --by-module",
    "info show summary describe view print stats analyze analyse": "inspect {}",
    "tree layers modules hierarchy": "inspect {} --hierarchy",
    "optimise simplify fuse slim simplification sim onnxsim optimizer": "optimize {}",
    "quant quantise quantization compress": "quantize {}",
    "int8": "quantize {} -p int8",
    "int4": "quantize {} -p int4",
    "fp16": "quantize {} -p fp16",
    "deploy package pack bundle make pipeline auto-opt": "build {}",
    "predict infer inference classify embed execute pipe": "run {}",
    "chat": "generate {} --chat -p Hello",
    "complete text": "generate {}",
    "validate test check accuracy-check": "verify {}; compare REFERENCE {}; eval {} --dataset DATA",
    "evaluate score accuracy": "eval {}",
    "split cut slice subgraph": "extract {}",
    "autotune search auto tuning session-params-tuning tune-session-params": "tune {}",
    "tag": "retag {}",
    "init plan": "config {}",
    "clean prune": "cache clean",
    "devices providers env environment doctor hardware list list-eps list-devices eps": "sys",
    "version": "--version",
}
"""Words of other tools → command lines of winml, separated by semicolons; ``{}`` stands for the arguments."""

_OF_ONNX = "optimize {}; quantize {} -p fp16"
"""Command lines that convert an ONNX file."""
_RECORDING = frozenset({"compare", "diff", "eval", "inspect", "perf", "run"})
"""Commands whose output is a JSON record, no model."""
_SERVING = "serve server serving"
_RUNTIMES = "onnxruntime ort optimum olive transformers genai"
"""Words before the command in other tools: ``optimum-cli onnxruntime quantize``."""
_FORMAT = "onnx"
"""Word before the model in other tools: ``optimum-cli export onnx``."""
_HELP = frozenset({"-h", "--help", "--help-all"})
_OUTPUTS: Mapping[str, str] = {
    "build": "built", "compile": "compiled", "export": "model", "extract": "parts", "quantize": "quantized",
    "sweep": "swept", "tune": "tuned",
}  # fmt: skip
"""Command that requires an output → name of its folder; a file has the suffix of a model."""
_OF_FILES = frozenset({"compile", "export", "quantize"})
"""Commands that make a file of a file."""
_WITHOUT_OUTPUT = frozenset({"--sensitivity", "--list", "--use-cache", *_HELP})
"""Options of these commands that write no output."""

_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--json", "format_", "-f json"),
    ("--bits --nbits --wbits --w-bits --weight-bits --num-bits", "precision", "-p int{}"),
    ("--quantize --quantization --quant --qtype --weight-format --quant-type --type --dtype --data-type --weight-type",
     "precision", "-p {}"),
    ("--precision -p --type --data-type --torch-dtype", "dtype", "--dtype {}"),
    ("--group-size --groupsize --blocksize --block", "block_size", "--block-size {}"),
    ("--avx2 --avx512 --avx512-vnni --arm64", "mode", "--mode dynamic"),
    ("--half --float16 --fp16", "precision", "-p fp16"),
    ("--half --float16 --fp16", "dtype", "--dtype fp16"),
    ("--bfloat16 --bf16", "dtype", "--dtype bf16"),
    ("--int8 --8bit --load-in-8bit", "precision", "-p int8"),
    ("--int4 --4bit --load-in-4bit", "precision", "-p int4"),
    ("--dynamic-quant --dynamic-quantization", "mode", "--mode dynamic"),
    ("--static --static-quant", "mode", "--mode qdq"),
    ("--method --quant-method --quantization-mode --quant-mode --scheme", "mode", "--mode {}"),
    ("-O0", "level", "--level none"),
    ("-O1", "level", "--level basic"),
    ("-O2", "level", "--level extended"),
    ("-O3 -O4 -Ofast", "level", "--level full"),
    ("-O --optimize --opt-level --optimization-level", "level", "--level {}"),
    ("--opset-version --target-opset", "opset_version", "--opset {}"),
    ("--feature --pipeline --pipeline-tag", "task", "-t {}"),
    ("--monolith", "cache", "--no-cache"),
    ("--no-dynamic-axes --static-shapes --no-dynamic", "fixed_sizes", "--fixed-sizes"),
    ("--input --model-path --model-name --model-name-or-path --model-id --source --src -i", "model", "-m {}"),
    ("--onnx --onnx-model --onnx-model-path --hf-model --pretrained --checkpoint --ckpt", "model", "-m {}"),
    ("--out --output-dir --output-path --output-file --output-model", "output", "-o {}"),
    ("--out-dir --dest --save-dir --save --output-json --json-output", "output", "-o {}"),
    ("--force --yes -y", "overwrite", "--overwrite"),
    ("--batch --bs -b", "batch_size", "--batch-size {}"),
    ("--batch --bs -b --batch-size", "shape_config", "--shape-config batch_size={}"),
    ("--batch --bs -b --batch-size", "sizes", "--shape-config batch_size={}"),
    ("--seq-len --seq-length --sequence-length --max-length --max-seq-len --max-seq-length", "shape_config",
     "--shape-config sequence_length={}"),
    ("--seq-len --seq-length --sequence-length --max-length", "sizes", "--shape-config sequence_length={}"),
    ("--height", "shape_config", "--shape-config height={}"),
    ("--width", "shape_config", "--shape-config width={}"),
    ("--dynamic --dynamic-shapes --dynamic-shape", "dynamic_batch", "--dynamic-batch --dynamic-seq-len"),
    ("--provider --providers --execution-provider --execution-providers --backend --target -e", "ep", "--ep {}"),
    ("--soc-model --soc", "ep_options", "--ep-options soc_model={}"),
    ("--cuda --gpu", "device", "--device gpu"),
    ("--npu", "device", "--device npu"),
    ("--cpu", "device", "--device cpu"),
    ("--runs --num-runs --repeat --repeats --iters --iter --loops --n-runs -n", "iterations", "--iterations {}"),
    ("--warm-up --warmup-runs --num-warmup --warmups", "warmup", "--warmup {}"),
    ("--time --seconds", "duration", "--duration {}"),
    ("--time --time-limit --timeout --minutes --max-time", "budget_minutes", "--budget {}"),
    ("--num-threads --n-threads --intra-op-num-threads --intra-op", "threads", "--threads {}"),
    ("--calib --calibration --calib-data --calib-dataset --calibration-dataset --data", "calibration_data",
     "--calibration-data {}"),
    ("--data --data-set --dataset-name", "dataset", "--dataset {}"),
    ("--ignore --skip --skip-layers --nodes-to-exclude --keep-float --exclude-layers --exclude-module", "exclude",
     "--exclude {}"),
    ("--only --nodes-to-quantize", "include", "--include {}"),
    ("--per-layer --by-layer --layers --modules --profile --breakdown", "by_module", "--by-module"),
    ("--tree --layers --modules", "hierarchy", "--hierarchy"),
    ("--layers --layer --submodule --block", "module", "--module {}"),
    ("--tolerance --tol --atol --rtol --max-error", "threshold", "--threshold {}"),
    ("--html", "report", "--report {}"),
    ("--prompt --input-text --sentence", "text", "--text {}"),
    ("--img --image-path --image-file --picture", "image", "--image {}"),
    ("--wav --audio-path --audio-file --sound", "audio", "--audio {}"),
    ("--labels --candidate-labels", "label", "--label {}"),
    ("--question", "inputs", "--input question={}"),
    ("--context", "inputs", "--input context={}"),
    ("--text-pair --text2", "inputs", "--input text_pair={}"),
    ("--text --input --question", "prompt", "-p {}"),
    ("--max-tokens --max-length --max-new --num-tokens --n-predict -n", "max_new_tokens", "--max-new-tokens {}"),
    ("--temp", "temperature", "--temperature {}"),
    ("--against --ref --reference --compare", "baseline", "--baseline {}"),
    ("--num-samples --nsamples --n-samples --num-calib-samples --calib-samples --limit --max-samples", "samples",
     "--samples {}"),
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


_UNITS_S: Mapping[str, float] = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600}
"""Unit of a time → seconds."""
_UNITS_OF_METAVARS: Mapping[str, float] = {"SECONDS": 1, "MINUTES": 60}
"""Placeholder of an option → seconds of its unit."""
_NUMBER = re.compile(r"\d+(\.\d+)?")
_LEAST_RATIO = 0.8
"""Chosen: similarity of the names of two options from which one is a typo of the other."""
_MOST_TAKERS = 3
"""Chosen: commands that a sentence names for an option."""


def value_synonym(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a value of another tool means; ``None`` if there is none."""
    meant = _VALUES.get(value.lower(), value.lower())
    return meant if meant in {*choices} else None


def unknown_command(name: str, arguments: Sequence[str], commands: Mapping[str, click.Command]) -> UsageError | None:
    """Return the error for a command of another tool; ``None`` if the name is not known.

    Args:
        name: The name that was typed.
        arguments: The arguments after the name.
        commands: Name → command of winml.
    """
    problem = f"no command {name!r}"
    if name == "help":
        rest = next((word for word in arguments if word in commands), "")
        return _error(problem, [f"winml {rest} --help".replace("  ", " ")])
    if name in _SERVING.split():
        hint = (
            "winml has no server. It writes the folder that a server reads: winml build MODEL -o built; "
            "with --layout genai for onnxruntime-genai."
        )
        return UsageError(problem, hint=hint)
    if name in _RUNTIMES.split() and arguments:
        name, *arguments = arguments
    templates = next((lines for words, lines in _COMMANDS.items() if name in words.split()), None)
    if templates is None and name in commands:
        templates = f"{name} {{}}"
    if templates is None:
        return None
    if templates.startswith("export") and any(word.lower().endswith(MODEL_SUFFIX) for word in arguments[:1]):
        templates = _OF_ONNX  # an export starts from PyTorch
    filled = [_fill_template(template, arguments, commands) for template in templates.split("; ")]
    return _error(problem, [line for line, _ in filled], [name for _, names in filled for name in names])


def _fill_template(
    template: str, arguments: Sequence[str], commands: Mapping[str, click.Command]
) -> tuple[str, Sequence[str]]:
    """Return the command line of a template with the synonyms among the arguments replaced, and omitted options."""
    verb, *words = template.split()
    if verb not in commands or "{}" not in words:
        return f"winml {template}", ()
    start = words.index("{}")
    translation = _Translation(commands[verb], arguments, beside=start)
    line = [*words[:start], *(translation.words or ["MODEL"]), *words[start + 1 :]]
    completed = _complete_line(commands[verb], line)
    if not _is_parsed(commands[verb], completed):
        completed = ["--help"]
    return command_line(["winml", verb, *completed]), translation.omitted


def misunderstood_arguments(context: click.Context, arguments: Sequence[str], problem: str) -> UsageError | None:
    """Return the error for arguments that another tool would take; ``None`` if no synonym is known.

    Args:
        context: Context of the command.
        arguments: The arguments of the command.
        problem: What is wrong with them.
    """
    command = context.command
    translation = _Translation(command, arguments)
    unknown = translation.unknown
    if len(unknown) > 1:
        problem = f"no such options {', '.join(unknown)}"
    line = _complete_line(command, translation.words)
    if (translation.is_changed or len(unknown) > 1) and _is_parsed(command, line):
        error = _error(problem, [command_line([*context.command_path.split(), *line])], translation.omitted)
        error.hint = " ".join([error.hint, *_describe_takers(context, translation.omitted)])
        return error
    takers = _describe_takers(context, unknown)
    return UsageError(problem, hint=" ".join(takers)) if takers else None


def _error(problem: str, lines: Sequence[str], omitted: Sequence[str] = ()) -> UsageError:
    without = f" (without {', '.join(dict.fromkeys(omitted))})" if omitted else ""
    return UsageError(problem, hint=f"Type: {'  or: '.join(lines)}{without}")


def _describe_takers(context: click.Context, names: Iterable[str]) -> list[str]:
    """Return a sentence for each option that other commands have."""
    root = context.find_root()
    group = root.command
    if not isinstance(group, click.Group):
        return []
    paths = {verb: f"winml {verb}" for verb in group.list_commands(root)}
    commands = {path: group.get_command(root, verb) for verb, path in paths.items() if path != context.command_path}
    takers = {
        name: [path for path, command in commands.items() if command is not None and name in _options_by_name(command)]
        for name in names
    }
    return [f"{name} is an option of {', '.join(paths[:_MOST_TAKERS])}." for name, paths in takers.items() if paths]


def _complete_line(command: click.Command, words: Sequence[str]) -> list[str]:
    """Return the arguments of a command with placeholders for missing options, and a name for a missing output."""
    line = list(words)
    for flag, param in _open_options(command, words):
        output = _OUTPUTS.get(command.name or "") if param.name == "output" else None
        if output is not None and not _WITHOUT_OUTPUT & {*line}:
            is_of_file = command.name == "export" or any(word.lower().endswith(MODEL_SUFFIX) for word in line)
            line += [flag, f"{output}{MODEL_SUFFIX}" if is_of_file and command.name in _OF_FILES else output]
        elif param.required:
            line += [flag, str(param.name).upper()]
    return line


def _is_parsed(command: click.Command, line: Sequence[str]) -> bool:
    """Return True if a command takes a line of arguments."""
    context = command.context_class(command, info_name=command.name, **command.context_settings)
    context.meta[IS_SUGGESTION] = True
    try:
        with context.scope(cleanup=False):
            command.parse_args(context, [word for word in line if word not in _HELP])
    except (click.UsageError, UsageError):
        return False
    return True


class _Translation:
    """Arguments of a command with every known synonym replaced, each on its own.

    Attributes:
        words: The arguments of winml.
        is_changed: True if a synonym was replaced.
        unknown: Options that the command does not have.
        omitted: Options without a counterpart, which the words do not contain.
    """

    def __init__(self, command: click.Command, arguments: Sequence[str], *, beside: int = 0) -> None:
        """Translate the arguments.

        Args:
            command: The command.
            arguments: Its arguments.
            beside: Number of positional arguments that stand before them.
        """
        self._command, self._options = command, _options_by_name(command)
        self._parameters = {str(param.name): param for param in command.params}
        self.words, self.unknown, self.omitted = list[str](), list[str](), list[str]()
        self._sizes: dict[str, str] = {}
        self._rest, surplus = list(arguments), list[str]()
        self.is_changed = command.name == "export" and self._rest[:1] == [_FORMAT]
        if self.is_changed:
            self._rest.pop(0)
        positionals = [param.nargs for param in command.params if isinstance(param, click.Argument)]
        self._free = len(arguments) if -1 in positionals else max(sum(positionals) - beside, 0)
        named = (self._find_option(word.partition("=")[0]) for word in self._rest if word.startswith("-"))
        names_model = any(option is not None and option[0].name == "model" for option in named)
        self._free -= names_model and POSITIONAL in self._parameters
        while self._rest:
            word = self._rest.pop(0)
            if word.startswith("-") and word != "-":
                self._add_option(word)
            else:
                (self.words if self._free > 0 else surplus).append(word)
                self._free -= 1
        if self._sizes:  # as one option: the last of several would apply alone
            self.words += ["--shape-config", ",".join(f"{name}={size}" for name, size in self._sizes.items())]
        for word in surplus:
            open_options = _open_options(command, self.words)
            flag = next((name for name, param in open_options if _may_be(param, word, command)), None)
            self.is_changed |= flag is not None
            self.words += [word] if flag is None else [flag, word]

    def _find_option(self, name: str) -> tuple[click.Option, str] | None:
        """Return parameter and spelling of an option of winml or another tool; ``None`` if the command has none.

        ``{}`` in the spelling stands for the value.
        """
        dashed = name.replace("_", "-")
        for own in (name, dashed, f"-{dashed}"):  # --per_channel, -ep
            if own in self._options:
                return self._options[own], own if _is_flag(self._options[own]) else f"{own} {{}}"
        for names, parameter, spelling in _OPTIONS:
            param = self._parameters.get(parameter)
            if isinstance(param, click.Option) and dashed in names.split():
                return param, spelling
        return None

    def _is_surplus_next(self) -> bool:
        """Return True if the next word is a value of an unknown option: a number, or more than the command needs."""
        words = list(itertools.takewhile(lambda word: not word.startswith("-"), self._rest))
        outputs = len([*_open_options(self._command, [*self.words, *self._rest])])
        is_surplus = self._free <= 0 or len(words) > self._free + outputs
        return bool(words) and (is_surplus or _NUMBER.fullmatch(words[0]) is not None)

    def _add_option(self, word: str) -> None:
        """Add an option and its value, both as winml spells them."""
        if word in _HELP:
            self.words.append(word)
            return
        name, equals, value = word.partition("=")
        option = self._find_option(name)
        if option is None and word[:2] in self._options:  # -pint8
            name, equals, value = word[:2], "=", word[2:]
            option = self._find_option(name)
        if name not in self._options:
            self.unknown.append(name)
            self.is_changed |= option is not None
        option = option or self._find_similar(name)
        if option is None:
            self.omitted.append(name)
            if not equals and self._is_surplus_next():
                self._rest.pop(0)
            return
        param, spelling = option
        flag, *text = shlex.split(spelling)
        if "{}" not in spelling:
            self.words += [flag, *text]
            return
        if not equals and (not self._rest or self._rest[0] in self._options):
            self.words.append(flag)  # a value is missing, or optional
            return
        value = value if equals else self._rest.pop(0)
        if flag == "--shape-config" and text != ["{}"]:
            self._sizes[text[0].partition("=")[0]] = str(int(value)) if value.isdecimal() else value
            return
        replaced = _replace_value(self._command, param, text[0].replace("{}", value))
        self.is_changed |= replaced is not None
        self.words += replaced or [flag, text[0].replace("{}", value)]

    def _find_similar(self, name: str) -> tuple[click.Option, str] | None:
        """Return the option of the command that a misspelled name means; ``None`` if no name is similar."""
        flags = [flag for flag in self._options if flag.startswith("--")]
        similar = difflib.get_close_matches(name, flags, n=1, cutoff=_LEAST_RATIO)
        return self._find_option(similar[0]) if similar else None


def _options_by_name(command: click.Command) -> dict[str, click.Option]:
    """Return spelling → option of a command."""
    return {
        name: param
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def _replace_value(command: click.Command, param: click.Option, value: str) -> list[str] | None:
    """Return the words for a value of another tool; ``None`` if the option takes the value.

    A value of another option is moved there: ``--dtype int8`` is a precision, ``--device cuda`` a provider.
    """
    flag = max(param.opts, key=len) if param.name != "precision" else "-p"
    if isinstance(param.type, click.Choice):
        choices = [*map(str, param.type.choices)]
        if value in choices:
            return None
        ep = next((other for other in command.params if other.name == "ep"), None)
        if param.name == "device" and ep is not None:
            from winml.modelkit.ort.execution_providers import EXECUTION_PROVIDERS

            provider = value.lower().partition(":")[0].removesuffix("executionprovider")
            if provider in EXECUTION_PROVIDERS:
                return ["--ep", provider]
        if (meant := value_synonym(value, choices)) is not None:
            return [flag, meant]
        for other in command.params:
            if isinstance(other, click.Option) and other.name in ("precision", "dtype"):
                meant = value_synonym(value, map(str, getattr(other.type, "choices", ())))
                if meant is not None:
                    return ["-p" if other.name == "precision" else "--dtype", meant]
        return None
    unit_s = _UNITS_OF_METAVARS.get(param.metavar or "")
    measured = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", value)
    if unit_s is not None and measured is not None and measured[2] in _UNITS_S:
        return [flag, f"{float(measured[1]) * _UNITS_S[measured[2]] / unit_s:g}"]
    return None


def _is_flag(parameter: click.Option) -> bool:
    return bool(parameter.is_flag or parameter.count)


def _open_options(command: click.Command, arguments: Sequence[str]) -> Iterator[tuple[str, click.Option]]:
    """Yield flag and option of what the arguments leave open: required options, then the output."""
    for param in sorted(command.params, key=lambda param: not param.required):
        is_meant = param.required or param.name == "output"
        if isinstance(param, click.Option) and is_meant and not {*param.opts} & {*arguments}:
            yield min(param.opts, key=len), param


def _may_be(param: click.Option, word: str, command: click.Command) -> bool:
    """Return True if a further positional argument may stand for an option."""
    return param.required or command.name not in _RECORDING or word.lower().endswith(".json")
