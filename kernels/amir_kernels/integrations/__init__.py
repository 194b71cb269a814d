"""Drop-ins with the signatures of TRL, verl, Liger and CCE, one module each; a peer is imported only when called."""
