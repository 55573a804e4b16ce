"""The machine that runs a pipeline: program format, stages, actions, messages, gradients. Knows no torch.fx.

`program.py` is the format of the compiler's programs. `runner.py` runs a table of actions over them: each computing action is a
`Task` of a `GraphStage`, each send or receive a message of the `Mailbox`. `action_loop.py` is torch's pipeline runtime
underneath. `fsdp/` shards parameters, `offloader.py` evicts saved values to the host and prefetches them, `released.py` stands
in for parameters of other ranks, `dtensors.py` knows tensors that are spread over ranks.
"""
