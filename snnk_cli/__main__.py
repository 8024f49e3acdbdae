"""`python -m snnk_cli` is the command `snnk`."""

from snnk_cli.app import app

app(prog_name="snnk")
