"""`python -m snnk_peft.feature_map describe posrf mm`: see feature_map/describe.py."""

from snnk_peft.feature_map.describe import main

raise SystemExit(main())
