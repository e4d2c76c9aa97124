"""Tables of the report: the same rows as CSV, Markdown, LaTeX, HTML or terminal text."""
