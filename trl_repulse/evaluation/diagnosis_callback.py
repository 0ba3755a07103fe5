"""The diagnosis of a run while it trains."""

from accelerate.logging import get_logger
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..engine.diagnosis import diagnose


logger = get_logger(__name__)


class DiagnosisCallback(TrainerCallback):
    """
    Looks for symptoms of failure each time metrics are logged, and warns of each one once: a reward that is exploited, a KL that rises
    without a gain, a proposal or a policy that has collapsed, and others. `trl-repulse diagnose` looks for the same in a finished run.

    Works with any trainer that logs TRL's names.

    Args:
        after (`int`, *optional*, defaults to `100`):
            Updates before the first look. A sign must last 20 updates, and some of them are common early in a run.

    Example:

    ```python
    >>> trainer.add_callback(DiagnosisCallback())
    ```
    """

    def __init__(self, after: int = 100):
        if after < 1:
            raise ValueError(f"`after={after}` must be at least 1 update.")
        self.after = after
        self._seen: set[str] = set()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs) -> None:
        if state.global_step < self.after or not state.is_world_process_zero:
            return
        for finding in diagnose(state.log_history, args.to_dict()).findings:
            if finding.symptom not in self._seen:
                self._seen.add(finding.symptom)
                logger.warning("Update %d: %s", state.global_step, finding)
