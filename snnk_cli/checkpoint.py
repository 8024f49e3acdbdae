"""Checkpoints that continue a run bit for bit, made of safetensors and JSON only (nothing is unpickled).

One folder `step-0000120/` holds: `model.safetensors` (what training changes, plus buffers and the parts a method
added), `optimizer.safetensors` (by parameter name), `rng-RANK.safetensors` and `rng-RANK.json` (generator states of
every process), `state.json` (position, best score, ...) and `manifest.json` (size and sha256 of each of the others,
written last). The folder is filled under a temporary name and renamed, so a killed process leaves no partial checkpoint
under the final name. Loading checks the manifest and every tensor's shape before the first tensor is replaced.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from snnk_cli.files import flush, read_json, sha256, write_json, writing
from snnk_cli.processes import split_like, whole
from snnk_peft import __version__
from snnk_peft.errors import ConfigError
from snnk_peft.saved_folder import remove, temporary_name


class MisfitError(ConfigError):
    """An intact checkpoint of another model: of other settings, or of a version that built it differently."""


_NAME = re.compile(r"step-\d{7}")
_ADDED = re.compile(r"(^|\.)(snnk_|lora_)")


def saved_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of `model` that its settings alone cannot reproduce.

    That is everything except the frozen pretrained parameters: trained parameters, buffers, and what a PEFT method
    added, even if frozen (calibration may have written there).
    """
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad and not _ADDED.search(name)}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}


def list_checkpoints(folder: Path) -> list[Path]:
    """List complete checkpoints, oldest first. Temporary folders of a killed process do not match the name pattern."""
    return sorted(entry for entry in folder.glob("step-*") if _NAME.fullmatch(entry.name) and entry.is_dir())


def save_checkpoint(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    accelerator: Any,
) -> Path:
    """Write `folder/step-<seven digits>` (all processes call this; the main one writes the shared files).

    Args:
        folder: the run's checkpoints folder.
        model: the unwrapped model.
        optimizer: the unwrapped optimizer.
        state: JSON values; `state["step"]` names the checkpoint.
        accelerator: provides the rank and the barriers.
    """
    target = folder / f"step-{state['step']:07d}"
    # All processes fill one folder, named by the main one.
    temporary = Path(broadcast_object_list([str(temporary_name(target))])[0])
    try:
        with writing(target):
            _fill_checkpoint(temporary, model, optimizer, state, accelerator)
            if accelerator.is_main_process:
                if target.exists():
                    shutil.rmtree(target)
                temporary.rename(target)
                flush(folder)
    except BaseException:
        remove(temporary)  # a partial checkpoint would fill a disk that is already full
        raise
    accelerator.wait_for_everyone()
    return target


def _fill_checkpoint(
    temporary: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    accelerator: Any,
) -> None:
    """Write all files of a checkpoint, the manifest last."""
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    _save_rng(temporary, accelerator.process_index)
    # Every process takes part in gathering sharded tensors.
    tensors = _whole(saved_tensors(model), accelerator.is_main_process)
    moments = _whole(_optimizer_tensors(model, optimizer), accelerator.is_main_process)
    if accelerator.is_main_process:
        save_file(tensors, temporary / "model.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
        write_json(temporary / "state.json", dict(state))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        files = sorted(temporary.iterdir())
        for file in files:
            flush(file)
        entries = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files}
        write_json(temporary / "manifest.json", {"format": 1, "files": entries})


def verify(checkpoint: Path) -> None:
    """Raise a ConfigError naming the checkpoint files that are missing, truncated, altered or not in the manifest."""
    if faults := _damage(checkpoint):
        raise ConfigError([*faults[:-1], faults[-1] + _alternative(checkpoint)])


