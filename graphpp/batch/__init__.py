"""TODO graphpp.batch.cut_batch."""
