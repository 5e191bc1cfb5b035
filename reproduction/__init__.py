"""The paper as evidence: its claims as experiments, each with the rule that decides its verdict, their records and
their ledger. `cebm reproduce` and `python -m reproduction` run them.
"""
