"""Kernels of a provider in the installed ONNX Runtime, and lookup of a kernel for a node.

Providers that compile parts of a graph have no kernels; they are queried by ``placement_query``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnxruntime as ort

from winml.modelkit.errors import NoAnswerError, StageError, opt
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.ort.device_trace import take_device_trace, without_node_name
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.graph_inputs import element_type
from winml.modelkit.ort.processes import AnsweringProcess, ProcessEndedError
from winml.modelkit.records import Record

_QUERY = "winml.modelkit.ort.placement_query"


def ask_onnxruntime(question: Mapping[str, object], who: str, seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Ask ONNX Runtime one question in a separate process; see :meth:`RuntimeProcess.ask`.

    Args:
        question: As ``placement_query`` takes it.
        who: Subject of the messages.
        seconds: Time limit of the process.

    Raises:
        StageError: the process ended without an answer, or did not answer in time.
    """
    with RuntimeProcess.open(who) as runtime:
        return runtime.ask(question, seconds)


@dataclass
class RuntimeProcess:
    """ONNX Runtime in a separate process that answers questions, and the log of the process."""

    who: str
    """Subject of the messages."""
    process: AnsweringProcess
    log: Path
    _read_bytes: int = 0
    """Length of the log before the present question."""

    @classmethod
    @contextlib.contextmanager
    def open(cls, who: str) -> Iterator[RuntimeProcess]:
        """Yield ONNX Runtime in a process whose working directory is temporary: providers write files into it."""
        with temporary_folder() as folder:
            log = folder / "log.txt"
            with (
                log.open("ab") as stream,
                closing(AnsweringProcess(_QUERY, errors=stream, folder=folder)) as process,
            ):
                yield cls(who, process, log)

    def ask(self, question: Mapping[str, object], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
        """Ask a question.

        Args:
            question: As ``placement_query`` takes it.
            seconds: Time limit of the process.

        Returns:
            The answer, with the printed ``copies`` of values between the CPU and the device; and node name → reason why
            the provider does not run the node, from trace or log.

        Raises:
            NoAnswerError: the process did not answer in time. The next question starts another process.
            StageError: the process ended without an answer; likewise.
        """
        try:
            reported: dict[str, Any] = self.process.ask(question, seconds=seconds)
        except (TimeoutError, ProcessEndedError) as error:
            kind, problem = StageError, "terminated its process without a result"
            if isinstance(error, TimeoutError):
                kind, problem = NoAnswerError, f"did not respond within {error}; its process was terminated"
            raise kind(
                f"{self.who} {problem}",
                hint=f"{_last_line(self.log)} Use different {opt.ep_options}, or a different {opt.ep}.".strip(),
            ) from None
        trace = take_device_trace(self.log.parent)
        with self.log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(self._read_bytes)
            reasons = {**reasons_in_log(lines), **trace.reasons}
            lines.seek(self._read_bytes)
            copies = copies_in_log(lines)
        self._read_bytes = self.log.stat().st_size
        return {**reported, "copies": copies}, reasons


def _last_line(log: Path) -> str:
    """Return the last line of a log as a sentence; empty for an empty log."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((f"Last log line: {line.strip()[:200]}." for line in reversed(lines) if line.strip()), "")


_NO_END = 2**31 - 1
"""Specified by ONNX Runtime: the last version of a kernel that has none."""
_SECONDS = 300
"""Chosen: the list is there within two."""


@dataclass(frozen=True)
class TypedNode:
    """Properties of a node that decide its kernel."""

    op_type: str
    domain: str
    """Empty for ONNX's own."""
    inputs: Sequence[str | None]
    """Element type of each input with numpy's name; None if unknown or absent."""
    outputs: Sequence[str | None]


@dataclass(frozen=True)
class _Kernel:
    """A kernel of a provider: opset versions and element types."""

    first: int
    last: int
    types: Mapping[str, frozenset[str]]
    """Type parameter, or name of an input or output → element types."""


@dataclass(frozen=True)
class _Schema:
    """A version of an operator: formal inputs and outputs."""

    since_version: int
    inputs: Sequence[tuple[str, str]]
    """Name and type parameter of each."""
    outputs: Sequence[tuple[str, str]]


_Operator = tuple[str, str]
"""Domain and name."""


@dataclass(frozen=True)
class KernelTable:
    """The kernels of one provider."""

    kernels: Mapping[_Operator, Sequence[_Kernel]]
    schemas: Mapping[_Operator, Sequence[_Schema]]
    opsets: Mapping[str, int]
    """Domain → its version in the graph."""

    def refusal(self, node: TypedNode) -> tuple[str, str] | None:
        """Return the reason why no kernel fits a node:

        ``operator`` or ``dtype``, and a text; `None` if a kernel fits.
        """
        schema = self._find_schema(node)
        if schema is None:
            return "operator", "ONNX Runtime does not know it"
        if self._is_composed(node, schema):
            return None
        kernels = self.kernels.get((node.domain, node.op_type), ())
        if not kernels:
            return "operator", "no kernel"
        version = schema.since_version
        # The rule of ONNX Runtime's registry.
        fitting = [
            kernel for kernel in kernels if kernel.first == version or kernel.first < version <= kernel.last != _NO_END
        ]
        if not fitting:
            newest = max(kernel.first for kernel in kernels)
            return "operator", f"no kernel for its version {version}; the newest is {newest}"
        actual = _types_by_parameter(node, schema)
        if any(all(actual.get(name, set()) <= kernel.types[name] for name in kernel.types) for kernel in fitting):
            return None
        return "dtype", _type_words(fitting, actual)

    def _find_schema(self, node: TypedNode) -> _Schema | None:
        """Return the schema of a node's operator at the graph's opset; `None` for an unknown operator."""
        opset = self.opsets.get(node.domain, 1)
        candidates = [
            schema for schema in self.schemas.get((node.domain, node.op_type), ()) if schema.since_version <= opset
        ]
        return max(candidates, key=lambda schema: schema.since_version, default=None)

    def _is_composed(self, node: TypedNode, schema: _Schema) -> bool:
        """Return True if ONNX Runtime expands the ONNX function body of an operator without a kernel."""
        if (node.domain, node.op_type) in self.kernels:
            return False
        try:
            defined = onnx.defs.get_schema(node.op_type, schema.since_version, node.domain)
        except onnx.defs.SchemaError:
            return False
        return is_composed(defined)


def is_composed(schema: Any) -> bool:
    """Return True if ONNX defines an operator by a function of other operators.

    Args:
        schema: An ``onnx.defs.OpSchema``; its type stubs lack these attributes.
    """
    return bool(schema.has_function or schema.has_context_dependent_function)


def kernel_table(provider: str, opsets: Mapping[str, int]) -> KernelTable | None:
    """List the kernels of a provider; `None` if the provider lists no kernel.

    Args:
        provider: Name in ONNX Runtime.
        opsets: Domain → version, as the graph imports them.

    Raises:
        StageError: the listing process crashed, or exceeded its time limit.
    """
    kernels, schemas = _list_kernels(provider)
    return KernelTable(kernels, schemas, opsets) if kernels else None


@functools.cache
def _list_kernels(provider: str) -> tuple[dict[_Operator, list[_Kernel]], dict[_Operator, list[_Schema]]]:
    """Return the kernels of a provider and all operator schemas, by operator; queried in a separate process."""
    kernels: dict[_Operator, list[_Kernel]] = defaultdict(list)
    schemas: dict[_Operator, list[_Schema]] = defaultdict(list)
    reported, _ = ask_onnxruntime({"kernels_of": provider}, provider, _SECONDS)
    for domain, name, first, last, types in reported["kernels"]:
        allowed = {key: frozenset(map(element_type, names)) for key, names in types.items()}
        kernels[_normalize_domain(domain), name].append(_Kernel(first, last, allowed))
    for domain, name, since, inputs, outputs in reported["schemas"]:
        schemas[_normalize_domain(domain), name].append(
            _Schema(since, list(map(tuple, inputs)), list(map(tuple, outputs)))
        )
    return kernels, schemas


def _normalize_domain(domain: str) -> str:
    """Return the domain as in a graph; the ONNX domain is empty."""
    return "" if domain == "ai.onnx" else domain


def _types_by_parameter(node: TypedNode, schema: _Schema) -> dict[str, set[str]]:
    """Return the element types of a node by type parameter, and by name of the input or output."""
    types: dict[str, set[str]] = defaultdict(set)
    for values, formal in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for index, dtype in enumerate(values):
            if dtype is not None and formal:
                for key in formal[min(index, len(formal) - 1)]:  # the last may stand for any number
                    types[key].add(dtype)
    return types


def _type_words(kernels: Sequence[_Kernel], actual: Mapping[str, set[str]]) -> str:
    """List the element types of the parameters for which no kernel accepts the node."""
    allowed: dict[str, set[str]] = defaultdict(set)
    for kernel in kernels:
        for name, types in kernel.types.items():
            allowed[name] |= types
    wrong = [types for name, types in allowed.items() if not actual.get(name, set()) <= types]
    if not wrong:
        return "no kernel for this combination of types"
    return "kernels take " + "; ".join(", ".join(sorted(types)) for types in wrong)


_NODE = re.compile(r"Operator type: \S+ Node name: (.*?) Node index: \d+")
_REASON = re.compile(r"^\s*REASON : (.*\S)")
"""Format in QNN's log of a refused unit's nodes, followed by the reason."""
_WITHOUT_KERNEL = re.compile(r"kernel not found in registries for Op type: \S+ node name: (.+?)\s*(?:\x1b\[m)?$")
_COMPUTES_SIZES = re.compile(r"Force fallback to CPU execution for node:? (.+?) because the CPU execution path")
"""Format in the log of providers with kernels, and of ONNX Runtime for nodes that it moves to the CPU."""
AT_THE_EDGE = ("consume a graph input", "produce a graph output", "generate a graph output")
"""Messages of QNN for a conversion of an input or output that it leaves to the CPU provider, as it does by default."""
NO_KERNEL = "it has no kernel of this operator for these types at this opset"
SIZES_ON_CPU = "ONNX Runtime computes sizes on the CPU, where the readers of the result expect them"
_COPY = re.compile(r"Add (MemcpyFromHost|MemcpyToHost)\S* (?:after|before) (\S+) for ")
"""Format of ONNX Runtime's log of an inserted copy, with the name of the value."""
_ASSIGNMENT_SECONDS = 1800
"""Chosen: half an hour to compile a graph."""
_COMPILATION_SECONDS = 86_400
"""Chosen: a day; a waiting user can end the command."""


@dataclass(frozen=True)
class AssignedNode:
    """A node as presented to providers by a session: after folding and fusion."""

    name: str
    op_type: str
    domain: str
    is_assigned: bool
    """True if the provider runs it; else the CPU provider does."""


class CopiedValue(NamedTuple):
    """A value that is copied in each run between a node on the CPU and a node on the device."""

    name: str
    to_device: bool


@dataclass(frozen=True)
class Assignment:
    """Nodes of a graph, with their assignment to a provider."""

    nodes: tuple[AssignedNode, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of an unassigned node → reason, if the provider states it."""
    problem: str = ""
    """Reason why no session could be opened; then there are no nodes."""
    copies: tuple[CopiedValue, ...] = ()
    """Values that are copied between nodes on the CPU and nodes on the device in each run."""


def reports_placement() -> bool:
    """Return True if the installed ONNX Runtime reports the assignment of nodes to providers."""
    return hasattr(ort.InferenceSession, "get_provider_graph_assignment_info")


def find_assignment(model: Path, chosen: ChosenProvider) -> Assignment:
    """Find the nodes of a file assigned to a provider. Compiling providers compile the nodes, which may take long.

    Args:
        model: An ONNX file, with its data files in the same folder.
        chosen: The provider, its device and options.

    Raises:
        StageError: the process ended without an answer, or exceeded its time limit.
    """
    question = {
        "model": str(model.absolute()),
        "providers": list(chosen.names),
        "options": _session_options(chosen),
        "as_compiled": chosen.provider.compiles,
    }
    return read_placement(chosen.provider.name, *ask_onnxruntime(question, chosen.provider.name, _ASSIGNMENT_SECONDS))


def _session_options(chosen: ChosenProvider) -> dict[str, str]:
    """Return the provider options of a session in a process of its own, which writes traces into its folder."""
    return {**chosen.provider.trace_options("."), **chosen.options}


@dataclass(frozen=True)
class CompiledByProvider:
    """Result of compiling a file."""

    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of an unassigned node → reason, if the provider states it."""
    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operator on the device → names of its source nodes; ``{}`` if the provider writes no trace."""
    problem: str = ""
    """Reason why the file was not written; ``""`` on success."""
    refused_options: str = ""
    """Reason why the provider refuses its options; ``""`` if accepted."""


def compile_to_files(
    files: Mapping[Path, Path], chosen: ChosenProvider, *, embed: bool
) -> dict[Path, CompiledByProvider]:
    """Compile files with a provider, and write the compiled models; several ones share their weights.

    Return file → result, up to the first file that fails.

    Args:
        files: ONNX file, with its data files in the same folder → file to write.
        chosen: The provider, its device and options.
        embed: Store the compiled content inside the models.

    Raises:
        StageError: the process ended without an answer, or exceeded its time limit.
    """
    pairs = [[str(source.absolute()), str(target.absolute())] for source, target in files.items()]
    question = {"compile": pairs, "embed": embed, "providers": list(chosen.names), "options": _session_options(chosen)}
    reported, logged = ask_onnxruntime(question, chosen.provider.name, _COMPILATION_SECONDS)
    return {
        source: CompiledByProvider(
            {**logged, **answer.get("reasons", {})},
            {name: tuple(sources) for name, sources in answer.get("operators", {}).items()},
            answer.get("problem", ""),
            answer.get("refused_options", ""),
        )
        for source, answer in zip(files, reported["compiled"], strict=False)
    }


def read_placement(name: str, reported: Mapping[str, Any], reasons: Mapping[str, str]) -> Assignment:
    """Parse the placement reported by a session.

    Args:
        name: The provider.
        reported: The answer of the process.
        reasons: Name of an unassigned node → reason.
    """
    if "problem" in reported:
        return Assignment(reasons=reasons, problem=reported["problem"])
    nodes = tuple(AssignedNode(node, op_type, domain, ep == name) for ep, node, op_type, domain in reported["assigned"])
    return Assignment(nodes, reasons, copies=tuple(CopiedValue(*copy) for copy in reported.get("copies", ())))


def reasons_in_log(lines: Iterable[str]) -> dict[str, str]:
    """Parse node name → reason why a provider does not run the node, from the provider's log."""
    reasons: dict[str, str] = {}
    names: list[str] = []
    for line in lines:
        if match := _NODE.search(line):
            names.append(match[1])
        elif match := _WITHOUT_KERNEL.search(line):
            reasons[match[1]] = NO_KERNEL
        elif match := _COMPUTES_SIZES.search(line):
            reasons[match[1]] = SIZES_ON_CPU
        elif match := _REASON.match(line):
            reasons |= dict.fromkeys(names, without_node_name(match[1]))
            names = []
        elif line.strip():
            names = []
    return reasons


def copies_in_log(lines: Iterable[str]) -> list[tuple[str, bool]]:
    """Parse the values that are copied between the CPU and the device, True for copies to the device, from a log."""
    matches = filter(None, map(_COPY.search, lines))
    return [(match[2], match[1] == "MemcpyFromHost") for match in matches]


_TABLES = Path(__file__).with_name("documented_operators.json")
"""Operators that providers document as supported. Operators missing in a document are not in its table."""


class DocumentedOperator(Record):
    """One operator of a table."""

    limit: str = ""
    """Documented limitation of the operator; ``""`` for none."""
    types: tuple[str, ...] = ()
    """Element types of its first input; ``()`` if the document lists none."""
    devices: tuple[str, ...] = ()
    """Kinds of devices that it is limited to; ``()`` for no limit."""


class OperatorTable(Record):
    """The documented operators of a provider."""

    source: str
    """Address of the document."""
    version: str
    """Documented version."""
    operators: Mapping[str, DocumentedOperator]
    """Operator, with its domain unless ONNX's (``com.microsoft.Gelu``) → its documentation."""
    also: Mapping[str, str] = field(default_factory=dict)
    """Operators that run as part of a pattern only → the pattern, in words."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """Element type that is converted → conversion, as text."""
    opsets: tuple[int, int] | None = None
    """Oldest and newest opset; None if the document states none."""
    caveat: str = ""
    """Further documented remark on the table; ``""`` for none."""


def operator_table(short: str) -> OperatorTable | None:
    """Return the table of a provider by its short name; None without a table."""
    table = _load_tables().get(short)
    return None if table is None else OperatorTable.from_fields(table)


def documented_providers() -> tuple[str, ...]:
    """Return the short names of the providers with a table."""
    return tuple(_load_tables())


@functools.cache
def _load_tables() -> dict[str, Any]:
    tables: dict[str, Any] = json.loads(_TABLES.read_text(encoding="utf-8"))
    return tables
