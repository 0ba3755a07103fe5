"""
Rows that hold several completions of a prompt, so that the prompt is read once.

Axis letters: R rows, L prompt tokens, k completions of a row, T tokens of a completion, S = L + k·T tokens of a row,
C units of a prompt with n completions, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate


MASKED = ("eager", "sdpa")  # attention implementations that take pairwise masks
# Share of the cost of separate rows; savings below the error of the count are not worth it
_WORTH = 0.9


def longest_row(config: PreTrainedConfig) -> float:
    """Most tokens of a row, from the position embeddings and windows of a model; infinite without a limit. Windows do
    not count if the configuration names the layers' kinds, since masks take care of them."""
    limits = [getattr(config, "max_position_embeddings", None)]
    if not hasattr(config, "layer_types"):
        limits += [value for name, value in vars(config).items() if "window" in name]
    return min((x for x in limits if isinstance(x, int) and not isinstance(x, bool) and x > 0), default=math.inf)


@dataclass(frozen=True)
class Layout:
    """
    Rows `[prompt | completion | completion | ...]`, in which a completion attends to the prompt and to itself.

    Args:
        prompt (`int`): L, prompt tokens with left padding.
        width (`int`): T, completion tokens with right padding.
        count (`int`): k, completions of a row.
    """

    prompt: int
    width: int
    count: int

    @classmethod
    def cheapest(
        cls, prompt: int, width: int, completions: int, hidden_size: int, longest: float = math.inf
    ) -> "Layout":
        """
        The layout that needs the fewest multiplications for prompts of L tokens with n `completions` of T tokens.

        A layer takes about 12·d² multiplications for each token and 2·d for each pair of tokens in a row (d: hidden
        size), also for masked pairs, so long completions can cost more in one row than reading the prompt twice.
        `count` divides n, shared rows have at most `longest` tokens, and 1 is taken if sharing saves less than a
        tenth.
        """

        counts = [k for k in range(2, completions + 1) if completions % k == 0 and prompt + k * width <= longest]
        separate, *shared = (cls(prompt, width, k) for k in (1, *counts))
        best = min(shared, key=lambda layout: layout.cost(completions, hidden_size), default=separate)
        worth = best.cost(completions, hidden_size) <= _WORTH * separate.cost(completions, hidden_size)
        return best if worth else separate

    def cost(self, completions: float, hidden_size: int) -> float:
        """Multiplications for a prompt with so many completions, up to a factor common to all layouts."""
        tokens = self.prompt + self.count * self.width
        return completions / self.count * tokens * (6 * hidden_size + tokens)

    def rows(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """Rows (R, S) of tokens or masks from prompts (C, L) and completions (C, n, T), unit by unit. With `count=1`,
        prompts may have shape (C·n, L)."""
        parts = completions.reshape(-1, self.count * self.width)
        return torch.cat([prompts.repeat_interleave(len(parts) // len(prompts), 0), parts], dim=1)

    def positions(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Position of each token (R, S) from its mask: each completion continues from the prompt."""
        prompt, rest = attention_mask.long().split([self.prompt, self.count * self.width], dim=1)
        within = rest.view(-1, self.count, self.width).cumsum(dim=2).view_as(rest)
        positions = torch.cat([prompt.cumsum(dim=1), prompt.sum(dim=1, keepdim=True) + within], dim=1)
        return (positions - 1).clamp(min=0)

    def predicting(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The states (R·k, T + 1, d) that predict completions, from those of rows (R, S, d): the prompt's last and the
        completion's own."""
        if self.count == 1:
            return hidden_states[:, -self.width - 1 :]
        own = self._places(hidden_states.device)[self.prompt :].view(self.count, self.width)
        first = torch.full((self.count, 1), self.prompt - 1, device=own.device)
        offsets = self.width * torch.arange(self.count, device=own.device).unsqueeze(1)
        index = torch.cat([first, own + offsets], dim=1)  # (k, T + 1)
        return hidden_states[:, index].flatten(0, 1)

    def masks(
        self, config: PreTrainedConfig, dtype: torch.dtype, attention_mask: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Attention masks (R, 1, S, S) for rows with padding mask (R, S), or a dictionary by kind of layer.
        Boolean, or of `dtype` if they are added to scores. Raises `ValueError` if the attention takes no such
        masks."""
        if config._attn_implementation not in MASKED:
            raise ValueError(f"Attention {config._attn_implementation!r} takes no masks of pairs of tokens.")
        end = self.prompt + self.width
        alone = attention_mask[:, :end].clone()
        alone[:, self.prompt :] = 1  # padding of each completion is masked below
        blank = torch.empty((len(alone), end, 0), dtype=dtype, device=alone.device)
        found = create_masks_for_generate(config, blank, alone, None)
        if isinstance(found, dict):
            return {kind: self._spread(mask, attention_mask) for kind, mask in found.items()}
        return self._spread(found, attention_mask)

    def _spread(self, mask: torch.Tensor | None, attention_mask: torch.Tensor) -> torch.Tensor:
        """Extends the mask of rows with one completion (R, 1, L + T, L + T), `None` if causal, to rows with k
        completions."""
        device = attention_mask.device
        places, end = self._places(device), self.prompt + self.width
        if mask is None:
            mask = torch.ones((end, end), dtype=torch.bool, device=device).tril()
            mask = mask.expand(len(attention_mask), 1, end, end)
        if mask.dim() != 4:  # layers without attention
            raise ValueError(f"Such layers take no masks of pairs of tokens, got one of {mask.dim()} axes.")
        owner = torch.arange(self.count, device=device).repeat_interleave(self.width)
        owner = torch.cat([owner.new_full((self.prompt,), -1), owner])  # (S,); -1 is the prompt
        seen = (owner == -1) | (owner.unsqueeze(1) == owner)  # (S, S)
        seen = seen & attention_mask.bool()[:, None, None, :]
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask[:, :, places][:, :, :, places].masked_fill(~seen, hidden)

    def _places(self, device: torch.device) -> torch.Tensor:
        """Index of each token of a row in a row with one completion, shape (S,)."""
        within = torch.arange(self.width, device=device).repeat(self.count)
        return torch.cat([torch.arange(self.prompt, device=device), self.prompt + within])
