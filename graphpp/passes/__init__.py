"""Compiler passes, graph to graph: one transformation per file, named after it. `lower.py` runs them in order.

Folders, each of which imports only the folders listed before it:

    graph       the forms of a graph, and questions about one: who shares memory, which nodes are collectives, costs, lifetimes
    joint       passes over the joint graph of one microbatch
    recompute   passes over the joint graph that recompute activations in the backward; and their choice
    text        graphs printed as Python
    stage       the cut into stages, and passes over one phase of one stage
    overlap     several phase graphs woven into one, so that computation hides collectives

No pass knows a process group or a schedule.
"""
