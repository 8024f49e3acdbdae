"""The processes of a run: the launcher's requests, how a model is sharded, and what happens if a process dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, broadcast_object_list, set_seed
from torch.distributed.tensor import distribute_tensor

from snnk_peft.errors import ConfigError


def make_accelerator(train: Any) -> Accelerator:
    """Create the accelerator of this process; a ConfigError if the launcher's request is not available.

    Args:
        train: settings with device and mixed_precision.
    """
    cpu = train.device == "cpu" or _asked_for("USE_CPU") or not torch.cuda.is_available()
    if cpu and train.mixed_precision == "fp16":
        raise ConfigError("train.mixed_precision is fp16, which needs a CUDA device; use bf16 or no")
    if faults := launcher_faults(train.device, cpu):
        raise ConfigError(faults)
    accelerator = Accelerator(cpu=cpu, mixed_precision=train.mixed_precision)
    if _asked_for("USE_FSDP") and accelerator.distributed_type is DistributedType.MULTI_CPU:
        # accelerate shards only on GPUs, but FSDP2 also runs on CPUs, where a profile can be tried out.
        plugin = FullyShardedDataParallelPlugin()
        if train.mixed_precision != "no":
            plugin.set_mixed_precision(train.mixed_precision)
        accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
    return accelerator


def _asked_for(name: str) -> bool:
    """Return True if `accelerate launch` set a switch."""
    return os.environ.get(f"ACCELERATE_{name}", "").lower() in ("1", "true", "yes")


def launched_by_accelerate() -> bool:
    """Return True if `accelerate launch`, not python or torchrun, started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def launcher_faults(device: str, cpu: bool, setting: str = "train.device") -> list[str]:
    """List the launcher's requests that cannot be met.

    Args:
        device: the device setting, "cpu" or "auto".
        cpu: whether this process will compute on the CPU.
        setting: the user's name for that setting.
    """
    local, cards = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    faults = []
    if launched_by_accelerate() and not _asked_for("USE_CPU") and device != "cpu" and not torch.cuda.is_available():
        faults.append(
            f"accelerate launch asked for GPUs, but torch {torch.__version__} finds none on this machine; use "
            f"recipes/accelerate/cpu.yaml, or add {setting}=cpu as the command in multi_cpu.yaml does"
        )
    if not cpu and local > cards:
        faults.append(
            f"{local} processes were started on this machine, which has {cards} GPUs, and each process needs its own; "
            f"start {cards} (num_processes of the profile, or --nproc_per_node), or add {setting}=cpu"
        )
    if _asked_for("USE_DEEPSPEED"):
        faults.append(
            "the profile asks for DeepSpeed, whose partitions the recipes' checkpoints do not hold; use "
            "recipes/accelerate/fsdp2.yaml instead"
        )
    if _asked_for("USE_FSDP") and os.environ.get("FSDP_VERSION") != "2":
        faults.append("the profile asks for FSDP 1; expected fsdp_version: 2, as in recipes/accelerate/fsdp2.yaml")
    if _asked_for("USE_FSDP") and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true":
        faults.append(
            "fsdp_cpu_ram_efficient_loading is true: only process 0 would read the pretrained weights, from which "
            "every process starts its SNNK layers; set it to false"
        )
    return faults


def in_main(accelerator: Accelerator, work: Callable[[], None]) -> None:
    """Run `work` only in the main process; its ConfigError is raised in all processes."""
    faults: list[str] = []
    if accelerator.is_main_process:
        try:
            work()
        except ConfigError as error:
            faults = error.faults
    if faults := broadcast_object_list([faults])[0]:
        raise ConfigError(faults)


def prepare(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, Any]:
    """Prepare model and optimizer as the launcher requests: in DDP, sharded by FSDP2 (in place), or unchanged."""
    _choose_units(accelerator, model)
    prepared, wrapped = accelerator.prepare(model, optimizer)
    if isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
        # Random matrices are the same everywhere; broadcasting them in each step would cost as much as the gradients.
        prepared.broadcast_buffers = False
    return prepared, wrapped


def unwrapped(accelerator: Accelerator, model: torch.nn.Module) -> Any:
    """Return the model as it was before `prepare`, in float32 again; it can be prepared again.

    accelerate marks what it unwraps, and would return a marked model unchanged, without autocast.
    """
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    vars(plain).pop("_is_accelerate_prepared", None)
    return plain


def _choose_units(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Use the model's own FSDP2 wrap classes if the profile names none.

    Classes that hold the input embedding are left out: accelerate makes that a unit of its own, and no parameter may be
    in two (BERT and ViT list their embeddings alongside their layers).
    """
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if accelerator.distributed_type is not DistributedType.FSDP or plugin.transformer_cls_names_to_wrap:
        return
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    listed = set(getattr(model, "_no_split_modules", None) or ())
    around = {type(module).__name__ for module in model.modules() if embedding in module.modules()}
    plugin.transformer_cls_names_to_wrap = sorted(
        {type(module).__name__ for module in model.modules()} & listed - around
    )


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if each process holds only part of the parameters (FSDP2)."""
    return any(_is_sharded(value) for value in model.parameters())


def _is_sharded(value: torch.Tensor) -> bool:
    return hasattr(value, "full_tensor")


def whole(value: Any) -> torch.Tensor:
    """Return the full tensor; if it is sharded, every process must call this."""
    return value.full_tensor() if _is_sharded(value) else value


def split_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a full tensor as a copy, placed and sharded as `like` is."""
    value = value.to(like.device, copy=True)
    if not _is_sharded(like):
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def clip_gradients(accelerator: Accelerator, parameters: list[torch.Tensor], limit: float) -> torch.Tensor:
    """Clip gradients to a total norm of `limit`; return their norm.

    `accelerator.clip_grad_norm_` compares tensors of different shapes when a sharded model is trained in full.
    """
    accelerator.unscale_gradients()
    return whole(torch.nn.utils.clip_grad_norm_(parameters, limit))


def seed_continuation(seed: int, step: int, rank: int) -> None:
    """Seed the generators of a run resumed with a different number of processes, for which none were saved."""
    set_seed((seed + 1 + 1_000_003 * step + rank) % 2**32)


def lost_process(error: RuntimeError) -> str | None:
    """Return a message if the error came from losing another process, else None."""
    first = str(error).splitlines()[0] if str(error) else ""
    lost = isinstance(error, dist.DistBackendError) or any(word in first for word in ("gloo", "Gloo", "NCCL"))
    if not lost or not dist.is_initialized():
        return None
    return (
        f"process {dist.get_rank()} of {dist.get_world_size()} can no longer reach another process, which was killed "
        f"or failed; the launcher says which one, with its exit code ({first})"
    )
