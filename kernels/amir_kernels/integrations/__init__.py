"""Drop-in replacements with the signatures of TRL, verl, Liger and CCE, one module each.

A module imports its peer only when it is called, and only the one for TRL needs its peer.
"""
