"""Weight matrices W of a feature map f(Wx): one file each, found by name through `PROJECTIONS`.

Importing this package is cheap; members are imported when the registry is first read.
"""

from snnk_peft.projections.base import Projection
from snnk_peft.registry import Registry

PROJECTIONS: Registry[type[Projection]] = Registry("projection", __name__)
GIVEN_ROWS = "landmark"  # holds any rows and biases; a matrix becomes this when something is folded in

__all__ = ["GIVEN_ROWS", "PROJECTIONS", "Projection"]
