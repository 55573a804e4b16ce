"""Activation recomputation: choose the forward values that the backward recomputes, and rewrite the joint graph so."""
