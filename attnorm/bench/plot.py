"""Figures of the reports. Matplotlib is imported here alone, and only when a figure is asked for."""

from __future__ import annotations

from pathlib import Path


def times(result: dict, path: Path) -> None:
    """Median time over length, one panel for each dtype and pass."""
    panels = list(dict.fromkeys((case["direction"], case["dtype"]) for case in result["cases"]))
    figure, axes = _figure(len(panels))
    for axis, (direction, dtype) in zip(axes, panels, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for case in result["cases"]:
            if (case["direction"], case["dtype"]) == (direction, dtype):
                for name, measured in case["results"].items():
                    lines.setdefault(name, []).append((case["length"], 1e3 * measured["median_seconds"]))
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set(title=f"{direction.replace('_', ' + ')}, {dtype}", xlabel="length", ylabel="ms")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend()
    hardware = result["hardware"]
    device = hardware["cpu"] if hardware["device"] == "cpu" else hardware["device"]
    _save(figure, f"{result['kind']}: {device}", path)


def cycles(result: dict, path: Path) -> None:
    """Total cycles at the better block, one panel for each chip and pass."""
    panels = [(chip, direction) for chip in result["chips"] for direction in ("forward", "backward")]
    figure, axes = _figure(len(panels))
    for axis, (chip, direction) in zip(axes, panels, strict=True):
        bars = {
            row: min(numbers["total"] for numbers in counted[direction].values()) / 1e3
            for row, counted in result["chips"][chip].items()
            if direction in counted and row != "matmul"
        }
        axis.barh(list(bars), list(bars.values()))
        axis.invert_yaxis()
        axis.set(title=f"{chip}, {direction}", xlabel="thousand cycles")
    _save(figure, result["kind"], path)


def _figure(panels):
    from matplotlib.figure import Figure

    columns = min(panels, 2)
    rows = -(-panels // columns)
    figure = Figure(figsize=(6 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[panels:]:
        axis.remove()
    return figure, axes[:panels]


def _save(figure, title, path):
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
