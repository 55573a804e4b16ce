"""The names of torch for collectives in graphs, sharded tensors, and modules that torch has made data parallel."""
