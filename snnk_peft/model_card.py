"""Model cards of bundles and adapter checkpoints, rendered from data. Every card says `import snnk_peft`.

The text is `templates/model_card.md`, whose fields are filled in here. Unknown entries are marked as unknown, never
invented.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Protocol

import yaml
from huggingface_hub import ModelCard, ModelCardData

from snnk_peft.digests import notes
from snnk_peft.version import __version__

# Task head (end of the class name) -> the Hub's name for the task.
PIPELINE_TAGS: dict[str, str | None] = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "ForImageClassification": "image-classification",
    "ForAudioClassification": "audio-classification",
    "ForMultipleChoice": "multiple-choice",
    "ForPreTraining": None,
    "Model": "feature-extraction",
}
# PEFT's name for a task -> task head.
TASK_HEADS = {
    "SEQ_CLS": "ForSequenceClassification",
    "TOKEN_CLS": "ForTokenClassification",
    "QUESTION_ANS": "ForQuestionAnswering",
    "CAUSAL_LM": "ForCausalLM",
}
# The title of the card that PEFT writes with every adapter; a user who edits the card replaces it.
PEFT_TITLE = "# Model Card for Model ID"
SENTENCE_LOAD = """import snnk_peft  # makes the Auto classes know the model
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("<this repository>")"""


class AdapterConfig(Protocol):
    """The fields of an adapter's config that appear on a card."""

    base_model_name_or_path: str | None
    task_type: Any

    def named_parts(self) -> Mapping[str, Any]: ...


def write_model_card(
    folder: str | os.PathLike[str],
    *,
    report: Any = None,
    base_model: str | None = None,
    model_class: str | None = None,
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | str | None = None,
    title: str | None = None,
    tags: Sequence[str] = (),
    dataset: str | None = None,
    data: str | None = None,
    examples: Mapping[str, int] | None = None,
    license: str | None = None,
    remarks: Sequence[str] = (),
) -> Path:
    """Write README.md with the Hub's YAML header into a model folder.

    Args:
        folder: the folder of a bundle, of a SentenceTransformer around one (then it holds modules.json), or of an
            adapter checkpoint (adapter_config.json).
        report: the `BundleReport` of a bundle (`model.bundle_report`), with parts, sizes and parity.
        base_model: id of the pretrained model on the Hub; taken from the report if None. Local paths are not printed.
        model_class: the transformers class, for an adapter; determines the Auto class that the card names.
        config: the SNNK parts as plain data; taken from the report if None.
        metrics: name -> score, on held-out data.
        training: how the model was trained: text, or the resolved configuration.
        title: heading; the folder's name if None.
        tags: further tags for the Hub.
        dataset: id of the data set on the Hub that the metrics refer to, or None.
        data: description of the training and evaluation data.
        examples: split -> number of rows used: "train" for training, the others for the metrics.
        license: licence of the weights, usually that of the base model.
        remarks: on the metrics, written below them.

    Returns:
        The path of the card.

    Example:
        >>> import tempfile
        >>> path = write_model_card(tempfile.mkdtemp(), base_model="google-bert/bert-base-uncased", metrics={"f1": 0.9})
        >>> "import snnk_peft" in path.read_text()
        True
    """
    folder = Path(folder)
    is_adapter, embeds = (folder / "adapter_config.json").exists(), (folder / "modules.json").exists()
    name = model_class or (report.model_class if report is not None else "PreTrainedModel")
    name = name.replace("LMHeadModel", "ForCausalLM")  # older name of the same head; Auto classes use the new one
    base = hub_id(base_model) or (hub_id(report.base_model) if report is not None else None)
    parts = config if config is not None else (report.parts if report is not None else {})
    header = ModelCardData(
        library_name="peft" if is_adapter else "sentence-transformers" if embeds else "transformers",
        base_model=base,
        license=license,
        datasets=dataset,
        metrics=sorted(metrics) if metrics else None,
        pipeline_tag="sentence-similarity"
        if embeds
        else next((tag for head, tag in PIPELINE_TAGS.items() if name.endswith(head)), None),
        tags=list(
            dict.fromkeys(["snnk", "snnk_peft", *(["custom_code"] if any(folder.glob("modeling_*.py")) else []), *tags])
        ),
    )
    fields = {
        "front_matter": f"---\n{header.to_yaml()}\n---",
        "title": title or folder.resolve().name,
        "summary": _summary(base, is_adapter),
        "load": SENTENCE_LOAD if embeds else _load(name, is_adapter),
        "load_note": _load_note(is_adapter, any(folder.glob("modeling_*.py"))),
        "parts": _json(parts, "The part configuration was not recorded.") + _reach(parts),
        "folded": _folded(report),
        "sizes": _sizes(folder, report),
        "data": _data(data, examples),
        "metrics": "\n\n".join(
            [_table(("metric", "score"), list(metrics.items())) if metrics else "Not evaluated.", *remarks]
        ),
        "training": training if isinstance(training, str) else _json(training, "Not recorded."),
        "version": __version__,
    }
    path = folder / "README.md"
    path.write_text(Template(template()).substitute(fields), encoding="utf-8")
    return path


