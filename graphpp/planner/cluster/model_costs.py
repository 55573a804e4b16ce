"""The costs of a model, to be priced on any machines: `ModelCosts.on`.

Contract: `ModelCosts` is data (`cost_data.py`), made once from a captured graph (`from_graph.py`, `capture_costs.py`). `on`
takes some milliseconds, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.devices import Machines
from graphpp.planner.cluster.cost_data import CostData
from graphpp.planner.cluster.price import PricedModel, priced


@dataclass(frozen=True)
class ModelCosts(CostData):
    """A model's costs, of which `on` gives seconds and bytes for any number of rows, on any machines."""

    def on(  # noqa: PLR0913 - the degrees of a plan
        self,
        machines: Machines,
        *,
        rows: int = 1,
        tp: int = 1,
        ep: int = 1,
        cp: int = 1,
        recompute: str | float | None = None,
        dtype: str | None = None,
        sequence: bool = True,
        optimizer: str | float = "adamw",
        stage_stride: int | None = None,
        shards: int | None = None,
    ) -> PricedModel:
        """The seconds and bytes of a microbatch of `rows` rows on these machines.

        `price.priced` says what the options mean, and raises `ScheduleError` for other values.
        """
        return priced(
            self, machines, rows=rows, tp=tp, ep=ep, cp=cp, recompute=recompute, dtype=dtype, sequence=sequence,
            optimizer=optimizer, stage_stride=stage_stride, shards=shards,
        )  # fmt: skip
