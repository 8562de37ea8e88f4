"""Models of random weights for the measurements: ours, and the same in transformers."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from model.dummy import dummy_model_path
from model.dummy_weights import DummyWeights
from model.loader import load_config
from tests.gpu.timing import DEVICE, IS_REHEARSED
from tests.tiny_checkpoint import CONFIG
from worker.engine import Engine
from worker.engine_builder import build_engine
from worker.engine_config import EngineConfig, EngineInfo

DTYPE = torch.float32 if IS_REHEARSED else torch.bfloat16


def shapes_of(preset: str) -> Path:
    """The folder with the preset's config.json; in a rehearsal a tiny one's."""
    if not IS_REHEARSED:
        return dummy_model_path(preset)
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def our_engine(path: Path, **options: Any) -> tuple[Engine, EngineInfo]:
    """An engine in this process."""
    dtype = str(DTYPE).removeprefix("torch.")
    return build_engine(EngineConfig(str(path), load_format="dummy", device=DEVICE.type, dtype=dtype, **options))


def transformers_model(path: Path) -> Any:
    """The same weights in transformers, as it runs by default: SDPA, its own cache."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE, attn_implementation="sdpa").eval()
    weights = DummyWeights(load_config(path, "dummy"), dtype=DTYPE, device=DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    return model
