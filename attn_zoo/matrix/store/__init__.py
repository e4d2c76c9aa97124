"""A results folder, written: records, repeats, locks; each file is whole or absent."""
