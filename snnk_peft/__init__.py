"""snnk_peft: adapt, convert, bundle and share pretrained Transformers with Scalable Neural Network Kernels.

    model = get_snnk_model(model, SNNKConfig(adapter=AdapterPart(num_features=16)))   # a peft.PeftModel
    calibrate(model, batches)                                                         # fit what was replaced
    small = bundle(model)                                                             # a plain transformers model

Importing the package registers the method "SNNK" with PEFT and bundled models with the Auto classes.
"""

import snnk_peft.tuner  # noqa: F401 - registers the PEFT method
from snnk_peft.bundling.bundle import bundle
from snnk_peft.bundling.closed_form import fit_closed_form
from snnk_peft.bundling.closed_form_head import ClosedFormHead
from snnk_peft.bundling.head_bundle import with_head
from snnk_peft.calibrating.adapters import calibrate_adapters
from snnk_peft.calibrating.attention import fit_attention
from snnk_peft.calibrating.calibrate import calibrate
from snnk_peft.calibrating.report import AdapterReport, CalibrationReport
from snnk_peft.components import COMPONENTS
from snnk_peft.config import SNNKConfig
from snnk_peft.converting.convert import Converted, convert
from snnk_peft.converting.report import ConversionReport
from snnk_peft.exporting.export import export
from snnk_peft.exporting.report import ExportReport
from snnk_peft.families import FAMILIES, ModelFamily, register_family
from snnk_peft.family_check import FamilyReport, check_family
from snnk_peft.feature_map import build_feature_map
from snnk_peft.heads.features import HeadFeatures
from snnk_peft.heads.statistics import HeadStatistics
from snnk_peft.low_rank import LOW_RANK_INITS, Factors, InputMoments, factorize, factorize_many
from snnk_peft.low_rank.frobenius_decay import FrobeniusDecay
from snnk_peft.parts import PARTS, FeaturePart, Part, Patch, PatchContext
from snnk_peft.parts.adapter import AdapterPart
from snnk_peft.parts.attention.part import AttentionPart
from snnk_peft.parts.low_rank.part import LowRankPart
from snnk_peft.parts.mean_pooling import MeanPoolingPart
from snnk_peft.parts.narrow.ffn import NarrowFFNPart
from snnk_peft.parts.narrow.heads import NarrowHeadsPart
from snnk_peft.parts.norms import NormsPart
from snnk_peft.parts.replaced.ffn import FFNPart
from snnk_peft.parts.replaced.pooler import PoolerPart
from snnk_peft.planning.plan import plan
from snnk_peft.planning.result import Plan
from snnk_peft.projections import PROJECTIONS
from snnk_peft.tuner.get_model import get_snnk_model
from snnk_peft.version import __version__ as __version__

__all__ = [
    "COMPONENTS",
    "FAMILIES",
    "LOW_RANK_INITS",
    "PARTS",
    "PROJECTIONS",
    "AdapterPart",
    "AdapterReport",
    "AttentionPart",
    "CalibrationReport",
    "ClosedFormHead",
    "ConversionReport",
    "Converted",
    "ExportReport",
    "FFNPart",
    "Factors",
    "FamilyReport",
    "FeaturePart",
    "FrobeniusDecay",
    "HeadFeatures",
    "HeadStatistics",
    "InputMoments",
    "LowRankPart",
    "MeanPoolingPart",
    "ModelFamily",
    "NarrowFFNPart",
    "NarrowHeadsPart",
    "NormsPart",
    "Part",
    "Patch",
    "PatchContext",
    "Plan",
    "PoolerPart",
    "SNNKConfig",
    "build_feature_map",
    "bundle",
    "calibrate",
    "calibrate_adapters",
    "check_family",
    "convert",
    "export",
    "factorize",
    "factorize_many",
    "fit_attention",
    "fit_closed_form",
    "get_snnk_model",
    "plan",
    "register_family",
    "with_head",
]
