"""Refuses names of `nn.Module` and of the caller's model on a pipeline, and names the call to use instead.

Contract: each use raises a `UsageError`, which is an `AttributeError` and a `TypeError` too: `hasattr(pipe, "module")` is
False, and `getattr(pipe, "module", pipe)` is the pipeline, so code that unwraps wrappers works.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from graphpp.errors import GraphPPError

_RUN = (
    "a pipeline has no forward of its own: call pipe.step(x, target=y) to train, pipe.eval(x) for the output, or take "
    "pipe.as_module(), whose loss has a backward"
)
_MODULE = "a pipeline is no module: use the model that was given to graphpp.compile, which stays the caller's"
_REMEDIES = {
    "forward backward train_batch eval_batch": _RUN,
    "to cuda cpu": "a pipeline is bound to its devices: give parallel=graphpp.Parallel(device=...) to graphpp.compile",
    "half bfloat16 float double type": "change the dtype of the model before graphpp.compile: its own parameters are trained",
    "train training": "the model has the flags: call model.train() or model.eval() before pipe.step; pipe.eval(x) runs a batch",
    "save_pretrained push_to_hub": "pipe.save_weights(folder) writes the weights of all ranks as safetensors for Hugging Face, "
    "and model.config.save_pretrained(folder) the configuration",
    "generate": "model.generate(...) where one rank has the whole model; else pipe.save_weights(folder), and generate with a "
    "model that is loaded from there",
    "save save_checkpoint load_checkpoint": "pipe.checkpoint(optimizer).save(folder) and .load(folder) keep a "
    "training; pipe.gather() has the whole state dict",
    "module": _MODULE,
    "compile": 'a pipeline is compiled: give backend="inductor" to graphpp.compile',
    "no_sync": "gradients add up from step to step until zero_grad: give pipe.step(..., accumulation_steps=...)",
    "to_empty reset_parameters init_weights from_pretrained": "pipe.materialize(init) or "
    "pipe.materialize(weights=folder) gives this rank's parameters memory and values",
}
_INSTEAD = {name: remedy for names, remedy in _REMEDIES.items() for name in names.split()}


class UsageError(GraphPPError, AttributeError, TypeError):
    """A pipeline was used as a module."""


class ModuleHabits:
    """The base of `Pipeline` that raises `UsageError` for uses as a module."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(_RUN)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise `UsageError` for names of modules and of the caller's model, `AttributeError` for others."""
        public = not name.startswith("_")
        if public and (name in _INSTEAD or hasattr(nn.Module, name) or name in dir(self.__dict__.get("_model"))):
            raise UsageError(f"pipe.{name}: {_INSTEAD.get(name, _MODULE)}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __iter__(self) -> NoReturn:
        raise UsageError("a pipeline is no container: pipe.parameters() has this rank's parameters")

    def __reduce__(self) -> NoReturn:
        raise UsageError("a pipeline cannot be copied or pickled: save pipe.state_dict(), and load it into a new pipeline")
