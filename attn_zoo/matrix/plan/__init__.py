"""From TOML to cells: what a matrix says, checked, and the cells it expands to, each runnable or refused."""
