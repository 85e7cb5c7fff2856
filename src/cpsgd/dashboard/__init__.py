"""A local page in the browser: plan a protocol, watch runs, read budgets and audits. Nothing is ever written.

`folder` finds files and reads them within bounds; `runs`, `budgets` and `audits` interpret them. `plan_page` answers
the planner's questions step by step in a `worker` process. `charts` draws, `pages` fills in the templates, and `web`
serves them behind `guard`.
"""
