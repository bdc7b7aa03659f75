"""Loss tables of launch/hf_trainer.py and one picture of several."""

import csv
from collections.abc import Sequence
from pathlib import Path

from launch.plots import COLORS, smooth


def write(folder: Path, losses: Sequence[tuple[int, float]]) -> Path:
    """Write (step, training loss) rows to FOLDER/loss.csv and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / "loss.csv"
    with table.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("step", "train_loss"))
        writer.writerows((step, f"{loss:.6f}") for step, loss in losses)
    return table


def read(folder: Path) -> tuple[list[int], list[float]]:
    """Steps and losses of FOLDER/loss.csv."""
    with (folder / "loss.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    return [int(row["step"]) for row in rows], [float(row["train_loss"]) for row in rows]


def draw(folders: Sequence[Path]) -> Path:
    """Draw the smoothed losses of several runs into loss.png beside the first one's table."""
    import matplotlib

    matplotlib.use("Agg")  # a training job has no display
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for folder, color in zip(folders, COLORS, strict=False):
        steps, losses = read(folder)
        axis.plot(steps, losses, color=color, alpha=0.2, linewidth=1)
        curve = smooth(losses)
        axis.plot(steps, curve, color=color, label=f"{folder.name} ({curve[-1]:.3f})")
    axis.set_xlabel("optimizer steps")
    axis.set_ylabel("training loss (nats per byte)")
    axis.set_title("Hugging Face Trainer, same script")
    axis.grid(alpha=0.3)
    axis.legend()
    picture = folders[0] / "loss.png"
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
    return picture
