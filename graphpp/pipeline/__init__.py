"""TODO graphpp.pipeline.pipeline."""
