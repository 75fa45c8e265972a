"""Renders a number for each node as custom node data for Model Explorer: a heat map over the graph of a file.

Format: Model Explorer's guide to custom node data. Node ids are those of its ONNX adapter: the names of the nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from winml.modelkit.results.model_comparison import ModelComparison
from winml.modelkit.results.profiled_modules import ProfiledDecoder, ProfiledModules
from winml.modelkit.words import json_printable

__all__ = ["comparison_node_data", "node_data_json", "node_data_record", "profile_node_data"]

GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#fdd49e"}, {"stop": 1, "bgColor": "#d7301f"})
"""Chosen: white to red, which is readable without distinguishing red from green."""
UNNAMED_GRAPH = "<main>"
"""Specified: the ONNX adapter's name of a graph without a name."""


def profile_node_data(profiled: ProfiledModules | ProfiledDecoder) -> str:
    """Return the node data of a profiled model as JSON text: milliseconds; of a decoder those of a step."""
    shown = profiled if isinstance(profiled, ProfiledModules) else profiled.step
    return node_data_json(shown.graph_name, shown.node_ms)


def comparison_node_data(result: ModelComparison) -> str:
    """Return the node data of a comparison as JSON text: the error that arises in the module each node belongs to.

    Nodes of modules that were not compared, or whose error is no number, are left out.
    """
    errors = result.arising_errors()
    return node_data_json(
        result.graph_name, {node: errors[tag] for node, tag in result.node_tags.items() if tag in errors}
    )


def node_data_json(graph_name: str, numbers: Mapping[str, float]) -> str:
    """Return :func:`node_data_record` as JSON text."""
    return json_printable(json.dumps(node_data_record(graph_name, numbers), ensure_ascii=False))


def node_data_record(graph_name: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the object that Model Explorer loads beside a model.

    Args:
        graph_name: Name of the graph in the file.
        numbers: What is shown of each node of the file, by its name.
    """
    return {
        graph_name or UNNAMED_GRAPH: {
            "results": {name: {"value": value} for name, value in numbers.items()},
            "gradient": list(GRADIENT),
        }
    }
