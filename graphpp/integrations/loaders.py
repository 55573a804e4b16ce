"""accelerate's data loaders and results on a pipeline: every rank reads the batches of one process, and has all results."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]

from graphpp.integrations.refusals import refuse_shares


def prepared_loader(accelerator: Any, loader: Any, put_on_device: bool) -> Any:
    """The loader as accelerate prepares it in one process. Raises `GraphPPError` for a sampler of one rank's share."""
    if getattr(loader, "_is_accelerate_prepared", False):
        return loader
    refuse_shares(loader)
    settings = accelerator.dataloader_config
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=put_on_device,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        use_seedable_sampler=settings.use_seedable_sampler,
        data_seed=settings.data_seed,
        non_blocking=settings.non_blocking,
        use_stateful_dataloader=settings.use_stateful_dataloader,
    )
    prepared._is_accelerate_prepared = True
    accelerator._dataloaders.append(prepared)
    return prepared


def rows_of_data(accelerator: Any, values: Any, **_: Any) -> Any:
    """The values, which every rank has; of the last batch, as many rows as it has. A 0-dim tensor has no rows to cut."""
    state = accelerator.gradient_state
    rows = state.remainder if state.end_of_dataloader else 0
    return recursively_apply(lambda value: value[:rows] if value.dim() else value, values) if rows > 0 else values
