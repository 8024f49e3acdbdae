"""Component functions f of a feature map f(Wx): one file each, found by name through `COMPONENTS`."""

from snnk_peft.components.base import Component, Features
from snnk_peft.registry import Registry

COMPONENTS: Registry[type[Component]] = Registry("component", __name__)

__all__ = ["COMPONENTS", "Component", "Features"]
