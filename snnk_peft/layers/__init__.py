"""SNNK layers as plain `nn.Module`s: they know neither PEFT nor transformers."""
