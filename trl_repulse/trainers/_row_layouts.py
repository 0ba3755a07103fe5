"""Batches as rows that a model reads: how many completions share a row, and how many rows a pass takes."""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..generation._padding import without_padding
from ..generation._probe import Guard
from ..models._deepspeed import zero_stage
from ..models._layout import Layout
from ._scoring import in_chunks
from ._trl_bridge import split_tensor_dict


class RowLayouts:
    """
    Mixin before [`~trl.GRPOTrainer`]: completions laid out in rows, as [`~trl_repulse.generation._probe.Guard`] allows.
    """

    _guard = Guard()  # what keeps sampling and scoring right for all models

    def _whole(self, mode: str) -> bool:
        """Whether a unit holds all of the policy's samples of its prompt."""
        return False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's; micro-batches have as few prompts as can be, where the update does not depend on which rows are in which."""
        before, args = self._buffered_inputs, self.args
        inputs = super()._prepare_inputs(generation_batch)
        one_update = args.gradient_accumulation_steps % args.steps_per_generation == 0
        by_itself = (
            args.loss_type == "bnpo" or args.top_entropy_quantile < 1
        )  # each micro-batch has its mean, its quantile
        if self._buffered_inputs is before or self._whole("train") or not one_update or by_itself:
            return inputs
        self._buffered_inputs = by_prompt(self._buffered_inputs)
        return self._buffered_inputs[self._step % args.steps_per_generation]

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

    def _neighbours(self, most: int, together: bool, *prompts: torch.Tensor) -> int:
        """
        How many neighbouring units can be read as one, since they have the same prompt: a divisor of each run of units with one
        prompt.

        Args:
            most (`int`):
                The most that are wanted.
            together (`bool`):
                Whether the units are read in several passes; a collective call where processes make the same ones.
            prompts (`torch.Tensor` of shape `(U, L)`):
                Tokens of the units' prompts, and their mask.
        """
        if not self._guard.share_prompts:
            return 1
        new = torch.stack([(x[1:] != x[:-1]).any(dim=1) for x in prompts]).any(dim=0)
        starts = [0, *(new.nonzero()[:, 0] + 1).tolist(), len(prompts[0])]
        run = math.gcd(*(end - start for start, end in itertools.pairwise(starts)))
        if together and self._passes_together:
            run = math.gcd(*self.accelerator.gather(torch.tensor([run], device=self.accelerator.device)).tolist())
        return max(count for count in range(1, max(most, 1) + 1) if run % count == 0)

    def _rows_at_once(self, layout: Layout, of_unit: int, size: int) -> int:
        """
        How many rows a pass without gradient reads at once, where a unit has `of_unit` of them. Where prompts are shared, as many whole
        units as have no more tokens than a micro-batch of `size` has in rows of single completions, and no more than twice its
        completions, which go onto the vocabulary; or one unit. A collective call where processes make the same passes.
        """
        if not self._guard.share_prompts:
            return size
        tokens, unit = size * (layout.prompt + layout.width), of_unit * (layout.prompt + layout.count * layout.width)
        units = max(1, min(tokens // unit, 2 * size // (of_unit * layout.count)))
        if self._passes_together:
            units = int(self.accelerator.gather(torch.tensor([units], device=self.accelerator.device)).min())
        return of_unit * units

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
        size: int | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """
        What `score` makes of completions (B, T) at the end of rows (B, L + T), of which each has a prompt of its own or shares it
        with its neighbours: in one pass, or in several as for micro-batches of `size`.
        """
        length = input_ids.size(1) - width
        prompts = [x[:, :length] for x in (input_ids, attention_mask)]
        n = self._neighbours(len(input_ids) if size is None else size, size is not None, *prompts)
        layout = self._layout(length, width, n)
        completions = [x[:, length:].reshape(-1, n, width) for x in (input_ids, attention_mask)]
        rows = [layout.rows(x[::n], y) for x, y in zip(prompts, completions, strict=True)]

        def of_rows(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            return score(ids, mask, replace(layout, prompt=ids.size(1) - layout.count * width))

        at_once = len(rows[0]) if size is None else self._rows_at_once(layout, n // layout.count, size)
        return in_chunks(functools.partial(self._by_length, of_rows), at_once, *rows)

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


def by_prompt(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of micro-batches, those of a prompt next to each other, in as many micro-batches."""
    joined = {
        name: torch.cat([batch[name] for batch in batches]) if isinstance(x, torch.Tensor) and x.dim() else x
        for name, x in batches[0].items()
    }
    prompts = torch.stack([joined["prompt_ids"], joined["prompt_mask"]], dim=2)
    order = prompts.unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    rows = {name: x[order] if isinstance(x, torch.Tensor) and x.dim() else x for name, x in joined.items()}
    return split_tensor_dict(rows, len(batches))
