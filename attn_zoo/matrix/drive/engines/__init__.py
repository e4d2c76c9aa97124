"""Who supervises the workers: this machine (`local`) or a Ray cluster (`ray`). The driver alone writes records."""
