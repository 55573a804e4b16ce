"""From the joint graph to stage programs: the cut into one graph per phase and stage, and passes over such a graph."""
