"""A matrix of cells: read from TOML, planned, measured in processes of their own, stored, resumed."""
