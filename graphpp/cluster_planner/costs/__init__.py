"""The costs of a model on machines that are not here, from one captured graph.

`capture_costs.py` goes from a model to `ModelCosts` (`model_costs.py`), and `price.py` from there to seconds and bytes for any
rows and degrees (`deployment.py`), with the state of a rank (`state.py`). On the way `shortened.py` leaves repeated layers out
of the forward, `facts.py` notes on each node how its value grows with rows and shrinks with ranks (`dims.py`, `sharding.py`,
`tensor_plan.py`), and `from_graph.py` makes segments of the graph, and `operations.py` data of its nodes.
"""

from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import ModelCosts, ParameterCosts
from graphpp.cluster_planner.costs.price import PricedModel, priced

__all__ = ["Deployment", "ModelCosts", "ParameterCosts", "PricedModel", "capture_costs", "priced"]
