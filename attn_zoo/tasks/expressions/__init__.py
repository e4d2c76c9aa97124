"""ListOps: the grammar, partial readings and the published text."""
