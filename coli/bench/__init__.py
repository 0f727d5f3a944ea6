"""What drafting is worth, measured: arms on prompts, in turn, on one loaded model (`coli bench`).

    prompts.py      the built-in prompts, one a task
    arms.py         the ways to draft that are compared
    measure.py      the loop: warm-up, alternation, cancellation -> samples
    summary.py      samples -> one row an arm and prompt, by plain statistics
    environment.py  what machine, versions and weights the numbers belong to
    render.py       rows as cells, Markdown, CSV and JSON
    figure.py       rows as a picture (needs matplotlib)
"""
