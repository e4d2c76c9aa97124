"""A matrix of cells: read from TOML, planned, measured in processes of their own, stored, resumed.

plan/   TOML to cells, each runnable or refused
kinds/  the kinds of cell: what a group of each says, how it becomes cells, how a cell of it runs
drive/  the driver: which cells run when, worker processes and their supervision
cell/   what a worker process does
store/  the results folder, written (`attn_zoo.folder` reads it)

Cells are grouped in four ways:

lane     cells that run one after another under one supervisor, shorter sequences first
bundle   cells that one request to a worker process runs: a single one, or several that are timed in turns
repeat   one of the processes that time the same cell
attempt  one try at a bundle; one that was killed from outside gets a second
"""
