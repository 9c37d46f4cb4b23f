"""The drafter: a few Llama layers between the target's embeddings and an LM head over the tokens it can propose.

It sees token ids alone, no hidden states of the target, because ids are what the wire carries. The embeddings are the
target's own and never change. Reduced vocabularies: Zhao et al. 2025, "FR-Spec"; Li et al. 2025, "EAGLE-3".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.drafter.packing import Packed
from training.drafter.target import Shape, Target
from training.drafter.vocabulary import Vocabulary


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self._heads * self._size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self._kv_heads * self._size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self._kv_heads * self._size, bias=False)
        self.o_proj = nn.Linear(self._heads * self._size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, packed: Packed, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """[n, hidden] → [n, hidden]"""
        q = _rotated(self.q_proj(hidden).view(-1, self._heads, self._size), *rotation)
        k = _rotated(self.k_proj(hidden).view(-1, self._kv_heads, self._size), *rotation)
        v = self.v_proj(hidden).view(-1, self._kv_heads, self._size)
        share = self._heads // self._kv_heads
        q, k, v = self._lines(q, packed), self._lines(k, packed), self._lines(v, packed)
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        row = out.transpose(1, 2).reshape(len(packed.cells), -1)[packed.places]
        attended: Tensor = self.o_proj(row)
        return attended

    def _lines(self, row: Tensor, packed: Packed) -> Tensor:
        """[n, heads, size] → [sequences, heads, longest, size]"""
        lines = row[packed.cells].view(packed.sequences, -1, row.shape[1], self._size)
        return lines.transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, packed: Packed, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), packed, rotation)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Drafter(nn.Module):
    """Its parameters are what is trained and released; `embedding` is neither."""

    def __init__(self, shape: Shape, layers: int, vocabulary: Vocabulary, embedding: Tensor) -> None:
        """`embedding` [vocab_size, hidden_size] of the target."""
        super().__init__()
        self.shape, self.vocabulary = shape, vocabulary
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.head = nn.Linear(shape.hidden_size, len(vocabulary), bias=False)
        self.embedding: Tensor
        self.register_buffer("embedding", embedding, persistent=False)

    @classmethod
    def beginning(cls, target: Target, layers: tuple[int, ...], vocabulary: Vocabulary) -> Drafter:
        """Made of the target's own layers, final norm and rows of its LM head. Raises ConfigError, ModelError."""
        drafter = cls(target.shape, len(layers), vocabulary, target.embedding())
        rows = target.head()[torch.from_numpy(vocabulary.target_ids).long()]
        drafter.load_state_dict({**target.layers(layers), "head.weight": rows})
        return drafter

    def forward(self, packed: Packed, rows: Tensor) -> Tensor:
        """Logits after the tokens `rows` [r] of the row, over the reduced vocabulary: [r, proposable]."""
        hidden = self.embedding[packed.tokens]
        rotation = self._rotation(packed.positions)
        for layer in self.layers:
            hidden = layer(hidden, packed, rotation)
        logits: Tensor = self.head(self.norm(hidden[rows]))
        return logits

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, [n, 1, head_dim / 2] each."""
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        angles = positions.float()[:, None, None] * self.shape.rope_theta ** (-half / self.shape.head_dim)
        return angles.cos(), angles.sin()


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) on [n, heads, size], halves paired as in Llama's checkpoints."""
    a, b = heads.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1).to(heads.dtype)
