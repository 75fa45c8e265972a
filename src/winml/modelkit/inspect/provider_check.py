"""Check of an execution provider on an ONNX file: supported nodes, and the reasons for unsupported nodes.

An installed provider is queried by a list of its kernels, or by a session with the file. For other providers, the
operator table of their documentation is used. No graph is run.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort

from winml.modelkit.errors import StageError, UsageError, opt
from winml.modelkit.inspect.provider_fit import Basis, Finding, FindingKind, ListedLimit, ModuleCopies, ProviderFit
from winml.modelkit.metadata_keys import COMPILE_KEY, FLOAT_SOURCE_KEY
from winml.modelkit.normalize.flat_files import flat_file, flatten
from winml.modelkit.onnx.contexts import refuse_compiled
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.reading import read_structure, reading_graph
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.onnx.module_tree import read_tree
from winml.modelkit.onnx.node_facts import GraphFacts, NodeFacts, read_facts
from winml.modelkit.optimize.capabilities import LEAST_STANDARD_OPSET
from winml.modelkit.options import load_metadata, load_metadata_record
from winml.modelkit.ort.default_sizes import fixing_command
from winml.modelkit.ort.device_trace import NO_REASON, CompiledNode, place_modules, read_compilation_trace
from winml.modelkit.ort.devices import (
    ChosenProvider,
    choose_provider,
    present_providers,
    processor_hint,
    provider_version,
)
from winml.modelkit.ort.execution_providers import Device, find_execution_provider, short_name
from winml.modelkit.ort.kernels import (
    AT_THE_EDGE,
    NO_KERNEL,
    SIZES_ON_CPU,
    CopiedValue,
    KernelTable,
    OperatorTable,
    TypedNode,
    documented_providers,
    find_assignment,
    is_composed,
    kernel_table,
    operator_table,
    reports_placement,
)
from winml.modelkit.ort.sessions import CPU
from winml.modelkit.quantize.placements import placement_for, refused_precisions
from winml.modelkit.words import count_noun

_ON_CPU = "The node runs on the CPU, with copies to and from the device"


def _dtype_remedies() -> dict[str, str]:
    """Element type → remedy for a node of this type."""
    return {
        "float64": f"Export again with {opt.dtype} fp32.",
        "bfloat16": f"Export again with {opt.dtype} fp32, or fp16.",
        "float16": f"Use the file before winml quantize --precision fp16, or export with {opt.dtype} fp32.",
        "float32": "Use fewer bits: winml quantize -m {path} -o half.onnx --precision fp16",
    }


def _composed_version(operator: str, facts: GraphFacts) -> int | None:
    """Return the opset that introduced an operator, if the operator had a function body from the start.

    `None` otherwise, for unknown operators, and for operators in every opset that both exporters support.
    """
    try:
        schema = onnx.defs.get_schema(operator, facts.opsets.get("", 1), "")
        with contextlib.suppress(onnx.defs.SchemaError):  # no earlier version
            while schema.since_version > 1:
                schema = onnx.defs.get_schema(operator, schema.since_version - 1, "")
    except onnx.defs.SchemaError:
        return None
    return schema.since_version if is_composed(schema) and schema.since_version > _OLDEST_EXPORT else None


def _is_newer_than_exports(operator: str, facts: GraphFacts) -> bool:
    """Return True if an operator of ONNX has another version in the graph than in the default opset of exports."""
    try:
        version = onnx.defs.get_schema(operator, facts.opsets.get("", 1), "").since_version
        onnx.defs.get_schema(operator, _OLDEST_EXPORT, "")
    except onnx.defs.SchemaError:
        return False
    return version > _OLDEST_EXPORT


_OLDEST_EXPORT = 17
"""Chosen: supported by both exporters."""


def checked_provider(ep: str, device: Device | None, options: Mapping[str, str]) -> ChosenProvider:
    """Return the provider to check, installed or not, before any file is read.

    Raises:
        UsageError: the provider is unknown, does not run on the device or has no such options; or it is not installed
            and has no operator table.
        StageError: the provider is a plug-in that the installed ONNX Runtime cannot load.
    """
    provider = find_execution_provider(ep)
    if provider.name in present_providers():
        return choose_provider(ep, device, options)
    if device is not None and device not in provider.devices:
        raise UsageError(
            f"{opt.device} {device}: {provider.name} runs on {' or '.join(provider.devices)}",
            hint=f"Omit {opt.device}, or use a different {opt.ep}.",
        )
    if operator_table(short_name(provider.name)) is None:
        raise UsageError(
            f"{opt.ep} {ep}: {provider.name} is not installed, and winml has no operator table for it",
            hint=f"winml sys shows how to install it. Operator tables exist for {', '.join(documented_providers())}.",
        )
    return ChosenProvider(provider, device or provider.devices[0], dict(options))


def check_provider(path: Path, ep: str, device: Device | None = None, options: Mapping[str, str] = {}) -> ProviderFit:
    """Check whether a provider runs a file.

    Args:
        path: An ONNX file.
        ep: Name of the provider, short or in ONNX Runtime.
        device: Kind of processor; None: the default of the provider.
        options: Options of the provider, if it is installed.

    Raises:
        UsageError: the provider is unknown, does not run on the device or has no such options; it is not installed and
            has no operator table; or it compiled the file for another device or with other options.
        InputError: the file is no ONNX model, or another provider compiled it.
        StageError: the installed provider cannot be loaded, ended its process, or gives no result and has no table.
    """
    return replace(_find_fit(path, ep, device, options), fingerprint=file_fingerprint(path))


def _find_fit(path: Path, ep: str, device: Device | None, options: Mapping[str, str]) -> ProviderFit:
    """Return the placement that the file records, else the answer of the provider, else that of its documentation."""
    if (fit := _read_compiled_fit(path, ep, device, options)) is not None:
        return fit
    checks = _NodeChecks.of(path, ep, device, options)
    queries = (checks.by_session, checks.by_kernels)
    # If the CPU provider supports all nodes, its kernels suffice: a session would read the weights.
    for query in (checks.by_own_kernels, *queries) if checks.is_cpu else queries if checks.is_present else ():
        if (fit := query()) is not None:
            return fit
    if checks.table is not None:
        return checks.by_document(checks.table)
    raise StageError(
        f"{opt.ep} {ep}: {checks.chosen.provider.name} is installed but does not respond: {checks.notes[-1]}",
        hint=f"Use different {opt.ep_options}, a different {opt.device}, or a different {opt.ep}; winml sys lists the "
        "installed ones.",
    )


def _read_compiled_fit(path: Path, ep: str, device: Device | None, options: Mapping[str, str]) -> ProviderFit | None:
    """Return the placement recorded in a file that the provider compiled; `None` for other files.

    Raises:
        UsageError: the provider is unknown, or compiled the file for another device or with other options.
        InputError: the file is no ONNX model.
    """
    model = read_structure(path)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    provider, trace = find_execution_provider(ep), read_compilation_trace(metadata)
    record = load_metadata_record(metadata.get(COMPILE_KEY, "{}"))
    if trace is None or record.get("provider") != provider.name:
        return None
    _refuse_other_request(path, record, device, options)
    tree = read_tree([*model.graph.node], metadata, path.stem)
    paths = {module.tag: module.path for module in tree.modules}
    outside: dict[tuple[str, str], list[CompiledNode]] = defaultdict(list)
    for node in trace.nodes:
        if node.reason is not None:
            outside[node.op_type, node.reason or NO_REASON].append(node)
    findings = [
        Finding(
            "refused",
            op_type,
            reason,
            f"{_ON_CPU}. Check the source file: winml inspect SOURCE.onnx --ep {short_name(provider.name)}",
            dict(Counter(paths.get(node.tag, node.tag) for node in nodes).most_common()),
            tuple(node.name for node in nodes),
        )
        for (op_type, reason), nodes in outside.items()
    ]
    return ProviderFit(
        provider=short_name(provider.name),
        name=provider.name,
        device=str(record.get("device", "")),
        basis="compilation",
        source=f"{provider.name} {record.get('provider_version', '')}, ONNX Runtime {record.get('onnxruntime', '')}",
        nodes=len(trace.nodes),
        taken=sum(node.reason is None for node in trace.nodes),
        findings=tuple(sorted(findings, key=lambda finding: -len(finding.nodes))),
        limits=(),
        notes=(),
        modules=trace.place_modules(paths),
    )


def _refuse_other_request(
    path: Path, record: Mapping[str, Any], device: Device | None, options: Mapping[str, str]
) -> None:
    """Refuse a device or options that differ from those of a compiled file, whose placement they cannot change.

    Raises:
        UsageError: names the first difference, and what the file was compiled with.
    """
    recorded = record.get("options")
    used = recorded if isinstance(recorded, dict) else {}
    hint = f"Omit it, or check the file that {path.name} was compiled from."
    if device is not None and device != record.get("device"):
        raise UsageError(f"{opt.device} {device}: {path} was compiled for the {record.get('device')}", hint=hint)
    for key, value in options.items():
        if used.get(key) != value:
            stated = f"{key}={used[key]}" if key in used else f"no {key}"
            raise UsageError(f"{opt.ep_options} {key}={value}: {path} was compiled with {stated}", hint=hint)


_PLACEMENT_KINDS: tuple[FindingKind, ...] = ("refused", "operator")
"""Kinds of findings that in a quantized file are caused by the placement of its quantization, not by its operators."""

_FindingKey = tuple[FindingKind, str, str]
"""Kind, subject and reason of a finding."""


@dataclass
class _NodeChecks:
    """One file and one provider; findings are added while nodes are checked."""

    path: Path
    facts: GraphFacts
    chosen: ChosenProvider
    is_present: bool
    table: OperatorTable | None
    nodes_by_finding: dict[_FindingKey, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))
    """Finding → module and name of each node."""
    notes: list[str] = field(default_factory=list)
    is_quantized: bool = False
    float_source: str = ""
    """The float source recorded in a quantized file, relative to the working directory; empty if not recorded."""

    @classmethod
    def of(cls, path: Path, ep: str, device: Device | None, options: Mapping[str, str]) -> _NodeChecks:
        """Read a file and find the provider.

        Args:
            path: The ONNX file.
            ep: Name of the provider.
            device: The requested device.
            options: Options of the provider.

        Raises:
            InputError: the file is compiled.
        """
        choice = checked_provider(ep, device, options)
        provider = choice.provider
        is_present = provider.name in present_providers()
        model = read_structure(path)
        graph = graph_of(model, path)
        refuse_compiled(graph)
        if reading_graph(path, lambda: flatten(graph)):  # as sessions see it
            model = ir.to_proto(graph)
        facts = read_facts(model)
        checks = cls(path, facts, choice, is_present, operator_table(short_name(provider.name)))
        checks.notes += facts.notes
        checks.is_quantized = any(node.op_type in _QUANTIZING for node in facts.nodes)
        checks.float_source = _float_source(model, path)
        return checks

    @property
    def is_cpu(self) -> bool:
        """True for the CPU provider, which every ONNX Runtime has."""
        return self.chosen.names == CPU

    @property
    def open_places(self) -> Mapping[str, object]:
        """The dynamic dimensions that the provider does not support; `{}` if it supports all."""
        return {} if self.chosen.provider.takes_dynamic else self.facts.open_places

    def by_session(self) -> ProviderFit | None:
        """Query the provider with a session, and note what limits the result.

        `None` if placement is not reported, or a session fails without an operator table.

        Raises:
            InputError: the file is no ONNX model, or damaged.
            StageError: the query ended without an answer, or exceeded its time limit.
            WriteError: the disk has no space for a copy of the file.
        """
        if not reports_placement():
            self.notes.append(
                f"ONNX Runtime {ort.__version__} does not report the provider of a node; this requires 1.24 or later."
            )
            return None
        with flat_file(self.path) as path:
            assignment = find_assignment(path, self.chosen)
        if assignment.problem:
            self.notes.append(f"{self.chosen.provider.name} could not create a session: {assignment.problem}")
            if self.table is None:
                return None
            self._add_finding("graph", "the whole graph", assignment.problem)
            return self.by_document(self.table)
        for entry in assignment.nodes:
            if not entry.is_assigned:
                facts = self.facts.node_called(entry.name, entry.op_type, entry.domain)
                self._add_refused_node(facts, assignment.reasons.get(entry.name, "") if entry.name else "")
        missing = len(self.facts.nodes) - len(assignment.nodes)
        if missing:
            change = "folds or fuses" if missing > 0 else "adds"
            self.notes.append(
                f"ONNX Runtime {change} {count_noun(abs(missing), 'node')} before it assigns nodes to providers."
            )
        supported = sum(node.is_assigned for node in assignment.nodes)
        version = (
            f"{self.chosen.provider.name} {provider_version(self.chosen.provider)}, ONNX Runtime {ort.__version__}"
        )
        fit = self._create_fit("provider", version, len(assignment.nodes), supported)
        return replace(fit, copies=self._count_copies(assignment.copies))

    def _count_copies(self, copies: Iterable[CopiedValue]) -> tuple[ModuleCopies, ...]:
        """Count copied values by module, the most first."""
        by_module: dict[str, list[CopiedValue]] = defaultdict(list)
        for copy in copies:
            by_module[self.facts.module_of_value.get(copy.name, "")].append(copy)
        counts = [
            ModuleCopies(
                module,
                sum(copy.to_device for copy in copied),
                sum(not copy.to_device for copy in copied),
                tuple(copy.name for copy in copied),
            )
            for module, copied in by_module.items()
        ]
        return tuple(sorted(counts, key=lambda entry: -len(entry.values)))

    def by_own_kernels(self) -> ProviderFit | None:
        """Return the result of the kernels if each node has a kernel for its own types, else None."""
        table = self._list_kernels()
        if table is None or any(table.refusal(_typed_node(node)) is not None for node in self.facts.nodes):
            return None
        return self.by_kernels()

    def by_kernels(self) -> ProviderFit | None:
        """Look up a kernel for every node; None if the provider lists no kernels."""
        table = self._list_kernels()
        if table is None:
            return None
        supported = 0
        for node in self.facts.nodes:
            refusal = table.refusal(_typed_node(node))
            if refusal is None or (self.is_cpu and table.refusal(_cast_node(node)) is None):
                supported += 1
            elif refusal[0] == "dtype":
                self._add_finding("dtype", _typed_name(node), refusal[1], node)
            else:
                self._add_finding("operator", node.operator, refusal[1], node)
        return self._create_fit("kernels", f"ONNX Runtime {ort.__version__}", len(self.facts.nodes), supported)

    def _list_kernels(self) -> KernelTable | None:
        """Return the kernels of the provider; None, with a note, if ONNX Runtime cannot list them."""
        try:
            return kernel_table(self.chosen.provider.name, self.facts.opsets)
        except StageError as error:
            self.notes.append(f"Its kernels could not be listed: {error.message}.")
            return None

    def by_document(self, table: OperatorTable) -> ProviderFit:
        """Look up every node in the operator table of the documentation."""
        supported = 0
        opset = self.facts.opsets.get("", 1)
        if table.opsets is not None and not table.opsets[0] <= opset <= table.opsets[1]:
            self._add_finding("graph", f"opset {opset}", f"{table.opsets[0]} to {table.opsets[1]} are supported")
        for node in self.facts.nodes:
            refusals = list(self._documented_refusals(node, table))
            supported += not refusals
            for kind, subject, reason in refusals:
                self._add_finding(kind, subject, reason, node)
        self.notes += [table.caveat] if table.caveat else []
        if not self.is_present:
            self.notes.append(
                "The provider is not installed: this result is from its documentation, not from the provider."
            )
        fit = self._create_fit("document", f"{table.version}: {table.source}", len(self.facts.nodes), supported)
        return replace(fit, limits=tuple(self._list_limits(table)))

    def _documented_refusals(self, node: NodeFacts, table: OperatorTable) -> Iterator[_FindingKey]:
        """Yield a finding for each reason in the operator table against a node; nothing for a supported node."""
        yield from self._size_findings(node)
        if node.operator not in table.operators:
            if node.operator not in table.also:
                yield "operator", node.operator, "it is not in the list"
            return
        entry = table.operators[node.operator]
        if entry.devices and self.chosen.device not in entry.devices:
            yield "operator", node.operator, f"supported on {' or '.join(entry.devices)} only"
        dtype = node.inputs[0] if node.inputs else None
        if entry.types and dtype is not None and dtype not in (*entry.types, *table.casts):
            yield "dtype", _typed_name(node), f"the list has {', '.join(entry.types)}"

    def _list_limits(self, table: OperatorTable) -> Iterator[ListedLimit]:
        """Yield the documented conditions of the operators in the file, the most frequent operator first."""
        counts = Counter(node.operator for node in self.facts.nodes)
        for operator, count in counts.most_common():
            limit = table.also.get(operator) or (table.operators[operator].limit if operator in table.operators else "")
            if limit:
                yield ListedLimit(operator, limit, count)

    def _add_refused_node(self, node: NodeFacts, reason: str) -> None:
        """Add a node that the provider itself does not support, under the known cause."""
        findings = list(self._size_findings(node))
        for finding in findings:
            self._add_finding(*finding, node)
        if findings:
            return
        if reason in (NO_KERNEL, SIZES_ON_CPU):
            self._add_finding("refused", _typed_name(node), reason, node)
            return
        is_listed = self.table is None or node.operator in (*self.table.operators, *self.table.also)
        self._add_finding("refused" if is_listed else "operator", node.operator, reason or NO_REASON, node)

    def _size_findings(self, node: NodeFacts) -> Iterator[_FindingKey]:
        """Yield findings on dynamic and data-dependent sizes of a node, if the provider requires fixed sizes."""
        names = sorted(node.open_names & self.open_places.keys())
        for name in names:
            yield "open size", name, "the provider requires fixed sizes"
        if not names and node.has_unknown_size and not self.chosen.provider.takes_dynamic:
            yield "unknown size", node.operator, "a size depends on data, but the provider requires fixed sizes"

    def _add_finding(self, kind: FindingKind, subject: str, reason: str, node: NodeFacts | None = None) -> None:
        """Add a node to the nodes of a finding; `None`: the finding concerns the whole graph.

        Args:
            kind: Kind of the finding.
            subject: Operator, type or property that is concerned.
            reason: The reason, for the user.
            node: The node.
        """
        self.nodes_by_finding[kind, subject, reason].append(("", "") if node is None else (node.module, node.name))

    def _find_remedy(self, kind: FindingKind, subject: str, reason: str) -> str:
        """Return the remedy for a finding: a sentence, with a command if possible."""
        if kind in _PLACEMENT_KINDS and (remedy := self._quantized_remedy(reason)):
            return remedy
        ep, path = short_name(self.chosen.provider.name), self.path
        match kind:
            case "open size":
                names = [name for name in self.facts.open_places if name not in self.facts.sums]
                command = fixing_command(str(path), names)
                return f"Fix the sizes (replace them by the sizes you need): {command}"
            case "unknown size":
                return (
                    f"{_ON_CPU}. Split the graph there (winml extract), or rewrite the model without data-dependent "
                    "sizes."
                )
            case "operator":
                domain, _, operator = subject.rpartition(".")
                if domain == "com.microsoft":
                    return (
                        f"Optimize the export again for this provider, without this operator: winml optimize --ep {ep}."
                    )
                if not domain and (version := _composed_version(operator, self.facts)) is not None:
                    remedy = f"Export with {opt.opset} {version - 1}"
                    if version >= LEAST_STANDARD_OPSET:
                        remedy += f" and optimize without {opt.operators} standard"
                    return f"{remedy}: {operator} is then written as simpler operators."
                command = f"winml optimize -m {path} --level full --ep {ep} --check"
                return f"{_ON_CPU}. To see what fusion would change: {command}"
            case "dtype":
                remedy = next((text for dtype, text in _dtype_remedies().items() if dtype in subject), "")
                return remedy.format(path=path) or f"{_ON_CPU}: avoid values of this type in large MatMuls."
            case "refused" if reason in (NO_KERNEL, SIZES_ON_CPU) and not re.search(" of .*float", subject):
                return "Nothing: sizes and masks take microseconds on the CPU. Copies of the results are listed."
            case "refused" if reason == NO_KERNEL and _is_newer_than_exports(subject.partition(" of ")[0], self.facts):
                return (
                    f"{_ON_CPU}. This version of the operator is newer than opset {_OLDEST_EXPORT}, whose version the "
                    f"provider may have: export without {opt.opset}, or with {opt.opset} {_OLDEST_EXPORT}."
                )
            case "refused" if reason == NO_KERNEL:
                return f"{_ON_CPU}. Optimize the float export for this provider: winml optimize --level full --ep {ep}."
            case "refused":
                return (
                    f"{_ON_CPU}. Use different {opt.ep_options} or a different {opt.device}; winml compile lists the "
                    "unsupported nodes."
                )
            case "graph" if subject.startswith("opset"):
                return f"Convert it: winml optimize -m {path} --opset N."
            case "graph" if ep == "qnn":
                return processor_hint()
            case "graph":
                return (
                    f"Use different {opt.ep_options} or a different {opt.device}. The result below is from its "
                    "documentation."
                )

    def _quantized_remedy(self, reason: str) -> str:
        """Return the remedy for a node at a QNN edge, or for an unsupported node of a quantized file.

        Empty for other nodes.
        """
        ep = short_name(self.chosen.provider.name)
        if ep == "qnn" and any(message in reason for message in AT_THE_EDGE):
            return f"Let the device convert inputs and outputs: {opt.ep_options} offload_graph_io_quantization=0."
        if not self.is_quantized:
            return ""
        command = f"winml quantize -m {self.float_source or 'FLOAT.onnx'} -o QUANTIZED.onnx --mode qdq --ep {ep}"
        return (
            f"{_ON_CPU}: its QuantizeLinear and DequantizeLinear nodes are not placed as {ep} requires. "
            f"Quantize the float file for this provider: {command}"
        )

    def _create_fit(self, basis: Basis, source: str, nodes: int, supported: int) -> ProviderFit:
        """Return the result of a check, with the findings on the whole graph first, then by number of nodes."""
        findings = []
        for (kind, subject, reason), locations in self.nodes_by_finding.items():
            modules = Counter(module for module, _ in locations)
            names = tuple(name for _, name in locations if name)
            by_module = {} if kind == "graph" else dict(modules.most_common())
            findings.append(Finding(kind, subject, reason, self._find_remedy(kind, subject, reason), by_module, names))
        findings.sort(key=lambda finding: (finding.kind != "graph", -sum(finding.modules.values())))
        provider = self.chosen.provider
        placement = placement_for(short_name(provider.name))
        reasons = {
            (module, name): reason
            for (kind, _, reason), locations in self.nodes_by_finding.items()
            if kind != "graph"
            for module, name in locations
        }
        of_graph = next((reason for kind, _, reason in self.nodes_by_finding if kind == "graph"), None)
        placements = place_modules(
            (node.module, reasons.get((node.module, node.name), of_graph)) for node in self.facts.nodes
        )
        return ProviderFit(
            provider=short_name(provider.name),
            name=provider.name,
            device=self.chosen.device_words,
            basis=basis,
            source=source,
            nodes=nodes,
            taken=supported,
            findings=tuple(findings),
            limits=(),
            notes=tuple(self.notes),
            precisions=refused_precisions(short_name(provider.name)) if placement.formats is not None else {},
            precisions_source=placement.formats.source_words if placement.formats is not None else "",
            modules=placements,
        )


_QUANTIZING = frozenset({"QuantizeLinear", "DequantizeLinear"})


def _float_source(model: onnx.ModelProto, path: Path) -> str:
    """Return the path of the float source recorded in a quantized file; ``""`` if missing, or of the same name."""
    metadata = {prop.key: prop.value for prop in model.metadata_props}
    try:
        source = file_below(path.parent, load_metadata(metadata[FLOAT_SOURCE_KEY])["file"])
        return "" if source.resolve() == path.resolve() else str(source)  # from another folder
    except (KeyError, TypeError, ValueError, ForeignNameError):
        return ""


def _typed_node(node: NodeFacts) -> TypedNode:
    return TypedNode(node.op_type, node.domain, node.inputs, node.outputs)


def _cast_node(node: NodeFacts) -> TypedNode:
    """Return the node between casts to float32, as in a session if the CPU provider has no float16 kernel."""
    inputs, outputs = (
        ["float32" if dtype == "float16" else dtype for dtype in types] for types in (node.inputs, node.outputs)
    )
    return TypedNode(node.op_type, node.domain, inputs, outputs)


def _typed_name(node: NodeFacts) -> str:
    """Format the operator and the element types of its inputs."""
    types = ", ".join(dict.fromkeys(dtype for dtype in node.inputs if dtype is not None))
    return f"{node.operator} of {types or 'unknown types'}"
