"""Adapters of trainers: one file for each trainer, named after it, such as `hf_trainer.py` or `lightning.py`.

Contract of an adapter
- It gives the trainer's own hooks (make the model, run a step, clip, save, load) the calls of `graphpp.compile` and `Pipeline`.
  Numbers, files and errors are those of the pipeline: an adapter computes nothing and keeps no copy of the state.
- It imports its trainer inside the functions that need it, so `import graphpp` loads no trainer and requires none.
- It uses the public names of graphpp. A trainer needs more? Make it public first.
- A hook of the trainer that a pipeline cannot serve raises `GraphPPError`, which names the call to make instead.
- Every rank calls the adapter alike, as every rank calls a `Pipeline`.

Floor: the top one, with `cli`. An adapter may import every package but `cli`, and nothing imports an adapter. Its test stands
in `tests/integrations/`: the trainer's loop on a small model is bit-equal to a loop over `pipe.step` by hand.
"""
