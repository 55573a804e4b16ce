"""Phase graphs of two or more stages woven into one graph, ordered so that computation hides collectives."""
