"""Compiler passes, graph to graph: one transformation per file, named after it. `lower.py` runs them in order.

Folders, each of which imports only the folders listed before it:

    graph       the forms of a graph, and questions about one: aliases, collectives, costs, lifetimes
    forward     passes over the exported forward, before its backward is traced
    joint       passes over the joint graph of one microbatch
    recompute   passes that let the backward recompute activations, and the choice of activations
    text        graphs printed as Python
    stage       the cut into stages, and passes over one phase of one stage
    overlap     several phase graphs woven into one, so that computation hides collectives

No pass depends on a process group or a schedule.
"""
