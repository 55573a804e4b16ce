"""The refusals that adapters share: one sentence for each setting that a pipeline cannot follow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DataParallel, DistributedDataParallel

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
    """The options of `graphpp.compile` that an adapter sets itself (`own`, with the reasons), and meshes with replicas."""
    mesh = options.get("mesh")
    names = getattr(mesh, "mesh_dim_names", None) or ()
    replicas = [name for name in names if name.startswith("dp_") and mesh[name].size() > 1]  # type: ignore[index]
    return {
        **{f"pipeline[{name!r}]": reason for name, reason in own.items() if name in options},
        "pipeline['mesh'] with " + ", ".join(replicas): "its replicas would read the same batches" if replicas else "",
    }


def _modules(model: Any) -> Any:
    return model.modules() if hasattr(model, "modules") else ()
