"""The names of `nn.Module` and of the caller's model that a pipeline does not have, each with the call that does the same.

Contract: each use raises a `UsageError`. The error is an `AttributeError` and a `TypeError` too, so `hasattr(pipe, "module")`
is False and `getattr(pipe, "module", pipe)` is the pipeline, and code that asks whether it got a wrapper goes on.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from graphpp.errors import GraphPPError

_RUN = "a pipeline has no forward of its own: call pipe.step(x, target=y) to train, pipe.eval(x) for the output"
_DEVICE = "a pipeline is bound to its devices: give parallel=graphpp.Parallel(device=...) to graphpp.compile"
_DTYPE = "a pipeline trains the model's own parameters: change the dtype of the model before graphpp.compile"
_FLAGS = "the model has the flags: call model.train(), or model.eval() around pipe.step; pipe.eval(x) runs a batch"
_SAVE = "pipe.checkpoint(optimizer).save(folder) and .load(folder) keep a training; pipe.gather() has the whole state dict"
_MEMORY = "pipe.materialize(init) or pipe.materialize(weights=folder) gives this rank's parameters memory and values"
_MODULE = "a pipeline is no module: use the model that was given to graphpp.compile, which stays the caller's"

_INSTEAD = {
    **dict.fromkeys(("forward", "backward", "train_batch", "eval_batch"), _RUN),
    **dict.fromkeys(("to", "cuda", "cpu"), _DEVICE),
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), _DTYPE),
    **dict.fromkeys(("train", "training"), _FLAGS),
    **dict.fromkeys(("save", "save_checkpoint", "save_pretrained", "load_checkpoint"), _SAVE),
    "module": _MODULE,
    "compile": 'a pipeline is compiled: give backend="inductor" to graphpp.compile',
    "no_sync": "gradients add up from step to step until zero_grad: give pipe.step(..., accumulation_steps=...)",
    **dict.fromkeys(("to_empty", "reset_parameters", "init_weights", "from_pretrained"), _MEMORY),
}


class UsageError(GraphPPError, AttributeError, TypeError):
    """A pipeline was used as a module."""


class ModuleHabits:
    """The base of `Pipeline` that refuses these names."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a pipeline has no forward of its own."""
        raise UsageError(_RUN)

    def __getattr__(self, name: str) -> NoReturn:
        """Refused: names of modules with the call that does the same here, all others as unknown."""
        public = not name.startswith("_")
        if public and (name in _INSTEAD or hasattr(nn.Module, name) or name in dir(self.__dict__.get("_model"))):
            raise UsageError(f"pipe.{name}: {_INSTEAD.get(name, _MODULE)}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __iter__(self) -> NoReturn:
        """Refused: an optimizer takes the parameters."""
        raise UsageError("a pipeline is no container: pipe.parameters() has this rank's parameters")

    def __reduce__(self) -> NoReturn:
        """Refused: a pipeline holds its ranks' connections."""
        raise UsageError("a pipeline cannot be copied or pickled: save pipe.state_dict(), and load it into a new pipeline")
