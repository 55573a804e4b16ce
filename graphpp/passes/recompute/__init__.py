"""TODO graphpp.passes.recompute.recompute_regions."""
