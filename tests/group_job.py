"""What each process of a group does in tests/package/test_process_group.py: `python -m tests.group_job FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from snnk_peft import (
    AdapterPart,
    ClosedFormHead,
    FFNPart,
    HeadFeatures,
    HeadStatistics,
    NarrowFFNPart,
    NarrowHeadsPart,
    Part,
    PoolerPart,
    SNNKConfig,
    bundle,
    calibrate,
    calibrate_adapters,
    fit_closed_form,
    get_snnk_model,
)
from snnk_peft.errors import ConfigError
from snnk_peft.feature_map import advance
from snnk_peft.projections.base import Projection
from tests.tiny_models import tiny
from tests.two_linears_part import TwoLinearsPart

# Features of their own; hidden units, chosen from one pass; rows fitted to a sample of the tokens; whole calls.
PARTS: dict[str, Part] = {
    "features": FFNPart(num_features=12, projection="orf"),
    "units": FFNPart(num_features=6, component="gelu", projection="landmark"),
    "rows": FFNPart(num_features=6, component="relu", projection="landmark"),
    "heads": NarrowHeadsPart(head_dim=6),
    "narrow": NarrowFFNPart(num_features=20),
}
EXAMPLES = 8
STEPS = 60
SHARDS = 100


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Sentences of different lengths, and labels; every batch is another one."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 100, (EXAMPLES, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[::3, 5:] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids[:, 1] % 3})
    return made


def calibrated(
    name: str, share: slice, count: int = 11, steps: int = 0
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Tensors and report of a model that was calibrated on a share of the batches."""
    config = SNNKConfig(parts=[PARTS[name]], pooler=PoolerPart(num_features=10))
    model = get_snnk_model(tiny("bert", num_labels=3), config)
    report = calibrate(model, batches(count)[share], steps=steps, progress=False)
    slots = {key: value for key, value in model.state_dict().items() if "snnk" in key}
    return slots, [{**slot, "seconds": 0} for slot in report.to_dict()["slots"]]


def informed(share: slice) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The adapters' rows that are made from a share of the batches, and the report."""
    part = AdapterPart("gelu", "informed", num_features=4, placement="query_value")
    model = get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(adapter=part))
    report = calibrate_adapters(model, batches(11)[share], progress=False)
    return {key: value for key, value in model.state_dict().items() if "snnk" in key}, report.to_dict()["slots"]


def closed_form(share: slice) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The head that is fitted on a share of the batches, and its report."""
    patched = get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(pooler=PoolerPart(num_features=10)))
    model = bundle(patched)
    fit = fit_closed_form(model, batches(7)[share])
    return dict(model.classifier.state_dict()), {**fit.to_dict(), "seconds": 0}


def pooled_head(share: slice) -> dict[str, torch.Tensor]:
    """A head on pooled hidden states, merged from a hundred shards of one batch each; two are forgotten again."""
    model, features = tiny("bert", num_labels=3), HeadFeatures.across(2)
    head = ClosedFormHead(model, features)
    for batch in batches(SHARDS)[share]:
        shard = ClosedFormHead(model, features)
        shard.add([batch])
        head.merge(shard)
    head.reduce()
    head.remove(batches(2))
    fitted = head.fit(batches(20)[2:])
    return {"weight": fitted.weight, "bias": fitted.bias, "temperature": torch.tensor(fitted.temperature)}


def forgotten(share: slice) -> dict[str, torch.Tensor]:
    """Statistics of which one process has forgotten all examples whose second number is not 0."""
    generator = torch.Generator().manual_seed(4)
    vectors = torch.randn(60, 2, generator=generator)
    vectors[:20, 1] = 0
    targets = torch.arange(60) % 2
    found = HeadStatistics(2, 2, "classes", remember=True)
    found.add(vectors[:20][share], targets[:20][share])
    if share.start in (0, None):
        found.add(vectors[20:], targets[20:])
        found.remove(vectors[20:], targets[20:])
    found.reduce()
    assert found.digests is not None
    kept = torch.tensor(sorted(list(digest) for digest in found.digests))
    return {"gram": found.moments.normal_equations()[0], "digests": kept}


def fault(share: slice, parts: list[Any], count: int = 11) -> str:
    """What calibrate refuses."""
    try:
        calibrate(
            get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(parts=parts)), batches(count)[share], progress=False
        )
    except ConfigError as error:
        return str(error)
    return ""


def trained(rank: int) -> dict[str, torch.Tensor]:
    """Matrices before and after five steps of which each process sees other sentences."""
    found = {}
    for name, params in (("orf", {"redraw_every": 2}), ("fastfood_learned", {}), ("free", {})):
        part = AdapterPart(num_features=8, projection=name, projection_params=params)
        model = get_snnk_model(tiny("bert", num_labels=3), SNNKConfig(adapter=part)).train()
        matrices = {path: module for path, module in model.named_modules() if isinstance(module, Projection)}
        found[f"{name} before"] = next(iter(matrices.values())).materialize().detach().clone()
        ddp: nn.Module = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        torch.manual_seed(rank)  # dropout differs as well
        for batch in batches(10)[rank::2]:
            ddp(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            advance(model)
        found |= {f"{name} after {path}": module.materialize().detach() for path, module in matrices.items()}
    return found


def main(folder: Path) -> None:
    """Everything, with the results in FOLDER."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    share = slice(rank, None, dist.get_world_size())
    tensors, reports = trained(rank), {}
    for name in PARTS:
        slots, reports[name] = calibrated(name, share)
        tensors |= {f"{name}/{key}": value for key, value in slots.items()}
    slots, reports["steps"] = calibrated("units", share, steps=STEPS)
    tensors |= {f"steps/{key}": value for key, value in slots.items()}
    rows, reports["informed"] = informed(share)
    tensors |= {f"informed/{key}": value for key, value in rows.items()}
    head, reports["closed form"] = closed_form(share)
    tensors |= {f"closed form/{key}": value for key, value in head.items()}
    tensors |= {f"pooled head/{key}": value for key, value in pooled_head(share).items()}
    tensors |= {f"forgotten/{key}": value for key, value in forgotten(share).items()}
    reports["faults"] = [
        fault(share, [PARTS["features"]], count=1),
        fault(share, [TwoLinearsPart(targets="*.intermediate.dense")]),
    ]
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / f"{rank}.safetensors")
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
