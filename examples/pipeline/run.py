"""
From data to a policy with measured tails: SFT, reward model, RePULSe, report on unseen prompts, attack, model card.

    python examples/pipeline/run.py                          # the steps that are not done yet, in runs/pipeline
    python examples/pipeline/run.py --from 3_train           # step 3 and all that follow once more, from the start
    python examples/pipeline/run.py --from 3_train --only 3_train --method ppo
    python examples/pipeline/run.py --configs mine --output_dir runs/mine    # your own models and data

A step is a command of TRL or of trl-repulse with the YAML file of its name. Paths in these files start in the output folder. A
step without a file is left out. If you start the script again, it continues where it stopped.

Hardware: a small world's policy, which step 0 makes. CPU: not measured. One GPU of 24 GB, of 80 GB: not measured.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from trl_repulse.cli.main import TRAINING, Parser, keep_writing


HERE = Path(__file__).resolve().parent
STEPS = ["0_data", "1_sft", "2_reward", "3_train", "4_report", "5_attack", "6_card"]
# How a program is started in this environment, whatever the PATH
PROGRAMS = {
    "trl": ["-c", "from trl.cli.main import main; raise SystemExit(main())"],
    "trl-repulse": ["-m", "trl_repulse.cli"],
    "data.py": [str(HERE / "data.py")],
}


def commands_of(step: str, configs: Path, folder: Path, method: str) -> list[list[str]]:
    """The commands of a step, which run in the output folder."""
    path = str(configs / f"{step}.yaml")
    if step == "0_data":
        return [["data.py", path, "--output_dir", step]]
    if step == "6_card":
        commands = [["trl-repulse", "evaluate", "--config", path]]
        if (configs / "5_attack.yaml").is_file():
            output, threshold = (read(configs, "5_attack", name) for name in ("output", "threshold"))
            thresholds = map(str, threshold if isinstance(threshold, list) else [threshold])
            report = ["trl-repulse", "gcg-report", output, "--threshold", *thresholds]
            commands.append([*report, "--card", read(configs, step, "card")])
        return commands
    if step in ("4_report", "5_attack"):  # the policy before training, too
        before = read(configs, "3_train", "model_name_or_path")
        if step == "4_report":
            command, more = "evaluate", [f"{step}/before", "--model", before, "--output", f"{step}/before.json"]
        else:
            command, more = "gcg", ["--model_name_or_path", before, "--output", f"{step}/before"]
        command = ["trl-repulse", command, "--config", path]
        return [[*command, *more], command]
    command = {"1_sft": ["trl", "sft"], "2_reward": ["trl", "reward"]}.get(step, ["trl-repulse", method])
    if read(configs, step, "output_dir") != step:
        sys.exit(f"error: `{configs / step}.yaml` has another `output_dir`; write `output_dir: {step}`.")
    checkpoint = last_checkpoint(folder / step)
    resume = [] if checkpoint is None else ["--resume_from_checkpoint", str(checkpoint)]
    return [[*command, "--config", path, *resume]]


def read(configs: Path, step: str, name: str) -> Any:
    """An argument in a step's file that the script has to know as well."""
    path = configs / f"{step}.yaml"
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        sys.exit(f"error: `{path}` is no YAML, correct it: {error}")
    if not isinstance(values, dict) or values.get(name) is None:
        sys.exit(f"error: `{path}` has no `{name}`; add it.")
    return values[name]


def last_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint that is whole: the Trainer writes its state last."""
    found = {int(path.parent.name.split("-")[1]): path for path in folder.glob("checkpoint-*/trainer_state.json")}
    for _, path in sorted(found.items(), reverse=True):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        return path.parent
    return None


def run(command: list[str], folder: Path) -> None:
    """Runs a command, which ends when this script is stopped."""
    print(f"$ {shlex.join(command)}", flush=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    }
    process = subprocess.Popen(
        [sys.executable, *PROGRAMS[command[0]], *command[1:]], cwd=folder, env=environment, start_new_session=True
    )
    try:
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if status:
        sys.exit(
            f"error: `{shlex.join(command)}` ended with status {status}. Correct what it says above, and start again."
        )


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=Path, default=HERE, help="folder of the YAML files")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/pipeline"))
    parser.add_argument("--method", choices=TRAINING, default="repulse", help="command of step 3 (repulse)")
    parser.add_argument("--from", dest="start", metavar="STEP", help="forget this step and all that follow, then run")
    parser.add_argument("--only", metavar="STEP", help="run no other step")
    options = parser.parse_args(argv)
    configs, folder = options.configs.resolve(), options.output_dir.resolve()
    steps = [step for step in STEPS if (configs / f"{step}.yaml").is_file()]
    if "3_train" not in steps:
        sys.exit(f"error: there is no file `{options.configs / '3_train.yaml'}`; copy the YAML files of {HERE} there.")
    for flag in ("start", "only"):
        name = getattr(options, flag)
        if name is not None and name not in steps:
            sys.exit(f"error: there is no step `{name}` in {options.configs}; the steps are {', '.join(steps)}.")
    if options.start is not None and options.only not in (None, options.start):
        sys.exit(
            f"error: `--from {options.start}` and `--only {options.only}` name two steps; name one, or leave one out."
        )
    done = folder / "done"
    done.mkdir(parents=True, exist_ok=True)

    def settings_of(step: str) -> dict[str, str]:
        settings = {"config": (configs / f"{step}.yaml").read_text(encoding="utf-8")}
        return settings | ({"method": options.method} if step == "3_train" else {})

    def begun_of(step: str) -> dict[str, Any]:
        """What was noted of a step; ends the script if it was begun with other settings."""
        path, settings = done / f"{step}.json", settings_of(step)
        begun = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if begun and {name: begun.get(name) for name in settings} != settings:
            sys.exit(
                f"error: {step} was begun with another `{step}.yaml` or `--method`; go back to it, or run {step} and what "
                f"follows anew with `--from {step}`."
            )
        return begun

    if options.start is not None:
        for step in steps[: steps.index(options.start)]:  # before anything is removed
            begun_of(step)
        for step in steps[steps.index(options.start) :]:
            (done / f"{step}.json").unlink(missing_ok=True)
            shutil.rmtree(folder / step, ignore_errors=True)
    for step in steps if options.only is None else steps[: steps.index(options.only) + 1]:
        path, settings = done / f"{step}.json", settings_of(step)
        if "seconds" in begun_of(step):
            print(f"{step}: done", flush=True)
            continue
        if options.only not in (None, step):
            if steps.index(step) < steps.index(options.only):
                sys.exit(f"error: {step} comes before {options.only} and is not done; leave out `--only`.")
            continue
        if step == "0_data":  # which does not go on with what it finds
            shutil.rmtree(folder / step, ignore_errors=True)
        print(f"\n{step}", flush=True)
        path.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        start = time.perf_counter()
        for command in commands_of(step, configs, folder, options.method):
            run(command, folder)
        seconds = round(time.perf_counter() - start, 1)
        path.write_text(json.dumps(settings | {"seconds": seconds}, indent=2), encoding="utf-8")  # last: it is done
        print(f"{step}: {seconds:.0f} seconds", flush=True)


if __name__ == "__main__":
    keep_writing()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    main()
