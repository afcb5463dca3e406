"""Plot of a simulation: samples under each policy, and live nodes, over time."""

from pathlib import Path

from oobleck.host.command import FAILED, CommandFailed
from oobleck.planner.simulate.compare import Comparison, live_nodes
from oobleck.planner.simulate.replay import Setting


def plot_comparison(found: Comparison, setting: Setting, path: Path) -> None:
    """Write the plot. Raises CommandFailed."""
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    hour_s = 3600
    for policy, result in found.results.items():
        times, samples = zip(*result.curve, strict=True)
        above.plot([time / hour_s for time in times], samples, label=policy)
    until_h = setting.until_s / hour_s
    bound = found.bounds.free_changes * setting.until_s
    above.plot([0, until_h], [0, bound], "k:", label="free changes, mean")
    above.set_ylabel("samples")
    above.legend()
    times, live = zip(*live_nodes(setting), strict=True)
    below.step([*(time / hour_s for time in times), until_h], [*live, live[-1]], where="post")
    below.set_ylabel("live nodes")
    below.set_ylim(bottom=0)
    below.set_xlabel("hours")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CommandFailed(f"--plot {path}: {error}", FAILED) from error
