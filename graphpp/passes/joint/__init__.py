"""Passes over the joint graph of one microbatch, before it is cut into stages."""