def _damage(checkpoint: Path) -> list[str]:
    """List the faults in the files of a checkpoint."""
    file = checkpoint / "manifest.json"
    if not file.is_file():
        return [f"checkpoint {checkpoint} has no manifest.json"]
    try:
        manifest = read_json(file)
    except ConfigError as error:
        return error.faults
    if not isinstance(manifest, dict) or manifest.get("format") != 1:
        return [
            f"{file}: expected format 1, which snnk-peft {__version__} reads; continue with the version that wrote it "
            "(see the run's environment.json)"
        ]
    entries = manifest.get("files")
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        return [f"{file}: expected `files` with bytes and sha256 of every file; the manifest is damaged"]
    present = {entry.name for entry in checkpoint.iterdir()} - {file.name}
    faults = [f"{checkpoint / name} is missing" for name in sorted(entries.keys() - present)]
    faults += [f"{checkpoint / name} is not in its manifest.json" for name in sorted(present - entries.keys())]
    needed = {"model.safetensors", "optimizer.safetensors", "state.json", "rng-0.safetensors", "rng-0.json"}
    faults += [f"{checkpoint} has no {name}" for name in sorted(needed - entries.keys() - present)]
    for name in sorted(entries.keys() & present):
        path, entry = checkpoint / name, entries[name]
        if not path.is_file():
            faults.append(f"{path} is not a file")
        elif (size := path.stat().st_size) != entry["bytes"]:
            faults.append(f"{path} has {size} bytes, expected {entry['bytes']}: it was truncated or extended")
        elif sha256(path) != entry["sha256"]:
            faults.append(f"{path} does not match the sha256 in its manifest: its content was changed")
    return faults


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and isinstance(entry.get("sha256"), str)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the position and identity stored in a checkpoint, after checking its files.

    Raises:
        ConfigError: a file is damaged, or the state belongs to another step.
    """
    verify(checkpoint)
    file = checkpoint / "state.json"
    try:
        state = _with_processes(checkpoint, read_json(file))
        _, _, run, best = *(state["identity"][key] for key in ("data", "batch")), state["run"], state["run"]["best"]
        sound = all(isinstance(value, int | float) for key, value in run.items() if key != "best")
        sound &= isinstance(state["step"] + state["processes"] + (best or {"step": 0})["step"], int)
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise ConfigError(f"{file}: expected step, processes, identity and run{_alternative(checkpoint)}")
    if f"step-{state['step']:07d}" != checkpoint.name or run.get("step") != state["step"]:
        raise ConfigError(
            f"{file} is the state after step {state['step']}, but its folder is {checkpoint.name}: it was renamed or "
            f"assembled from parts of others{_alternative(checkpoint)}"
        )
    return state


def load_model(checkpoint: Path, model: torch.nn.Module) -> None:
    """Put the checkpoint's tensors into `model`, after checking all of them."""
    verify(checkpoint)
    tensors = _read(checkpoint / "model.safetensors")
    _compare(checkpoint, tensors, saved_tensors(model))
    _fill(saved_tensors(model), tensors)


def load_checkpoint(
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    identity: Mapping[str, Any],
    rank: int,
    world: int,
) -> dict[str, Any]:
    """Restore model, optimizer and generators, and return the saved state. Check everything before any change.

    Args:
        checkpoint: its folder.
        model: the unwrapped model, built from the same settings.
        optimizer: the unwrapped optimizer.
        identity: must equal the saved `identity`: data, and batch, the number of examples per forward pass over all
            processes.
        rank: rank of this process.
        world: number of processes. Generators are restored only if it is unchanged (`processes` in the result).

    Raises:
        ConfigError: a file is damaged, or a tensor's name, shape or dtype does not fit the model.
    """
    state = read_state(checkpoint)
    before = state["identity"]
    changed = []
    if before["data"] != identity["data"]:
        changed.append(
            f"{checkpoint}: data was {before['data']!r} and is now {identity['data']!r}; the run cannot be continued"
        )
    if before["batch"] != identity["batch"]:
        changed.append(
            f"{checkpoint} was saved with {before['batch']} examples per forward pass over all processes; now there "
            f"are {identity['batch']}, {identity['batch'] // world} in each of {world}. "
            f"{_divided(before['batch'], world)}"
        )
    if changed:
        raise ConfigError(changed)
    tensors = _read(checkpoint / "model.safetensors")
    moments = _read(checkpoint / "optimizer.safetensors")
    target = saved_tensors(model)
    _compare(checkpoint, tensors, target)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    per_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in moments.items():
        name, _, kind = key.rpartition("/")
        if name not in trained or (value.dim() > 0 and value.shape != trained[name].shape):
            raise MisfitError(f"{checkpoint}: optimizer state {key!r} matches no trained parameter of this model")
        per_parameter.setdefault(name, {})[kind] = value
    generators: tuple[dict[str, torch.Tensor], Any] | None = None
    if state["processes"] == world:
        generators = _read(checkpoint / f"rng-{rank}.safetensors"), read_json(checkpoint / f"rng-{rank}.json")

    _fill(target, tensors)
    optimizer.state.clear()
    for name, values in per_parameter.items():
        parameter = trained[name]
        # AdamW keeps its step count on the CPU; clones own aligned memory, unlike views into the file.
        optimizer.state[parameter] = {
            kind: value.clone() if value.dim() == 0 else split_like(value, parameter) for kind, value in values.items()
        }
    if generators is not None:
        _load_rng(*generators)
    return state


