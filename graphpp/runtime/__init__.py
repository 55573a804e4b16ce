"""The machine that runs a pipeline: program format, stages, actions, messages, gradients. Knows no torch.fx.

`program.py` is the format of the compiler's programs. `runner.py` runs a table of actions over them: each computing action is a
`Task` of a `GraphStage`, each send or receive a message of the `Mailbox`. `action_loop.py` wraps torch's pipeline runtime.
`fsdp/` shards parameters, `offloader.py` evicts and prefetches saved values, `released.py` replaces other ranks' parameters.
"""
