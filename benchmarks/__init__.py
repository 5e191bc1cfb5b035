"""How fast, and how steady: the benchmarks behind docs/performance.md and the study behind docs/stability.md. Run them
from the root of the repository, as `python -m benchmarks.measure`.
"""
