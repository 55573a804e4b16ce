"""The costs of a model on machines that are not here, from one captured graph.

`capture_costs.py` goes from a model to `ModelCosts` (`model_costs.py`), `price.py` from there to seconds and bytes for any rows
and degrees. `growth.py` and `sizes.py` find how values grow, `tensor_plan.py` reads plans, `facts.py` writes both into the
graph, and `operations.py` makes data of its nodes.
"""

from graphpp.planner.cluster.capture_costs import capture_costs
from graphpp.planner.cluster.model_costs import ModelCosts, ParameterCosts, model_costs
from graphpp.planner.cluster.price import PricedModel, priced

__all__ = ["ModelCosts", "ParameterCosts", "PricedModel", "capture_costs", "model_costs", "priced"]