def write_adapter_card(
    folder: str | os.PathLike[str], config: AdapterConfig, class_mapping: Mapping[str, Any] | None
) -> None:
    """Replace the card that PEFT writes with an adapter; a card edited by the user is kept."""
    folder = Path(folder)
    card = folder / "README.md"
    if card.is_file() and PEFT_TITLE not in card.read_text(encoding="utf-8", errors="replace"):
        mend_card(card, config.base_model_name_or_path)
        return
    head = TASK_HEADS.get(str(getattr(config.task_type, "value", config.task_type)))
    name = (class_mapping or {}).get("base_model_class") or f"Model{head or ''}"
    parts = {part: vars(value) for part, value in config.named_parts().items()}
    write_model_card(folder, base_model=config.base_model_name_or_path, model_class=name, config=parts)


def mend_card(path: Path, base_model: str | None) -> None:
    """Add the header fields that the Hub requires to a card, and leave everything else unchanged.

    Args:
        path: path of the card.
        base_model: for a card that names none. A local path is removed, since the Hub rejects it.
    """
    try:
        card = ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        notes.warning("%s has a header that cannot be read, and stays as it is: %s", path, error)
        return
    before = card.data.to_dict()
    base, tags = (_listed(before.get(key)) for key in ("base_model", "tags"))
    bases = [name for name in base if hub_id(name)] or [name for name in [hub_id(base_model)] if name]
    wanted = ["snnk", "snnk_peft", *(tag for tag in tags if _is_public(tag))]
    card.data.base_model = bases[0] if len(bases) == 1 else bases or None
    card.data.tags = tags if set(wanted) == set(tags) else list(dict.fromkeys(wanted))
    card.data.library_name = "peft"  # the Trainer asks for it, and writes another one
    if card.data.to_dict() != before:
        card.save(path)


def _listed(value: object) -> list[str]:
    """Return header entries, one string or several, as a list."""
    return [str(each) for each in (value if isinstance(value, list) else [value]) if each is not None]


def _is_public(tag: str) -> bool:
    """Return False for a tag that names a local path, as PEFT's "base_model:adapter:/home/me/model" does."""
    return not tag.startswith("base_model:") or hub_id(tag.rpartition(":")[2]) is not None


def template() -> str:
    """Return the text of the card with its $fields."""
    return files("snnk_peft").joinpath("templates/model_card.md").read_text(encoding="utf-8")


def mentions_import(card: str) -> bool:
    """Return True if a card tells its readers to import this package."""
    return "import snnk_peft" in card


def hub_id(name: str | None) -> str | None:
    """Return `name` if it can be a model id on the Hub; None for local paths, which are private."""
    valid = name is not None and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith(".")
    return name if valid and not os.path.exists(str(name)) else None


