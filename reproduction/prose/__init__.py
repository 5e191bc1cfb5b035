"""The texts of the claims, one module per claim: constant ones, and functions of the facts that a claim found."""
