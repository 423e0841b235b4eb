"""The paper, table by table: which trainings an item needs, what is measured of them, and how the claims come out.

Begin with `catalogue` (every item), then `trainings` and `grid` (the runs behind them), `tables` and `deployments`
(the measurements), `claims`, `judges` and `deployment_judges` (the verdicts); `report` writes results/README.md from
the stored JSON.
"""
