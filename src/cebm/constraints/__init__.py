"""Constraints on actions at test time: the contract, ready ones, and a policy that obeys them."""

from cebm.constraints.base import Constraint, EnergyFunction, Predicate, Scene, Weighted, allowed
from cebm.constraints.policy import ConstrainedPolicy, Share
from cebm.constraints.ready import HalfPlane, JointLimits, KeepOutBox, KeepOutCircle, MaxStep, NearPlan

__all__ = [
    "ConstrainedPolicy",
    "Constraint",
    "EnergyFunction",
    "HalfPlane",
    "JointLimits",
    "KeepOutBox",
    "KeepOutCircle",
    "MaxStep",
    "NearPlan",
    "Predicate",
    "Scene",
    "Share",
    "Weighted",
    "allowed",
]
