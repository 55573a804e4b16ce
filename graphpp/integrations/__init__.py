"""Adapters of trainers: one file for each trainer, named after it, such as `transformers.py`; and spans in OpenTelemetry.

Contract of an adapter
- It gives the trainer's own hooks (make the model, run a step, clip, save, load) the calls of `graphpp.compile` and `Pipeline`.
  Numbers, files and errors are those of the pipeline: an adapter computes nothing and keeps no copy of the state.
- It imports its trainer, which `import graphpp` does not: a user imports the adapter's file by name.
- It uses the public names of graphpp. A trainer needs more? Make it public first.
- A hook of the trainer that a pipeline cannot serve raises `GraphPPError`, which names the call to make instead.
- Every rank calls the adapter alike, as every rank calls a `Pipeline`.

Floor: the top one, with `cli`. An adapter has at most 300 lines, may import every package but `cli`, and nothing imports an
adapter. Its test stands in `tests/integrations/`: the trainer's loop on a small model is that of the trainer in one process.
"""
