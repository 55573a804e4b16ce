"""Settings made better once their bytes or seconds are known: the least recomputation that fits, a searched order."""
