"""snnk_peft: adapt, convert, bundle and share pretrained Transformers with Scalable Neural Network Kernels."""
