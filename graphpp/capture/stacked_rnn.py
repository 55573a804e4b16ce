"""Unstack recurrent layers: `nn.LSTM`, `nn.GRU` and `nn.RNN` with dropout between their layers.

Contract: torch's decomposition of a stacked recurrent operator loses the dropout between the layers (its condition on the
layer's number is never true; torch 2.11 to 2.15). Afterwards every such operator that drops something is one operator per
layer with `dropout` between; all others are as they were.
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
    """Take apart the stacks that drop something, in place."""
    for node in list(module.graph.nodes):
        if node.target in _STACKED:
            names = [argument.name for argument in node.target._schema.arguments]
            given = dict(zip(names, node.args, strict=False))
            if given["train"] and given["dropout"] > 0 and given["num_layers"] > 1:
                with module.graph.inserting_before(node):
                    results = _layers(module.graph, node, given)
                _replace(module.graph, node, results)
    module.recompile()
    return module


def _layers(graph: fx.Graph, stack: fx.Node, given: dict[str, Any]) -> list[fx.Node]:
    """One operator per layer; the output of the last and the final states of all, as the stack returns them."""

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {key: value for key, value in stack.meta.items() if key != "val"}
        return node

    name, layers, dropout = next(iter(given)), given["num_layers"], given["dropout"]
    states = list(given["hx"]) if isinstance(given["hx"], list | tuple) else [given["hx"]]
    directions = 2 if given["bidirectional"] else 1
    weights = len(given["params"]) // layers
    output, finals = given[name], []
    for layer in range(layers):
        if layer > 0:
            output = call(aten.dropout.default, output, dropout, True)
        own = [call(aten.slice.Tensor, state, 0, layer * directions, (layer + 1) * directions) for state in states]
        params = list(given["params"][layer * weights : (layer + 1) * weights])
        hx = own if len(own) > 1 else own[0]
        one = given | {name: output, "hx": hx, "params": params, "num_layers": 1, "dropout": 0.0}
        made = call(stack.target, *one.values())
        output = call(operator.getitem, made, 0)
        finals.append([call(operator.getitem, made, index + 1) for index in range(len(states))])
    return [output, *(call(aten.cat.default, list(state)) for state in zip(*finals, strict=True))]


def _replace(graph: fx.Graph, stack: fx.Node, results: list[fx.Node]) -> None:
    for user in list(stack.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(stack)
