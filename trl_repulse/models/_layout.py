"""Several completions of a prompt in one row, which reads the prompt once.

Axis letters: R rows, L prompt tokens, k completions of a row, T tokens of a completion, S = L + k·T tokens of a row, C units
of a prompt with n completions, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import create_masks_for_generate


MASKED = ("eager", "sdpa")  # implementations of attention that take a mask of pairs of tokens
# Of the cost of separate rows: below what the count of multiplications may be wrong by, nothing is shared
_WORTH = 0.9


def longest_row(config: PreTrainedConfig) -> float:
    """
    How many tokens a row may have for layers that go by places in it: as many as they have buffers for, and no more than a window;
    infinitely many without a limit.

    Where layers are of kinds that the configuration names, windows are in the masks, which say what each kind sees.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    if not hasattr(config, "layer_types"):
        limits += [value for name, value in vars(config).items() if "window" in name]
    return min((x for x in limits if isinstance(x, int) and not isinstance(x, bool) and x > 0), default=math.inf)


@dataclass(frozen=True)
class Layout:
    """
    Rows `[prompt | completion | completion | ...]`, in which a completion attends to the prompt and to itself.

    Args:
        prompt (`int`):
            L, tokens of a prompt with the padding before it.
        width (`int`):
            T, tokens of a completion with the padding behind it.
        count (`int`):
            k, completions of a row.
    """

    prompt: int
    width: int
    count: int

    @classmethod
    def cheapest(
        cls, prompt: int, width: int, completions: int, hidden_size: int, longest: float = math.inf
    ) -> "Layout":
        """
        The layout that takes the fewest multiplications to read prompts of L tokens, each with n `completions` of T tokens.

        A layer multiplies about 12·d² times for each token and 2·d times for each pair of tokens in a row, d its hidden size,
        since a mask does not spare the pairs that it hides. Long completions in one row cost more than the prompt read twice.
        Rows hold a divisor of n, and with several completions no more than `longest` tokens; with `count=1` where sharing
        saves less than a tenth.
        """

        def cost(layout: "Layout") -> float:
            return layout.cost(completions, hidden_size)

        counts = [k for k in range(2, completions + 1) if completions % k == 0 and prompt + k * width <= longest]
        separate = cls(prompt, width, 1)
        best = min((cls(prompt, width, k) for k in counts), key=cost, default=separate)
        return best if cost(best) <= _WORTH * cost(separate) else separate

    def cost(self, completions: float, hidden_size: int) -> float:
        """Multiplications for a prompt with that many completions, up to a factor that all layouts have."""
        tokens = self.prompt + self.count * self.width
        return completions / self.count * tokens * (6 * hidden_size + tokens)

    def rows(self, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
        """
        Rows (R, S) of the units of a batch, a unit's n / k rows one after the other, from prompts (C, L) and completions (C, n, T): tokens, or
        masks. With `count=1` there may be a prompt for each completion, (C·n, L).
        """
        parts = completions.reshape(-1, self.count * self.width)
        return torch.cat([prompts.repeat_interleave(len(parts) // len(prompts), 0), parts], dim=1)

    def positions(self, attention_mask: torch.Tensor) -> torch.Tensor:
        """Position of each token of rows with this mask (R, S): each completion goes on from the prompt. Shape (R, S)."""
        prompt, rest = attention_mask.long().split([self.prompt, self.count * self.width], dim=1)
        within = rest.view(-1, self.count, self.width).cumsum(dim=2).view_as(rest)
        positions = torch.cat([prompt.cumsum(dim=1), prompt.sum(dim=1, keepdim=True) + within], dim=1)
        return (positions - 1).clamp(min=0)

    def predicting(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        The states that predict completions: of rows (R, S, d), the prompt's last and the completion's own, (R·k, T + 1, d).

        As of rows with a completion each, cut to its last T + 1 positions.
        """
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
        """
        What each kind of layer may attend to in rows: as in rows of the prompt and one completion, and nothing else.

        Args:
            config ([`~transformers.PreTrainedConfig`]):
                Of the model; says of which kinds its layers are, and how they take masks.
            dtype (`torch.dtype`):
                Of the masks, where they are added to scores.
            attention_mask (`torch.Tensor` of shape `(R, S)`):
                Which tokens are real.

        Returns:
            `torch.Tensor` of shape `(R, 1, S, S)`, or a dictionary of one for each kind of layer.

        Raises:
            `ValueError`: If the model's attention takes no such masks.
        """
        if config._attn_implementation not in MASKED:
            raise ValueError(f"Attention {config._attn_implementation!r} takes no masks of pairs of tokens.")
        end = self.prompt + self.width
        alone = attention_mask[:, :end].clone()
        alone[:, self.prompt :] = 1  # of one completion; padding of each is masked below
        blank = torch.empty((len(alone), end, 0), dtype=dtype, device=alone.device)
        found = create_masks_for_generate(config, blank, alone, None)
        if isinstance(found, dict):
            return {kind: self._spread(mask, attention_mask) for kind, mask in found.items()}
        return self._spread(found, attention_mask)

    def _spread(self, mask: torch.Tensor | None, attention_mask: torch.Tensor) -> torch.Tensor:
        """The mask of rows with one completion, (R, 1, L + T, L + T) and `None` where plainly causal, for rows with k."""
        device = attention_mask.device
        places, end = self._places(device), self.prompt + self.width
        if mask is None:
            mask = (
                torch.ones((end, end), dtype=torch.bool, device=device).tril().expand(len(attention_mask), 1, end, end)
            )
        if mask.dim() != 4:  # of layers that are no attention
            raise ValueError(f"Such layers take no masks of pairs of tokens, got one of {mask.dim()} axes.")
        owner = torch.arange(self.count, device=device).repeat_interleave(self.width)
        owner = torch.cat([owner.new_full((self.prompt,), -1), owner])  # (S,); -1 is the prompt
        seen = (owner == -1) | (owner.unsqueeze(1) == owner)  # (S, S)
        seen = seen & attention_mask.bool()[:, None, None, :]
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask[:, :, places][:, :, :, places].masked_fill(~seen, hidden)

    def _places(self, device: torch.device) -> torch.Tensor:
        """Where each token of a row stands in a row of the prompt and one completion, shape (S,)."""
        within = torch.arange(self.width, device=device).repeat(self.count)
        return torch.cat([torch.arange(self.prompt, device=device), self.prompt + within])
