"""The checks, by what they are about: each file has its `CHECKS`, and `all_checks` is the list of them all."""
