"""Sets of completions side by side, as a pass over a model reads them, and the way back to each set for its scores.

Axis letters: U units of a prompt, n completions of a set in a unit, C = Σn of all sets, T completion tokens, R rows of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..models._layout import Layout


Masks = dict[str, torch.Tensor]  # of sets, by name: (U, n)


@dataclass
class CompletionSets:
    """
    Sets of completions to the same prompts.

    Args:
        ids, mask (`torch.Tensor` of shape `(U, C, T)`): Tokens, and which of them the model reads.
        read (`torch.Tensor` of shape `(U, C)`): Which completions are needed.
        asked (`torch.Tensor` of shape `(U, C)`, *optional*): Which completions also need log-probabilities by another sampler.
        shapes (`list[tuple[int, int]]`): n and T of each set.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    read: torch.Tensor
    asked: torch.Tensor | None
    shapes: list[tuple[int, int]]
    _places: torch.Tensor | None = None  # (U, slots): where those that are kept were, of `_completions` in a unit
    _completions: int = 0

    @classmethod
    def of(
        cls,
        batch: dict[str, torch.Tensor],
        names: Sequence[str],
        pad_token_id: int,
        needed: Masks,
        asked: Masks | None,
    ) -> "CompletionSets":
        """The sets `names` of a batch. `needed` and `asked` have a mask for each set of which not all completions count."""
        shapes = [(batch[f"{name}_ids"].size(1), batch[f"{name}_ids"].size(2)) for name in names]
        width = max(length for _, length in shapes)

        def joined(parts: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.cat([F.pad(part, (0, width - part.size(2)), value=value) for part in parts], dim=1)

        ids = joined([batch[f"{name}_ids"] for name in names], pad_token_id)
        mask = joined([batch.get(f"{name}_attended", batch[f"{name}_mask"]) for name in names], 0)

        def of_all(masks: Masks) -> torch.Tensor:
            every = [ids.new_ones((len(ids), n), dtype=torch.bool) for n, _ in shapes]
            return torch.cat([masks.get(name, part) for name, part in zip(names, every, strict=True)], dim=1)

        return cls(ids, mask, of_all(needed), None if asked is None else of_all(asked), shapes)

    @property
    def width(self) -> int:
        """T of the longest set."""
        return self.ids.size(2)

    @property
    def completions(self) -> int:
        """C: completions of a unit."""
        return self.ids.size(1)

    def join(self, units: int) -> None:
        """Joins every `units` neighbouring units into one. They must have the same prompt."""
        self.ids, self.mask = (x.reshape(-1, units * x.size(1), self.width) for x in (self.ids, self.mask))
        self.read = self.read.reshape(-1, units * self.read.size(1))
        self.asked = None if self.asked is None else self.asked.reshape(self.read.shape)

    def keep_needed(self, slots: int) -> None:
        """Keeps `slots` completions of each unit: those that are needed first. The mask of the others is 0."""
        self._completions = self.completions
        self._places = self.read.long().argsort(dim=1, descending=True, stable=True)[:, :slots]
        index = self._places.unsqueeze(2).expand(-1, -1, self.width)
        self.read = self.read.gather(1, self._places)
        self.asked = None if self.asked is None else self.asked.gather(1, self._places)
        self.ids, self.mask = self.ids.gather(1, index), self.mask.gather(1, index) * self.read.unsqueeze(2)

    def rows(self, layout: Layout, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tokens of rows and their mask, `(R, S)` each, with `prompts` (tokens and mask, `(U, L)` each) in front; then `read` and `asked`, `(R, k)`."""
        tokens = [layout.rows(x, y) for x, y in zip(prompts, (self.ids, self.mask), strict=True)]
        return tokens + [x.reshape(-1, layout.count) for x in (self.read, self.asked) if x is not None]

    def split(self, scores: torch.Tensor) -> list[torch.Tensor]:
        """Scores of the completions in rows, `(R·k, T)`, as `(U, n, T)` for each set; 0 for completions that were not kept."""
        if self._places is not None:
            kept = scores.view(*self._places.shape, self.width)
            index = self._places.unsqueeze(2).expand(-1, -1, self.width)
            scores = kept.new_zeros(len(kept), self._completions, self.width).scatter(1, index, kept)
        counts = [n for n, _ in self.shapes]
        parts = scores.view(-1, sum(counts), self.width).split(counts, dim=1)
        return [part[..., :length] for part, (_, length) in zip(parts, self.shapes, strict=True)]
