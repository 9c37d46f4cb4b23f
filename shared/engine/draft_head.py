"""A draft head: a small recurrent network that guesses what the target says next from the target's own hidden state.

As in Hydra (Ankner et al. 2024), EAGLE (Li et al. 2024) and ReDrafter (Cheng et al. 2024): what the target knew when it
chose the last token tells more about the next one than a small model of its own can find out. With the target's hidden
state f at the position before the last token, after the final norm, and the embeddings e of the last w tokens:

    z  = concat(N_0(f), N_1(e of the last token), N_2(e of the one before), ...)     [h * (1 + w)]
    o  = W_skip z + W_down (silu(W_gate z) * (W_up z))                               [h]
    f' = N_out(o)              a guess of the hidden state one position on
    logits of the next token = W_head f'                                             [proposable]

N are RMS norms with weights. For the token after that, f' takes the place of f and the guess joins the tokens. There is
no attention and no KV: nothing but hidden state and tokens is known of a sequence, and neither is kept.

Milliseconds of these products with h = 576, w = 3, m = 1536 and 8192 tokens, AVX2, one thread (a step of SmolLM2-135M
takes 43 on two):

| sequences | float32 as stored | by column | packed by oneDNN | 8 bits, two digits an activation (`int8_linear`) |
|---|---|---|---|---|
| 1 | 3.1 | 2.3 | 3.1 | 1.2 |
| 8 | 8.6 | 8.3 | 5.8 | 3.4 |

torch's other products of 8 bits are slower: `_int_mm` 9 and 69, `_weight_int8pack_mm` 13 and 107, in bf16 1.8 and 6.1.
A whole step takes 1.4 and 3.8, with a temperature 2.1 and 5.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from shared.engine import draft_release, int8_linear
from shared.engine.base import BadSpans
from shared.engine.draft_release import Release
from shared.engine.fingerprint import fingerprint, vocabulary_digest
from shared.engine.merged import Product
from shared.engine.model import eos_ids
from shared.errors import ConfigError, InvalidField, ModelError
from shared.sampling.among import sample_among
from shared.sampling.fields import Sampling
from shared.sampling.params import Row
from shared.sampling.sampler import BadLogits
from shared.vocabulary import Vocabulary

_ABSENT = -1
"""In the place of a token before the first one."""


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """Facts about a draft head that never change while it runs."""

    name: str
    """Of the target, as the release says it."""
    fingerprint: str
    """Of the target's weights in float32."""
    vocabulary: str
    """Digest of the target's vocabulary."""
    vocab_size: int
    """Ids of tokens are below that."""
    hidden_size: int
    window: int
    eos_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Weights:
    """On one device, in float32 but for what `widen`, `down` and `head` keep to themselves."""

    widen: Product
    """Gate, up and skip, one below the other: they read the same."""
    down: Product
    head: Product
    norms: Tensor
    """[1 + window, hidden_size]"""
    out: Tensor
    """[hidden_size]"""
    ids: Tensor
    """int64 [proposable], ascending: the target's ids of the rows of `head`."""
    embedding: Tensor
    """[vocab_size or more, hidden_size], of any float type, on the CPU: it is mapped from the target's file."""

    @classmethod
    def of(cls, found: dict[str, Tensor], embedding: Tensor, device: torch.device) -> Weights:
        """From the tensors of a release."""
        ids, order = found["vocabulary"].long().sort()
        norms = [found[f"norms.{i}.weight"] for i in range(sum(name.startswith("norms.") for name in found))]

        def product(*names: str, rows: Tensor | slice = slice(None)) -> Product:
            levels = torch.cat([found[f"{name}.weight"] for name in names])[rows]
            return _product(levels, torch.cat([found[f"{name}.weight.scale"] for name in names])[rows], device)

        return cls(
            widen=product("gate", "up", "skip"),
            down=product("down"),
            head=product("head", rows=order),
            norms=torch.stack(norms).to(device),
            out=found["out.weight"].to(device),
            ids=ids.to(device),
            embedding=embedding,
        )


