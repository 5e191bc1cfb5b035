"""Units: from raw observations and actions to what an energy sees and gives, and back.

`Units` is the one place that converts; kinds of columns, relative actions, jitter and symmetries are settings of
`cebm.Inputs`. docs/units.md explains them.
"""

from cebm.units.columns import Columns, Layout, as_pieces, from_words
from cebm.units.conversion import Conversion, Form, Relative, Units
from cebm.units.fitting import HeavyTailWarning, Measured, layouts_of, located, measure
from cebm.units.kinds import Angle, Category, Constant, Kind, Quaternion, Robust
from cebm.units.variety import (
    Gaussian,
    Mirror,
    Perturbation,
    PlanarMirror,
    PlanarPose,
    Symmetry,
    extended,
    perturbed,
)

__all__ = [
    "Angle",
    "Category",
    "Columns",
    "Constant",
    "Conversion",
    "Form",
    "Gaussian",
    "HeavyTailWarning",
    "Kind",
    "Layout",
    "Measured",
    "Mirror",
    "Perturbation",
    "PlanarMirror",
    "PlanarPose",
    "Quaternion",
    "Relative",
    "Robust",
    "Symmetry",
    "Units",
    "as_pieces",
    "extended",
    "from_words",
    "layouts_of",
    "located",
    "measure",
    "perturbed",
]
