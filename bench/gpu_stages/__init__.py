"""The stages of `gpu_check.py`, one module each: its `parts(sizes)` lists pieces of work that yield rows.

`stage.py` has the list of stages and the fields of a row, `runner.py` runs each stage in its own process, `sizes.py`
has what is measured on a GPU and in a rehearsal, `rates.py` times and predicts, `judging.py` compares with float64.
"""
