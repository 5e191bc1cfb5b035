"""Trust: thresholds with a guarantee, policies that abstain, a guard for anybody's policy, conformal sets."""

from cebm.trust.alarm import FailureAlarm
from cebm.trust.calibration import Calibration, calibrate, decide, doubts
from cebm.trust.guard import Guard, GuardedPolicy, Verdict
from cebm.trust.sets import ConformalSets, Interval

__all__ = [
    "Calibration",
    "ConformalSets",
    "FailureAlarm",
    "Guard",
    "GuardedPolicy",
    "Interval",
    "Verdict",
    "calibrate",
    "decide",
    "doubts",
]
