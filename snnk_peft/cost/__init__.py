"""Cost of a model before it is downloaded: parameters, MACs, memory and traffic from its config alone.

    snnk cost bert-large-uncased --config snnk.yaml

Models are built on the meta device, where tensors have shapes but no values, and run there: operations are counted as
torch calls them, so no formula per architecture is needed. `CostRow` defines each figure.
"""

from snnk_peft.cost.estimate import CostReport, CostRow, estimate_cost

__all__ = ["CostReport", "CostRow", "estimate_cost"]
