"""The costs of a model on machines that need not exist, from one captured graph.

`capture_costs.py` makes `ModelCosts` (`model_costs.py`) of a model; `price.py` prices them in seconds and bytes for any rows
and degrees (`deployment.py`), with the state of a rank (`state.py`). In between, `alike_layers.py` skips the calls of repeated
layers, `shortened.py` removes repeated layers from the forward, `facts.py` annotates how each value scales with rows and ranks
(`dims.py`, `sharding.py`, `tensor_plan.py`), `from_graph.py` makes segments of the graph, and `operations.py` makes data of its
nodes.
"""

from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import ModelCosts, ParameterCosts
from graphpp.cluster_planner.costs.price import PricedModel, priced

__all__ = ["Deployment", "ModelCosts", "ParameterCosts", "PricedModel", "capture_costs", "priced"]
