"""Studies beside the claims: each a file that `cebm sweep` runs, with a rule that was written before its runs.

    cebm sweep reproduction/studies/clusters.py --workers 1 --out runs/clusters
    python -m reproduction.studies clusters runs/clusters

The second command writes reproduction/results/studies/clusters.json, at any time: what has fewer seeds than its rule
needs is shown without a verdict. The ledger shows every such file as further evidence.
"""
