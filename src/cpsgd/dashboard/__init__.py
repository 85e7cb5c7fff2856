"""A local page in the browser: plan a protocol, watch runs, read budgets and audits. Nothing is ever written.

`folder` finds and reads what may be shown, `runs`, `budgets` and `audits` make sense of it, `planning` answers the
planner's questions step by step in a `worker` process, `charts` draws, `pages` fills in the templates, and `app` serves
all that behind `guard`.
"""
