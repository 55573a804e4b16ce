"""The machine that runs a pipeline: program format, stages, actions, messages, gradients. Knows no torch.fx.

`program.py` is the format of the compiler's programs. `runner.py` runs a table of actions over them: each computing action is a
`Task` of a `GraphStage`, each send or receive a message of `Transport`. `action_loop.py` is torch's pipeline runtime
underneath.
"""
