"""What the libraries print that tells the user of a recipe nothing."""

import warnings

import datasets
import transformers


def quiet() -> None:
    """Leave the terminal to the recipe's own lines: no weight-loading bars, no table of newly initialised tensors."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    # PEFT reads an attribute that transformers has renamed.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
