"""The forms of a graph (joint graph, phase graphs, compiled regions), and questions that passes ask about its nodes."""
