"""Split stacked `nn.LSTM`, `nn.GRU` and `nn.RNN` with dropout into single layers.

Contract: torch's decomposition of a stacked recurrent operator loses the dropout between the layers, because its condition on
the layer's number is never true (torch 2.11 to 2.15). `unstack_rnn` replaces every such operator with active dropout by one
operator per layer with `dropout` in between.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_STACKED = {
    getattr(packet, overload)
    for packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
    for overload in ("input", "data")
}


def unstack_rnn(module: fx.GraphModule) -> fx.GraphModule:
    for node in list(module.graph.nodes):
        if node.target in _STACKED:
            names = [argument.name for argument in node.target._schema.arguments]
            args = dict(zip(names, node.args, strict=False))
            if args["train"] and args["dropout"] > 0 and args["num_layers"] > 1:
                with module.graph.inserting_before(node):
                    results = _layers(module.graph, node, args)
                _replace(module.graph, node, results)
    return module


def _layers(graph: fx.Graph, stack: fx.Node, args: dict[str, Any]) -> list[fx.Node]:
    """Insert one operator per layer; returns the last layer's output, then the final states of all layers."""

    def call(target: Any, *operands: Any) -> fx.Node:
        node = graph.call_function(target, operands)
        node.meta = {key: value for key, value in stack.meta.items() if key != "val"}
        return node

    name, layers, dropout = next(iter(args)), args["num_layers"], args["dropout"]
    states = list(args["hx"]) if isinstance(args["hx"], list | tuple) else [args["hx"]]
    directions = 2 if args["bidirectional"] else 1
    weights = len(args["params"]) // layers
    output, finals = args[name], []
    for layer in range(layers):
        if layer > 0:
            output = call(aten.dropout.default, output, dropout, True)
        own = [call(aten.slice.Tensor, state, 0, layer * directions, (layer + 1) * directions) for state in states]
        params = list(args["params"][layer * weights : (layer + 1) * weights])
        hx = own if len(own) > 1 else own[0]
        single = args | {name: output, "hx": hx, "params": params, "num_layers": 1, "dropout": 0.0}
        layer_results = call(stack.target, *single.values())
        output = call(operator.getitem, layer_results, 0)
        finals.append([call(operator.getitem, layer_results, index + 1) for index in range(len(states))])
    return [output, *(call(aten.cat.default, list(state)) for state in zip(*finals, strict=True))]


def _replace(graph: fx.Graph, stack: fx.Node, results: list[fx.Node]) -> None:
    for user in list(stack.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(stack)
