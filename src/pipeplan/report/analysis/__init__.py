"""What there is to see in a plan, worked out once for every renderer.

`plan_analysis` is the door. The other modules each answer one question with arrays: `items` (what
happens when), `waits` (what each item waited for), `idle` (where the time goes), `memory`, `cuts`,
`links`, `summary` (the timeline of a plan too large to show item by item).
"""
