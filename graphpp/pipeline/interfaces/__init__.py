"""Other interfaces to a pipeline: a module whose loss has a backward, and the schedule object of torch."""
