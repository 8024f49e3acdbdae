"""`python -m snnk_peft.cost MODEL --config snnk.yaml`: see cost/command.py."""

from snnk_peft.cost.command import main

if __name__ == "__main__":
    raise SystemExit(main())
