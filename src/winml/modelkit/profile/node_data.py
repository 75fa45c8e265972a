"""Rendering of a value per node as custom node data for Model Explorer: a heat map over the graph of a file.

Format: Model Explorer's guide to custom node data. Node ids are those of its ONNX adapter: the names of the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from winml.modelkit.compare.records import ModelComparison
from winml.modelkit.profile.module_records import ProfiledDecoder, ProfiledModules
from winml.modelkit.words import json_printable

_GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#fdd49e"}, {"stop": 1, "bgColor": "#d7301f"})
"""Chosen: white to red, which is readable without distinguishing red from green."""
_UNNAMED_GRAPH = "<main>"
"""Specified: the ONNX adapter's name of a graph without a name."""


def profile_node_data(profiled: ProfiledModules | ProfiledDecoder) -> str:
    """Render the node data of a profiled model as JSON text: milliseconds, for a decoder those of a step."""
    phase = [*profiled.phases.values()][-1]
    return _node_data_json(phase.graph_name, phase.node_ms)


def comparison_node_data(result: ModelComparison) -> str:
    """Render the node data of a comparison as JSON text: the error that arises in the module of each node.

    Nodes of modules that were not compared, or without a finite error, are omitted.
    """
    errors = result.arising_errors()
    return _node_data_json(
        result.graph_name, {node: errors[tag] for node, tag in result.node_tags.items() if tag in errors}
    )


def _node_data_json(graph_name: str, numbers: Mapping[str, float]) -> str:
    """Render :func:`node_data_record` as JSON text."""
    return json_printable(json.dumps(node_data_record(graph_name, numbers), ensure_ascii=False))


def node_data_record(graph_name: str, numbers: Mapping[str, float]) -> dict[str, object]:
    """Build the object that Model Explorer loads for a model.

    Args:
        graph_name: Name of the graph in the file.
        numbers: Name of a node of the file → value.
    """
    return {
        graph_name or _UNNAMED_GRAPH: {
            "results": {name: {"value": value} for name, value in numbers.items()},
            "gradient": list(_GRADIENT),
        }
    }
