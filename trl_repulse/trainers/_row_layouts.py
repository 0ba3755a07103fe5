"""Batches as rows that a model reads: how many completions share a row, and how many rows a pass takes."""

import functools
from collections.abc import Callable

import torch

from ..generation._padding import without_padding
from ..generation._probe import Guard
from ..models._deepspeed import zero_stage
from ..models._layout import Layout


class RowLayouts:
    """
    Mixin before [`~trl.GRPOTrainer`]: completions laid out in rows, as [`~trl_repulse.generation._probe.Guard`] allows.
    """

    _guard = Guard()  # what keeps sampling and scoring right for all models

    def _micro_batch_size(self) -> int:
        return self.args.per_device_train_batch_size if self.model.training else self.args.per_device_eval_batch_size

    def _layout(self, prompt: int, width: int, completions: int) -> Layout:
        """How `completions` of `width` tokens to each prompt of `prompt` tokens are laid out in rows."""
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1)
        return Layout.cheapest(prompt, width, completions, self._hidden_size, self._guard.longest_row)

    @property
    def _hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    def _layout_for(self, prompt: int, width: int, needed: torch.Tensor) -> tuple[Layout, int]:
        """
        The cheapest layout for the completions that are `needed`, a mask (U, n), and for how many completions of a unit it has room:
        as many as the most that a unit needs, or some more if these fill rows. All n where prompts are not shared.
        """
        most = needed.size(1)
        if not self._guard.share_prompts:
            return Layout(prompt, width, 1), most
        largest, average = torch.stack([needed.sum(dim=1).max(), needed.sum(dim=1).float().mean()]).tolist()
        size, longest = self._hidden_size, self._guard.longest_row

        def cost(found: tuple[Layout, int]) -> float:
            layout, slots = found
            return layout.cost(slots if layout.count > 1 else average, size)  # separate rows can be left out

        slots = range(max(1, int(largest)), most + 1)
        return min(((Layout.cheapest(prompt, width, k, size, longest), k) for k in slots), key=cost)

    def _units_at_once(self, layout: Layout, rows: int) -> int:
        """
        How many units of so many `rows` each a pass without gradient reads at once: no more tokens than a micro-batch has in rows
        of single completions, and no more than twice its completions, which go onto the vocabulary; or one unit. A collective call
        where processes make the same passes.
        """
        size = self._micro_batch_size()
        tokens, of_unit = size * (layout.prompt + layout.width), rows * (layout.prompt + layout.count * layout.width)
        units = max(1, min(tokens // of_unit, 2 * size // (rows * layout.count)))
        if not self._passes_together:
            return units
        return int(self.accelerator.gather(torch.tensor([units], device=self.accelerator.device)).min())

    @property
    def _passes_together(self) -> bool:
        """Whether processes share weights, so that all make the same passes."""
        return self.is_fsdp_enabled or zero_stage(self.accelerator) == 3

    def _in_rows(
        self,
        score: Callable[[torch.Tensor, torch.Tensor, Layout], tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        width: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of completions (B, T) at the end of rows (B, L + T), of which each has a prompt of its own or shares it.

        Completions of a prompt share rows where each prompt has as many of them in the batch, in whatever order: a batch that was
        split may not.
        """
        length = input_ids.size(1) - width
        prompts = torch.stack([input_ids[:, :length], attention_mask[:, :length]], dim=2)
        _, owner, counts = prompts.unique(dim=0, return_inverse=True, return_counts=True)
        n = int(counts[0])
        layout = self._layout(length, width, n if (counts == n).all() else 1)
        if layout.count == 1:
            cut = functools.partial(Layout, width=width, count=1)
            return self._by_length(lambda *rows: score(*rows, cut(rows[0].size(1) - width)), input_ids, attention_mask)
        order = owner.argsort(stable=True)
        rows = [
            layout.rows(x[order[::n], :length], x[order, length:].view(-1, n, width))
            for x in (input_ids, attention_mask)
        ]
        back = order.argsort()
        return tuple(x[back] if x is not None and x.dim() else x for x in score(*rows, layout))

    def _by_length(
        self,
        score: Callable[..., tuple[torch.Tensor | None, ...]],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of rows (B, L + T), their mask and whatever else there is of each row: all at once, or by prompt length
        if a model reads padding.
        """
        if not self._guard.score_by_length:
            return score(input_ids, attention_mask, *more)
        if self.accelerator.num_processes > 1 and len(attention_mask.argmax(dim=1).unique()) > 1:
            raise ValueError(
                "Prompts of different lengths are scored in passes of their own, since the model reads padding, and several "
                "processes cannot make different numbers of passes; use prompts of one length, or one process."
            )
        return without_padding(score, input_ids, attention_mask, *more)
