"""TODO graphpp.passes.graph.joint_graph."""
