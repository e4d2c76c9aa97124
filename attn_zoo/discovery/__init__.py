"""Find and import variants and tasks: modules of this package, entry points of other packages, plain files."""