def _with_processes(checkpoint: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in the current format; 0.1.0 kept `processes` in `identity`, the batch size in the settings."""
    if "processes" in state:
        return state
    settings = yaml.safe_load((checkpoint.parent.parent / "config.yaml").read_text())
    world = state["identity"]["processes"]
    batch = world * settings["train"]["batch_size"]
    return {**state, "processes": world, "identity": {"data": state["identity"]["data"], "batch": batch}}


def _divided(batch: int, world: int) -> str:
    """Describe how to continue a run with `batch` examples per forward pass on `world` processes."""
    if batch % world == 0:
        return f"Continue with train.batch_size={batch // world}"
    fitting = [number for number in range(1, batch + 1) if batch % number == 0]
    return f"{world} processes cannot split {batch} evenly: continue with {', '.join(map(str, fitting))} processes"


def prune(folder: Path, keep: int, best: str | None) -> None:
    """Delete all but the newest `keep` checkpoints and the best one."""
    for checkpoint in list_checkpoints(folder)[:-keep]:
        if checkpoint.name != best:
            _delete(checkpoint)


def discard_newer(checkpoint: Path) -> list[str]:
    """Delete the checkpoints that `--checkpoint` discards (the run will write them again), and return their names."""
    newer = [other for other in list_checkpoints(checkpoint.parent) if other.name > checkpoint.name]
    for other in newer:
        _delete(other)
    return [other.name for other in newer]


def _delete(checkpoint: Path) -> None:
    # Renamed first: a half-deleted checkpoint must not carry a valid name.
    doomed = temporary_name(checkpoint)
    shutil.rmtree(doomed, ignore_errors=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _alternative(checkpoint: Path) -> str:
    """Describe what to do about a damaged checkpoint."""
    for other in reversed([entry for entry in list_checkpoints(checkpoint.parent) if entry.name < checkpoint.name]):
        if _damage(other):
            continue
        return f". The previous complete checkpoint is {other.name}: continue with --resume --checkpoint {other.name}"
    return ". There is no earlier complete checkpoint: start again with --overwrite"


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: not a readable safetensors file ({error})") from error


def _compare(checkpoint: Path, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    faults = [f"{checkpoint}: tensor {name} is missing" for name in expected.keys() - found.keys()]
    faults += [f"{checkpoint}: tensor {name} does not exist in this model" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        mine, theirs = expected[name], found[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            given, wanted = f"{tuple(theirs.shape)} {theirs.dtype}", f"{tuple(mine.shape)} {mine.dtype}"
            faults.append(f"{checkpoint}: tensor {name} is {given}; this model has {wanted}")
    if faults:
        raise MisfitError(sorted(faults))


def _fill(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(split_like(source[name], value))


def _optimizer_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    names = {id(value): name for name, value in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{kind}": value
        for parameter, values in optimizer.state.items()
        for kind, value in values.items()
    }


def _whole(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Gather full copies on the CPU; if `keep` is false, this process only takes part."""
    kept = {}
    for name, value in tensors.items():
        value = whole(value.detach())
        if keep:
            kept[name] = value.cpu().contiguous().clone()
    return kept


def _save_rng(folder: Path, rank: int) -> None:
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    state: Any = np.random.get_state()
    algorithm, keys, position, has_gauss, cached = state
    save_file(tensors, folder / f"rng-{rank}.safetensors")
    numpy_state = [algorithm, keys.tolist(), position, has_gauss, cached]
    write_json(folder / f"rng-{rank}.json", {"python": random.getstate(), "numpy": numpy_state})


def _load_rng(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    version, internal, gauss = plain["python"]
    random.setstate((version, tuple(internal), gauss))
    algorithm, keys, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
