"""The costs of a model, to be priced on any machines: `ModelCosts.on`.

Contract: `ModelCosts` is data (`cost_data.py`), made once from a captured graph (`from_graph.py`, `capture_costs.py`). `on`
takes some milliseconds, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.cluster_planner.costs.cost_data import CostData
from graphpp.cluster_planner.costs.price import Deployment, PricedModel, priced
from graphpp.devices import Machines

_USUAL = Deployment()


@dataclass(frozen=True)
class ModelCosts(CostData):
    """A model's costs, of which `on` gives seconds and bytes for any number of rows, on any machines."""

    def on(self, machines: Machines, deployment: Deployment = _USUAL, alike: PricedModel | None = None) -> PricedModel:
        """The seconds and bytes of a microbatch on these machines: `price.priced` says more, and which errors it raises."""
        return priced(self, machines, deployment, alike)
