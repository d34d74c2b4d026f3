"""What all plots share: colours that everybody can tell apart, and figures as the same bytes each time."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A palette that the colour-blind can read (Okabe and Ito, "Color universal design", 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#000000")


def image(figure: Figure, kind: str) -> bytes:
    """The figure as `png` or `svg`, the same bytes for the same figure."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "gpuinfer", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
