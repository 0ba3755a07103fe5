"""A run that reports to the trackers named on the command line; prints the last metrics that wandb has, as JSON.

In a process of its own: trackers read their environment once, and keep services running. Not a test; see `test_trackers.py`.
"""

import json
import sys

from transformers import TrainerCallback

from trl_repulse import RePULSeConfig, RePULSeTrainer
from trl_repulse.embedded import load_prompts, policy_path, reward_model_path
from trl_repulse.engine.logs import Trackers


class Alarm(TrainerCallback):
    """Sends an alert after each update."""

    def on_step_end(self, args, state, control, **kwargs):
        Trackers(args, trainer.callback_handler).alert("The KL jumps", "from 0 to 9", state.global_step)


args = RePULSeConfig(
    output_dir=sys.argv[1],
    report_to=sys.argv[2:],
    project="rare",
    run_name="first",
    proposal="learned",
    log_completions=True,
    num_completions_to_print=1,
    logging_steps=1,
    max_steps=2,
    max_completion_length=2,
    num_generations=4,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=2,
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
prompts = load_prompts()
trainer = RePULSeTrainer(policy_path(), reward_model_path(), args, prompts, eval_dataset=prompts)
trainer.add_callback(Alarm())
trainer.train()
trainer.evaluate()
if "wandb" in sys.argv:
    import wandb

    metrics = dict(wandb.run.summary)
    print(json.dumps({name: value for name, value in metrics.items() if isinstance(value, int | float)}))
    wandb.finish()
