"""The kinds of cell: what a group of each may say, how it becomes cells, and how a cell of it runs."""
