"""A checkpoint as a folder of Hugging Face's form, for peers that read no other: config.json and safetensors.

    python -m ops.bench.peers.hf_folder '{"model_path": ..., "cache_dir": ...}'

A process of its own, which ends before anything is measured: it needs torch for a moment.
"""

import json
import sys
from pathlib import Path

from model.checkpoint_files import CheckpointKind, checkpoint_kind
from model.gguf import GGUFFile
from model.gguf_config import config_from_gguf
from model.gguf_convert import cached_conversion
from ops.bench.peers.gguf_files import FOLDER
from ops.bench.peers.transformers_model import config_values
from ops.bench.serving import serve


def hf_folder(model_path: Path, cache_dir: Path) -> Path:
    """The checkpoint's own folder; or one in `cache_dir` that links to the weights which our engine reads, too.

    It has no tokenizer: the bench gives token ids.
    """
    if checkpoint_kind(model_path) is CheckpointKind.DIRECTORY:
        return model_path.resolve()
    import transformers

    file = GGUFFile(model_path)
    config = config_from_gguf(file)
    weights = cached_conversion(file, config, cache_dir, None).resolve()
    folder = cache_dir / FOLDER / weights.stem
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(weights)
    config_class = getattr(transformers, config.architecture).config_class
    described = config_class(architectures=[config.architecture], dtype="float32", **config_values(config))
    (folder / "config.json").write_text(described.to_json_string(use_diff=False))
    return folder.resolve()


def main() -> None:
    """Entry point of the process."""
    options = json.loads(sys.argv[1])
    serve({"path": lambda: str(hf_folder(Path(options["model_path"]), Path(options["cache_dir"])))})


if __name__ == "__main__":
    main()
