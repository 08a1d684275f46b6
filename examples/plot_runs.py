"""Draws the base loss of several trainings over their steps (as figure 4 of the paper does).

    python examples/plot_runs.py --output base_loss.png "head off=outputs/off" "with curriculum=outputs/curriculum"

Each run is a name and the `output_dir` of a `domino train` that ended; the loss is averaged over a window of steps.
"""

import argparse
import json
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt


def read_run(text: str, value: str) -> tuple[str, list[int], list[float]]:
    name, equals, folder = text.partition("=")
    path = Path(folder) / "trainer_state.json"
    if not equals or not path.exists():
        raise SystemExit(f"{text!r}: expected NAME=FOLDER, where FOLDER holds the trainer_state.json of a training.")
    entries = [entry for entry in json.loads(path.read_text())["log_history"] if value in entry]
    return name, [entry["step"] for entry in entries], [entry[value] for entry in entries]


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place."""
    parts = (values[max(0, i - window + 1) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", help="NAME=FOLDER")
    parser.add_argument("--value", default="base_loss", help="logged value to draw")
    parser.add_argument("--window", type=int, default=8, help="logged values averaged at each place")
    parser.add_argument("--output", required=True, help=".png or .svg file")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for run in arguments.runs:
        name, steps, values = read_run(run, arguments.value)
        axes.plot(steps, smooth(values, arguments.window), label=name, linewidth=1.5)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(arguments.value.replace("_", " "))
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.output, dpi=160)


if __name__ == "__main__":
    main()
