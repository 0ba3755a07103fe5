"""Each file of `accelerate_configs` starts an example, and each training example starts with one, as a user would: on the CPU, in processes of their own."""

import ast
import json

import pytest

from ..distributed_support import CONFIGS, ROOT, launcher, run
from ..engine.test_distributed import needs_deepspeed


EXAMPLES = {
    "single_gpu": ("grpo", 1),
    "cpu_ddp": ("repulse_grpo", 2),
    "multi_gpu": ("ppo", 2),
    "fsdp2": ("reinforce", 2),
    "zero1": ("repulse_ppo", 2),
    "zero2": ("repulse", 2),
    "zero3": ("repulse_grpo", 2),  # where the hot policy raises logits of tokens
    "zero3_offload": ("reinforce", 2),
    "multi_node_zero3": ("ppo", 2),
}
TWO_UPDATES = "--max_steps 2 --per_device_train_batch_size 8 --num_final_samples 0 --use_cpu true".split()


def test_every_file_and_every_training_example_is_started():
    assert {path.stem for path in CONFIGS.iterdir()} == set(EXAMPLES)
    scripts = {path.stem for path in (ROOT / "examples").glob("*.py") if '\n    train("' in path.read_text()}
    assert scripts == {script for script, _ in EXAMPLES.values()}


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_each_example_states_model_memory_and_time(path):
    """Measured, or that it was not."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).partition("Hardware: ")[2]
    assert "24 GB, of 80 GB: " in text and ("not measured" in text or " minutes" in text)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    "config",
    [pytest.param(name, marks=[pytest.mark.slow, needs_deepspeed] if "zero" in name else []) for name in EXAMPLES],
)
def test_an_example_starts_with_each_file(tmp_path, config):
    script, processes = EXAMPLES[config]
    run([*launcher(processes, config), f"examples/{script}.py", *TWO_UPDATES, "--output_dir", str(tmp_path)])
    assert json.loads((tmp_path / "results.json").read_text())["policy_updates"] == 2
    assert list(tmp_path.glob("*.safetensors"))
