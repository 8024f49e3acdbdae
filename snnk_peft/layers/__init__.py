"""SNNK layers as plain `nn.Module`s, independent of PEFT and transformers."""
