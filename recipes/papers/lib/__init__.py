"""Shared code of the papers' programs; it builds on `snnk_cli` and `recipes/lib`, which do not depend on it."""

import lib  # noqa: F401 - with the data sets of a clone
