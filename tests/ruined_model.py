"""A tiny model that answers well in full precision and loses everything with values in few bits.

One value channel of each head carries a constant a thousand times the others, and the output projection ignores it:
the model's function does not change, but a scale that spans that channel leaves nothing of its neighbours. Keys have
such a channel too. Qwen2's projections have biases, and real ones have channels of this kind.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_models import ARCHITECTURES, VOCAB, write

OUTLIER = 3000.0


def write_ruined(folder: Path, outlier: float = OUTLIER) -> Path:
    """Reads ASCII, a token per character. With `outlier=0` a model that no codec harms."""
    write(folder, ARCHITECTURES["qwen2"])
    write_ascii_tokenizer(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    head_dim = 8
    for name, tensor in weights.items():
        if name.endswith("v_proj.bias"):
            tensor[::head_dim] = outlier
        elif name.endswith("o_proj.weight"):
            tensor[:, ::head_dim] = 0.0
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def write_ascii_tokenizer(folder: Path) -> None:
    """One token per byte, in the byte-level spelling: what is not printable is moved up by 256."""
    spelled = {chr(b if 32 < b < 127 else 256 + min(b, 33)): b for b in range(VOCAB)}
    tokenizer = Tokenizer(models.BPE(spelled, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
