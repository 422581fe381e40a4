"""Why is the GPU idle, and what would each fix gain? Two ways to a verdict.

A loop as it stands is watched: `watch` hooks into it and keeps `notes`, of stacks read from beside (`call_stacks`, and
`shares` of the time by line), of the operators of three steps (`operators`, `flow`), of graphs and gradients (`graphs`,
`soundness`). They add up to what was `seen`; `causes` has a rule for each thing that may be wrong, and `judge` names
the worst. One step is measured: `step` times its parts (`clocks`, `census`, `trace`), `diagnosis` decides from its
`numbers`, and `trials` applies each fix in turns with the step as it was, which `guard` puts back.
"""