class DraftHead:
    """Not thread-safe. On a GPU if there is one."""

    def __init__(self, info: HeadInfo, weights: Weights, epsilon: float) -> None:
        self.info = info
        self._weights = weights
        self._epsilon = epsilon
        self._device = weights.out.device

    @classmethod
    def load(cls, folder: Path, target: Path, *, threads: int = 0) -> DraftHead:
        """The release in `folder`, for the model in the folder `target` (see `shared.engine.weights.resolve`).

        `threads` as for `Engine.load`. Raises ModelError for a release that is damaged or no draft head, or that
        computes nothing of use, ConfigError for one that was made for another target.
        """
        release = draft_release.about(folder)
        _same_target(release, folder, target)
        if (size := Vocabulary.load(target).size) > release.vocab_size:
            reason = f"{release.vocab_size} ids, but the tokenizer of {target} has {size}"
            raise ModelError(f"{folder / 'config.json'}: vocab_size: {reason}", field="vocab_size")
        found = draft_release.tensors(folder, release)
        embedding = draft_release.embedding(target, release)
        if threads:
            torch.set_num_threads(threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with torch.inference_mode():
            head = cls(_info(release, target), Weights.of(found, embedding, device), release.rms_norm_eps)
        try:
            head.step(head.start([bytes(2 * release.hidden_size)]), [(0,)], [Row(Sampling(temperature=0.0), 0, 1)])
        except BadSpans:
            raise ModelError(f"the draft head in {folder} gives no finite numbers: its weights are unusable") from None
        return head

    @torch.inference_mode()
    def start(self, hidden: Sequence[bytes]) -> Tensor:
        """Hidden states of the target, [len(hidden), hidden_size], from float16, little-endian.

        Raises InvalidField (field "hidden") for another number of channels, or one that is not finite.
        """
        size = self.info.hidden_size
        for index, state in enumerate(hidden):
            if len(state) != 2 * size:
                raise InvalidField(f"hidden state {index}: {len(state)} bytes, not {2 * size}", field="hidden")
        if not hidden:
            return torch.empty(0, size, device=self._device)
        features = torch.frombuffer(bytearray(b"".join(hidden)), dtype=torch.float16).view(-1, size).float()
        if not bool(features.isfinite().all()):
            raise InvalidField("a hidden state is not finite", field="hidden")
        return features.to(self._device)

    @torch.inference_mode()
    def step(
        self, features: Tensor | Sequence[Tensor], windows: Sequence[Sequence[int]], rows: Sequence[Row]
    ) -> tuple[list[int], list[float], Tensor]:
        """One more token of each sequence, how likely the head finds each, and the features to go on from.

        `features` [len(rows), hidden_size] are those of `start` or of the step before; `windows` the last tokens of
        each sequence, the newest first, as many as there are up to `window` (further ones are not looked at). Tokens
        are chosen with the noise that the target has in the same place. Raises BadSpans naming the rows that have no
        token to choose.
        """
        if not rows:
            return [], [], torch.empty(0, self.info.hidden_size, device=self._device)
        given = features if isinstance(features, Tensor) else torch.stack(list(features))
        following, logits = self.forward(given, windows)
        try:
            tokens, likely = sample_among(logits, rows, self._weights.ids)
        except BadLogits as error:
            raise BadSpans(error.rows) from error
        return tokens, likely, following

    @property
    def ids(self) -> Tensor:
        """int64 [proposable], ascending: what it can draft."""
        return self._weights.ids

    @torch.inference_mode()
    def forward(self, features: Tensor, windows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """What `step` chooses from: features to go on from [rows, hidden_size] and logits [rows, proposable]."""
        weights = self._weights
        seen = torch.cat([features[:, None], self._embedded(windows)], dim=1)
        wide = weights.widen(self._normed(seen, weights.norms).flatten(1))
        width = (wide.shape[1] - self.info.hidden_size) // 2
        gate, up, skip = torch.split(wide, [width, width, self.info.hidden_size], dim=1)
        following = self._normed(weights.down(silu(gate).mul_(up)).add_(skip), weights.out)
        return following, weights.head(following)

    def _embedded(self, windows: Sequence[Sequence[int]]) -> Tensor:
        """[rows, window, hidden_size]; zeros where a sequence has no token so far back."""
        size = self.info.window
        tokens = torch.tensor([[*window[:size], *[_ABSENT] * (size - len(window))] for window in windows])
        if int(tokens.max()) >= self.info.vocab_size:
            raise InvalidField(f"a token id is not below {self.info.vocab_size}", field="windows")
        found = self._weights.embedding[tokens.clamp(min=0)].float()
        if int(tokens.min()) < 0:
            found.masked_fill_(tokens[:, :, None] < 0, 0.0)
        return found.to(self._device)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, 2, -1, True)
        return x * norm.square_().div_(x.shape[-1]).add_(self._epsilon).rsqrt_() * weight


def _same_target(release: Release, folder: Path, target: Path) -> None:
    """Raises ConfigError."""
    ours = {"fingerprint": fingerprint(target), "vocabulary": vocabulary_digest(target)}
    for what, found in ours.items():
        if (made_for := getattr(release.target, what)) != found:
            raise ConfigError(
                f"the draft head in {folder} is for {release.target.name}, whose {what} is {made_for:.12}, "
                f"not {found:.12} as that of {target}",
                field="drafter_model",
            )


def _info(release: Release, target: Path) -> HeadInfo:
    return HeadInfo(
        name=release.target.name,
        fingerprint=release.target.fingerprint,
        vocabulary=release.target.vocabulary,
        vocab_size=release.vocab_size,
        hidden_size=release.hidden_size,
        window=release.window,
        eos_ids=frozenset(i for i in eos_ids(target) if i < release.vocab_size),
    )


def _product(levels: Tensor, scale: Tensor, device: torch.device) -> Product:
    """Multiplies with `levels` [out, in] int8 times `scale` [out]: in 8 bits where this CPU can, else in float32."""
    if device.type == "cpu" and int8_linear.is_available():
        return int8_linear.levels_product(levels, scale)
    weight = (levels.float() * scale[:, None]).to(device)
    if device.type == "cpu":
        weight = weight.t().contiguous().t()  # by column: few rows are multiplied faster
    return lambda x: linear(x, weight)
