"""Figures of a report and the parts that maps share with them: one page layout, axes, labels, looks."""
