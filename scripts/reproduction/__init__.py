"""The paper, table by table: the trainings behind each table or figure (an item), its measurement, and the claims.

Begin with `catalogue` (every item), then `trainings` and `grid` (the runs behind them), `tables` and `deployments`
(the measurements), `claims`, `judges`, `deployment_judges` and `comparison_judges` (the verdicts); `report` and
`scale_page` write results/README.md and the pages that it opens from the stored JSON.
"""
