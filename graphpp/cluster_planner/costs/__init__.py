"""The costs of a model on machines that are not here, from one captured graph.

`capture_costs.py` goes from a model to `ModelCosts` (`model_costs.py`, `cost_data.py`) by way of `from_graph.py`, `price.py`
from there to seconds and bytes for any rows and degrees. `growth.py`, `fake_calls.py` and `sizes.py` find how values grow,
`tensor_plan.py` reads plans, `facts.py` writes both into the graph, and `operations.py` makes data of its nodes. `degrees.py`
and `state.py` are the amounts of one rank.
"""

from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.cost_data import ParameterCosts
from graphpp.cluster_planner.costs.from_graph import model_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.price import Deployment, PricedModel, priced

__all__ = ["Deployment", "ModelCosts", "ParameterCosts", "PricedModel", "capture_costs", "model_costs", "priced"]
