"""The refusals that adapters share: one sentence for each setting that a pipeline cannot follow."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import IterableDataset

import graphpp
from graphpp.errors import GraphPPError

PLAN_OPTION = "give the plan's options one by one"


def refuse(owner: str, faults: Mapping[str, object]) -> None:
    """Raise `GraphPPError` for the first setting of `faults` that has a remedy; an empty remedy is no fault."""
    for name, remedy in faults.items():
        if remedy:
            raise GraphPPError(f"{name} does not go with {owner}: {remedy}")


def faults_of_model(model: Any) -> dict[str, str]:
    """The settings of a model that a pipeline cannot follow, and their remedies."""
    devices = {str(each) for module in _modules(model) for each in (getattr(module, "hf_device_map", None) or {}).values()}
    wrapped = isinstance(model, DataParallel | DistributedDataParallel)
    return {
        "device_map": "load the model without device_map=, for the pipeline gives each rank its stages" * (len(devices) > 1),
        type(model).__name__: "give the model itself, for the pipeline's ranks hold different parameters" * wrapped,
    }


def faults_of_options(options: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, str]:
    """Options that an adapter sets itself (`own`, with the reasons), unknown ones, and meshes with replicas."""
    mesh = options.get("mesh")
    names = getattr(mesh, "mesh_dim_names", None) or ()
    replicas = [name for name in names if name.startswith("dp_") and mesh[name].size() > 1]  # type: ignore[index]
    return {
        **{f"pipeline[{name!r}]": reason for name, reason in own.items() if name in options},
        **{f"pipeline[{name!r}]": reason for name, reason in unknown_options(options).items()},
        "pipeline['mesh'] with " + ", ".join(replicas): "its replicas would read the same batches" if replicas else "",
    }


def unknown_options(options: Mapping[str, Any]) -> dict[str, str]:
    """The names that are no options of `graphpp.compile`, and the remedy."""
    known = [each.name for each in inspect.signature(graphpp.compile).parameters.values() if each.kind is each.KEYWORD_ONLY]
    remedy = f"it is no option of graphpp.compile; take one of {', '.join(known)}"
    return {name: remedy for name in options if name not in known}


def refuse_shares(loader: Any) -> None:
    """Raise `GraphPPError` if the loader's sampler gives each rank another share of the data set."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(holder, "sampler", None)
        if getattr(sampler, "num_replicas", 1) > 1:
            raise GraphPPError(
                f"the loader's {type(sampler).__name__} gives each of {sampler.num_replicas} ranks another share of the data, "
                "and all ranks of a pipeline read the same batches: leave the sampler out (shuffle=True with equal seeds "
                "shuffles alike), or give it num_replicas=1, rank=0"
            )


def refuse_one_shot(data: Any) -> None:
    """Raise `GraphPPError` for data that can be read once: the pipeline is captured from a first batch that is read twice."""
    if (isinstance(data, IterableDataset) or not hasattr(data, "__getitem__")) and iter(data) is iter(data):
        raise GraphPPError(
            "the training data can be read once, and the pipeline is captured from its first batch, which training would lack: "
            "give a data set whose __iter__ starts anew"
        )


def _modules(model: Any) -> Any:
    return model.modules() if hasattr(model, "modules") else ()
