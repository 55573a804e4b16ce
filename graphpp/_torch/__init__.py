"""Every private name of torch that graphpp uses, in one place: no other package touches a private name of torch.

`aot.py`: tracing and capture. `inductor.py`: compiling regions. `pipelining.py`: the pipeline runtime. `distributed.py`:
ranks and optimizers. Each file lists its names and the versions of torch on which they were checked.
"""
