"""TODO graphpp.runtime.gradients.accumulate."""
