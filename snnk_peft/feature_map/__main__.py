"""`python -m snnk_peft.feature_map describe posrf mm`: see feature_map/describe.py."""

from snnk_peft.feature_map.describe import main

if __name__ == "__main__":
    raise SystemExit(main())