def _summary(base: str | None, is_adapter: bool) -> str:
    source = f"[{base}](https://huggingface.co/{base})" if base else "A pretrained model"
    if is_adapter:
        return f"{source} with SNNK layers: a PEFT adapter checkpoint with the new parameters only."
    return (
        f"{source} with Scalable Neural Network Kernel layers, folded: each replaced or added layer is a feature map "
        "Φ(x) followed by one matrix. A plain transformers model; PEFT is not needed to run it."
    )


def _load(name: str, is_adapter: bool) -> str:
    head = next((head for head in PIPELINE_TAGS if name.endswith(head)), "Model")
    head = "" if head == "Model" else head
    if is_adapter:
        head = head if head in TASK_HEADS.values() else ""  # PEFT has Auto classes only for these
        return (
            "import snnk_peft  # makes PEFT know the method\n"
            f"from peft import AutoPeftModel{head}\n\n"
            f'model = AutoPeftModel{head}.from_pretrained("<this repository>")'
        )
    return (
        "import snnk_peft  # makes the Auto classes know the model\n"
        f"from transformers import AutoModel{head}\n\n"
        f'model = AutoModel{head}.from_pretrained("<this repository>")'
    )


def _reach(parts: Mapping[str, Any]) -> str:
    """Describe the longest supported text."""

    def lengths_in(data: Any) -> list[int]:
        if not isinstance(data, Mapping):
            return []
        own = data.get("fitted_length")
        return [*([] if own is None else [own]), *(length for value in data.values() for length in lengths_in(value))]

    if not (lengths := lengths_in(parts)):
        return ""
    return (
        f"\n\nLinear attention was fitted to texts of at most {min(lengths):,} tokens. In a decoder, later "
        "tokens see only their nearest neighbours and the first tokens; without a near field, longer texts are refused."
    )


def _load_note(is_adapter: bool, has_code: bool) -> str:
    if is_adapter:
        return "Without `import snnk_peft`, PEFT stops with `KeyError: 'SNNK'`. Install: `pip install snnk-peft`."
    if not has_code:
        return "Needs the package that defines the original model class as well; there is no code file."
    return (
        "Without the package, `trust_remote_code=True` runs the code file in this repository, which needs torch and "
        "transformers only. Without either, loading stops with an error. Always load through the Auto classes."
    )


def _json(data: Mapping[str, Any] | None, otherwise: str) -> str:
    if not data:
        return otherwise
    return f"```json\n{json.dumps(data, indent=2, default=str)}\n```"


def _folded(report: Any) -> str:
    if report is None:
        return ""
    rows = [
        (", ".join(f"`{path}`" for path in alike.paths), alike.count, alike.folded.before, alike.folded.after)
        for alike in report.folded_alike()
    ]
    header = ("modules", "places", "before", "after")
    return "\n\n".join([_table(header, rows), *(f"- {remark}" for remark in report.remarks)])


def _sizes(folder: Path, report: Any) -> str:
    if report is None:
        files = sorted([*folder.glob("*.safetensors")])
        return _table(("file", "bytes"), [(file.name, f"{file.stat().st_size:,}") for file in files]) if files else "-"
    rows = [(what, f"{parameters:,}", f"{size:,}") for what, parameters, size in report.rows()]
    return (
        f"{_table(('model', 'parameters', 'bytes'), rows)}\n\nParameters include the matrices of feature maps. On a "
        f"probe batch in {report.dtype} the bundle's outputs differ from the unfolded model's by "
        f"{report.parity_error:.1e} of the largest output (accepted: {report.parity_tolerance:.0e})."
    )


def _data(data: str | None, examples: Mapping[str, int] | None) -> str:
    lines = [] if data is None else [f"{data[0].upper()}{data[1:].removesuffix('.')}."]
    for split, rows in (examples or {}).items():
        lines.append(f"{'Trained on' if split == 'train' else f'Evaluated on {split}:'} {rows:,} rows.")
    return "\n".join(lines) or "Not recorded."


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(cell(value) for value in row) + " |" for row in rows])
